"""What /api/chat and /api/generate take: fields, what is refused and ignored, and what they ask for in OpenAI's words.

Numbers that shape the answer stand in `options`. What a request leaves open is the model's own here, too: Ollama's
defaults (temperature 0.8, top_k 40) are not taken over.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.interfaces.server.openai.known_fields import REFUSED_BY_ALL, rules_for
from quire.interfaces.server.openai.rendering import NO_EFFORT, thinking_switch
from quire.interfaces.server.openai.requests import ChatRequest, CompletionRequest
from quire.interfaces.server.openai.sampling import generation_params
from quire.interfaces.server.wire.errors import invalid
from quire.interfaces.server.wire.field_rules import FieldRules, Refused, text_in
from quire.renderer.image_parts import ImagePart

# Ollama's images are bare base64; what kind they are of is seen in their bytes.
_IMAGE = "data:image/any;base64,"


_TIME = re.compile(r"(-?)((?:\d{1,9}(?:\.\d{1,9})?(?:h|ms|m|s)?){1,4})")
_PART = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|s)?")
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


class Options(msgspec.Struct, kw_only=True):
    """`options`: how tokens are drawn, and where the answer ends."""

    num_predict: Annotated[
        int | None, Meta(description="most tokens; cut to what the model takes, which -1 and -2 mean")
    ] = None
    temperature: Annotated[float | None, Meta(description="0 is greedy")] = None
    top_k: Annotated[int | None, Meta(description="0 means all tokens")] = None
    top_p: Annotated[float | None, Meta(description="nucleus sampling")] = None
    min_p: Annotated[float | None, Meta(description="least share of the best token's probability")] = None
    seed: Annotated[int | None, Meta(description="same seed and options, same text; -1 is none")] = None
    stop: Annotated[str | list[str] | None, Meta(description="texts that end the answer")] = None
    repeat_penalty: Annotated[float | None, Meta(description="repetition_penalty of a chat: prompt and answer")] = None
    presence_penalty: Annotated[float | None, Meta(description="as in a chat")] = None
    frequency_penalty: Annotated[float | None, Meta(description="as in a chat")] = None


# Ollama's own default asks for nothing; without it the same text comes out
_DEFAULT_WINDOW = 64
_REFUSED_OPTIONS = {
    **{
        name: REFUSED_BY_ALL[name]
        for name in ("tfs_z", "typical_p", "mirostat", "dynatemp_range", "xtc_probability", "dry_multiplier")
    },
    "penalize_newline": Refused("a line break is penalised as any token", (True,)),
    "repeat_last_n": Refused(REFUSED_BY_ALL["repeat_last_n"].reason, (-1, _DEFAULT_WINDOW)),
}
_LOADING = "how a model is loaded is decided when the server starts"
_IGNORED_OPTIONS = {
    "num_ctx": "a request may be as long as the server's max_model_len; longer ones are refused",
    "num_keep": "prompts are never cut",
    "mirostat_tau": "only with mirostat, which is refused unless it is 0",
    "mirostat_eta": "only with mirostat, which is refused unless it is 0",
    **dict.fromkeys(
        ("num_batch", "num_gpu", "main_gpu", "num_thread", "low_vram", "f16_kv", "logits_all", "vocab_only",
         "use_mmap", "use_mlock", "embedding_only", "numa"),
        _LOADING,
    ),
}  # fmt: skip
OPTION_RULES = FieldRules(Options, _REFUSED_OPTIONS, _IGNORED_OPTIONS)


class OllamaFields(msgspec.Struct, kw_only=True):
    """What both have."""

    model: Annotated[str, Meta(description="name of the served model; `:latest` behind it means nothing")]
    stream: Annotated[bool | None, Meta(description="lines of JSON; on unless false")] = True
    options: Annotated[Options | None, Meta(description="temperature, num_predict, stop and the like")] = None
    format: Annotated[str | dict[str, Any] | None, Meta(description="json, or a JSON schema")] = None
    think: Annotated[
        bool | str | None, Meta(description="whether, or how much, to think: a reasoning_effort of a chat")
    ] = None
    keep_alive: Annotated[
        float | str | None,
        Meta(description="seconds, or such as 5m, for which a model that was loaded on demand stays; -1 keeps it"),
    ] = None
    logprobs: Annotated[bool | None, Meta(description="log-probabilities of the answer's tokens")] = None
    top_logprobs: Annotated[int | None, Meta(description="and those of so many best ones")] = None

    def __post_init__(self) -> None:
        # null asks for nothing
        self.stream = self.stream is not False


class OllamaChatRequest(OllamaFields, kw_only=True):
    """POST /api/chat."""

    messages: Annotated[
        list[Any], Meta(description="with role, content, images (base64), thinking, tool_calls, tool_name")
    ] = []
    tools: Annotated[list[dict[str, Any]] | None, Meta(description="functions that the model may call")] = None


class OllamaGenerateRequest(OllamaFields, kw_only=True):
    """POST /api/generate."""

    prompt: Annotated[str, Meta(description="a user's message; with raw, or to a model without template, a text")] = ""
    suffix: Annotated[str | None, Meta(description="what follows the answer, for models that fill in the middle")] = (
        None
    )
    system: Annotated[str | None, Meta(description="a message of the role system before it")] = None
    images: Annotated[list[str] | None, Meta(description="in base64")] = None
    raw: Annotated[bool | None, Meta(description="the prompt is continued as it stands")] = None


REFUSED = {
    name: Refused(f"it is one of the options; write options.{name}")
    for name in (*Options.__struct_fields__, "num_ctx", "repeat_last_n")
} | {
    "truncate": Refused("prompts are never cut; shorten the prompt", (False,)),
    "shift": Refused("an answer ends where the model's length does", (False,)),
    "template": Refused("templates are not taken from requests", ("",)),
    "context": Refused("tokens of earlier answers are not returned; send the messages to /api/chat", ([],)),
}
CHAT_RULES = rules_for(OllamaChatRequest, REFUSED, inner={"options": OPTION_RULES})
GENERATE_RULES = rules_for(OllamaGenerateRequest, REFUSED, inner={"options": OPTION_RULES})

# What OpenAI's requests call their fields, and what they are called here.
NAMES = {
    r"max_completion_tokens|max_tokens": "options.num_predict",
    r"repetition_penalty": "options.repeat_penalty",
    r"(temperature|top_k|top_p|min_p|seed|stop|presence_penalty|frequency_penalty)": r"options.\1",
    r"response_format": "format",
    r"reasoning_effort": "think",
}


def seconds_of(keep_alive: float | str | None) -> float | None:
    """As Go writes times; None: nothing was said."""
    if keep_alive is None or isinstance(keep_alive, int | float):
        return keep_alive
    parts = _TIME.fullmatch(keep_alive.strip())
    if parts is None:
        raise invalid(f"keep_alive={keep_alive[:40]!r}: must be seconds, or such as 5m or 1h30m.", "keep_alive")
    seconds = sum(float(number) * _UNITS[unit or "s"] for number, unit in _PART.findall(parts[2]))
    return -seconds if parts[1] else seconds


def asks_for_nothing(body: OllamaChatRequest | OllamaGenerateRequest) -> bool:
    """To have the model in memory, or out of it, is all that such a request wants."""
    return not (body.messages if isinstance(body, OllamaChatRequest) else body.prompt)


def check_options(body: OllamaChatRequest | OllamaGenerateRequest) -> None:
    """As of a request that is answered, for one that only loads."""
    generation_params(CompletionRequest(prompt="", **_shared(body)), {})


def chat_of(body: OllamaChatRequest | OllamaGenerateRequest) -> ChatRequest:
    messages = _messages(body.messages) if isinstance(body, OllamaChatRequest) else _as_messages(body)
    effort, template_kwargs = _thinking(body.think)
    return ChatRequest(
        messages=messages,
        tools=body.tools if isinstance(body, OllamaChatRequest) else None,
        max_completion_tokens=_most_tokens(body.options),
        reasoning_effort=effort,
        chat_template_kwargs=template_kwargs,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        continue_final_message=messages[-1].get("role") == "assistant" or None,
        **_shared(body),
    )


def completion_of(body: OllamaGenerateRequest, prompt: str) -> CompletionRequest:
    """A text that is continued as it stands."""
    for name in ("system", "images"):
        if getattr(body, name):
            raise invalid(f"{name}: not with raw=true, suffix, or a model without chat template.", name)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs: needs logprobs=true.", "top_logprobs")
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return CompletionRequest(
        prompt=prompt, max_tokens=_most_tokens(body.options), logprobs=num_logprobs, **_shared(body)
    )


def _shared(body: OllamaFields) -> dict[str, Any]:
    """By the names that OpenAI's requests have for them."""
    options = body.options or Options()
    values: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("temperature", "top_k", "top_p", "min_p", "stop", "presence_penalty", "frequency_penalty")
    }
    return {
        **values,
        "repetition_penalty": options.repeat_penalty,
        "seed": None if options.seed == -1 else options.seed,
        "response_format": _response_format(body.format),
    }


