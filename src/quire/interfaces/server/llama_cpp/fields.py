"""What /completion and /infill take: fields, what is refused and ignored, and the completion that they ask for."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.interfaces.server.openai.known_fields import REFUSED_BY_ALL, rules_for
from quire.interfaces.server.openai.requests import CompletionRequest
from quire.interfaces.server.wire.errors import invalid
from quire.interfaces.server.wire.field_rules import Refused, text_in

# llama.cpp's word for "never"
_BANNED = -100.0
_MOST_EXTRA = 128


class LlamaCppFields(msgspec.Struct, kw_only=True):
    """What both have."""

    model: Annotated[str | None, Meta(description="name of the served model; may be left out")] = None
    stream: Annotated[bool | None, Meta(description="events of one token or more")] = None
    n_predict: Annotated[int | None, Meta(description="most tokens; cut to what the model takes, which -1 means")] = (
        None
    )
    temperature: Annotated[float | None, Meta(description="0 is greedy")] = None
    top_k: Annotated[int | None, Meta(description="0 means all tokens")] = None
    top_p: Annotated[float | None, Meta(description="nucleus sampling")] = None
    min_p: Annotated[float | None, Meta(description="least share of the best token's probability")] = None
    seed: Annotated[int | None, Meta(description="same seed and fields, same text; -1 is none")] = None
    stop: Annotated[str | list[str] | None, Meta(description="texts that end the answer")] = None
    repeat_penalty: Annotated[float | None, Meta(description="repetition_penalty of /v1/completions")] = None
    presence_penalty: Annotated[float | None, Meta(description="as in /v1/completions")] = None
    frequency_penalty: Annotated[float | None, Meta(description="as in /v1/completions")] = None
    ignore_eos: Annotated[bool | None, Meta(description="do not end at the end-of-text token")] = None
    logit_bias: Annotated[
        list[list[Any]] | dict[int, float] | None, Meta(description="pairs of token id and bias; false bans it")
    ] = None
    grammar: Annotated[str | None, Meta(description="the answer follows it, in GBNF")] = None
    json_schema: Annotated[dict[str, Any] | None, Meta(description="the answer follows it")] = None
    n_probs: Annotated[int | None, Meta(description="log-probabilities of so many best tokens")] = None
    return_tokens: Annotated[bool | None, Meta(description="the ids of the answer's tokens")] = None
    timings_per_token: Annotated[bool | None, Meta(description="timings in each event")] = None


class CompletionOfLlamaCpp(LlamaCppFields, kw_only=True):
    """POST /completion."""

    prompt: Annotated[str | list[int], Meta(description="one text, or its tokens")]


class InfillRequest(LlamaCppFields, kw_only=True):
    """POST /infill."""

    input_prefix: Annotated[str, Meta(description="what stands before the hole")]
    input_suffix: Annotated[str, Meta(description="what stands behind it")]
    prompt: Annotated[str | None, Meta(description="how what is filled in begins")] = None
    input_extra: Annotated[
        list[dict[str, Any]] | None, Meta(description="other files, with text and filename; at most 128")
    ] = None


_NAMES = (
    "repeat_last_n",
    "dry_multiplier",
    "xtc_probability",
    "typical_p",
    "mirostat",
    "dynatemp_range",
    "top_n_sigma",
)
REFUSED = {
    **{name: REFUSED_BY_ALL[name] for name in _NAMES},
    # its default asks for nothing
    "repeat_last_n": Refused(REFUSED_BY_ALL["repeat_last_n"].reason, (-1, 64)),
    "max_tokens": Refused("it belongs to /v1/completions; use n_predict"),
    "messages": Refused("it belongs to /v1/chat/completions; use prompt"),
    "image_data": Refused("images are parts of messages in /v1/chat/completions", ([],)),
}
_IGNORED = {"return_progress": "progress is in /metrics and on the page"}
COMPLETION_RULES = rules_for(CompletionOfLlamaCpp, REFUSED, ignored=_IGNORED)
INFILL_RULES = rules_for(InfillRequest, REFUSED, ignored=_IGNORED)

# What a completion calls its fields, and what they are called here.
NAMES = {
    r"max_tokens": "n_predict",
    r"repetition_penalty": "repeat_penalty",
    r"logprobs": "n_probs",
    r"structured_outputs": "grammar",
    r"response_format": "json_schema",
}


def completion_of(body: LlamaCppFields, prompt: str | list[int]) -> CompletionRequest:
    if body.grammar and body.json_schema is not None:
        raise invalid("json_schema: not together with grammar; an answer has one form.", "json_schema")
    form = None if body.json_schema is None else {"type": "json_schema", "json_schema": {"schema": body.json_schema}}
    return CompletionRequest(
        prompt=prompt,
        max_tokens=None if body.n_predict is None or body.n_predict < 0 else body.n_predict,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        seed=None if body.seed == -1 else body.seed,
        stop=body.stop,
        repetition_penalty=body.repeat_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        ignore_eos=body.ignore_eos,
        logit_bias=_bias(body.logit_bias),
        logprobs=body.n_probs or None,
        structured_outputs={"grammar": body.grammar} if body.grammar else None,
        response_format=form,
    )


def before_the_hole(body: InfillRequest) -> str:
    """The prefix, behind other files."""
    extra = body.input_extra or []
    if len(extra) > _MOST_EXTRA:
        raise invalid(f"input_extra: {len(extra)} entries, at most {_MOST_EXTRA} are allowed.", "input_extra")
    texts = []
    for number, file in enumerate(extra):
        name = file.get("filename")
        text = text_in(file, "text", f"input_extra[{number}]")
        texts.append(f"{name}\n{text}\n" if isinstance(name, str) else f"{text}\n")
    return "".join([*texts, body.input_prefix])


def _bias(given: list[list[Any]] | dict[int, float] | None) -> dict[int, float] | None:
    if not isinstance(given, list):
        return given
    biases: dict[int, float] = {}
    for number, pair in enumerate(given):
        match pair:
            case [int(token_id), False]:
                biases[token_id] = _BANNED
            case [int(token_id), int() | float() as bias]:
                biases[token_id] = bias
            case _:
                where = f"logit_bias[{number}]"
                raise invalid(f"{where}: must be a token id and a number or false.", "logit_bias")
    return biases