def _most_tokens(options: Options | None) -> int | None:
    asked = None if options is None else options.num_predict
    return None if asked is None or asked <= 0 else asked


def _response_format(form: str | dict[str, Any] | None) -> dict[str, Any] | None:
    match form:
        case None | "":
            return None
        case "json":
            return {"type": "json_object"}
        case dict():
            return {"type": "json_schema", "json_schema": {"schema": form}}
    raise invalid(f"format={form[:40]!r}: must be json or a JSON schema.", "format")


def _thinking(think: bool | str | None) -> tuple[str | None, dict[str, Any] | None]:
    """As an effort, and as values for the chat template."""
    match think:
        case None | "":
            return None, None
        case True:
            return None, thinking_switch(is_on=True)
        case False:
            return NO_EFFORT, None
    return think, None


def _as_messages(body: OllamaGenerateRequest) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": body.system}] if body.system else []
    return [*system, {"role": "user", "content": _content(body.prompt, body.images, "images")}]


def _messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Calls have no ids here: a result belongs to the first call of its tool that has none yet."""
    made: list[dict[str, Any]] = []
    unanswered = _Unanswered([])
    num_calls = 0
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, dict):
            raise invalid(f"{where}: must be an object with a role and a content.", where)
        kept = {name: value for name, value in message.items() if name not in ("images", "tool_calls", "tool_name")}
        if message.get("images"):
            kept["content"] = _content(message.get("content") or "", message["images"], f"{where}.images")
        calls = message.get("tool_calls")
        if calls:
            kept["tool_calls"] = _calls(calls, f"{where}.tool_calls", num_calls)
            unanswered = _Unanswered(kept["tool_calls"])
            num_calls += len(kept["tool_calls"])
        if message.get("role") == "tool" and kept.get("tool_call_id") is None:
            kept["tool_call_id"] = unanswered.take(message.get("tool_name") or message.get("name"))
        made.append(kept)
    return made


def _calls(calls: Any, where: str, num_before: int) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise invalid(f"{where}: must be a list.", where)
    made = []
    for number, call in enumerate(calls):
        place = f"{where}[{number}].function"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise invalid(f"{place}: must be an object with a name and arguments.", place)
        kept = {"name": text_in(function, "name", place), "arguments": function.get("arguments") or {}}
        call_id = call.get("id") or f"call_{num_before + number}"
        made.append({"id": str(call_id), "type": "function", "function": kept})
    return made


class _Unanswered:
    """Calls of one message without a result. Each is looked at once or twice, however many there are."""

    def __init__(self, calls: list[dict[str, Any]]) -> None:
        self._ids = [call["id"] for call in calls]
        self._waiting = deque(range(len(calls)))
        self._waiting_by_name: dict[str, deque[int]] = {}
        for number, call in enumerate(calls):
            self._waiting_by_name.setdefault(call["function"]["name"], deque()).append(number)
        self._answered: set[int] = set()

    def take(self, tool: Any) -> str:
        """The id of the first one, of this tool if it is named."""
        waiting = self._waiting
        if tool is not None:
            waiting = self._waiting_by_name.get(tool, deque()) if isinstance(tool, str) else deque()
        while waiting:
            number = waiting.popleft()
            if number not in self._answered:
                self._answered.add(number)
                return str(self._ids[number])
        return "call_unknown"


def _content(text: Any, images: Any, where: str) -> Any:
    """With its images, which stand before the text."""
    if not images:
        return text
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise invalid(f"{where}: must be a list of images in base64.", where)
    parts: list[Mapping[str, Any]] = [
        ImagePart({"type": "image_url", "image_url": {"url": _url(image)}}, f"{where}[{number}]")
        for number, image in enumerate(images)
    ]
    return [*parts, {"type": "text", "text": text}]


def _url(image: str) -> str:
    return image if image.startswith("data:") else _IMAGE + image
