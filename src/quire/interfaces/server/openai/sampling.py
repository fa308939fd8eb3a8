"""From a request's fields to SamplingParams or BeamSearchParams. What the request leaves open comes from
generation_config.json.

`use_beam_search`: n beams are followed, and all of them are choices, best first. Names and meanings are vLLM's. Fields
that forbid tokens or give an answer a form have no meaning for beams: one that asks for something is refused.

A form of the answer is asked for by OpenAI's and vLLM's fields. A mistake in it is found by StructuredOutputsParams, or
later by the checking process; both call the field `structured_outputs`. `form_names` has the name under which the
client gave it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from quire.beam_search_params import BeamSearchParams, GenerationParams
from quire.errors import ContextLengthError, RequestError, suggestion
from quire.interfaces.server.openai.requests import CompletionRequest, GenerationFields, StreamOptions
from quire.interfaces.server.wire.errors import ApiError, invalid, renamed
from quire.sampling_params import SamplingParams
from quire.structured_outputs_params import StructuredOutputsParams

# Taken over under their own names.
_FROM_REQUEST = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "stop", "stop_token_ids", "bad_words", "ignore_eos", "min_tokens", "thinking_token_budget",
    "skip_special_tokens", "include_stop_str_in_output", "logit_bias", "allowed_token_ids", "prompt_logprobs",
    "logits_processors", "logprob_token_ids", "watermarking",
)  # fmt: skip

# OpenAI's; above it there is little but noise
MAX_TEMPERATURE = 2.0
# OpenAI's for a completion; a chat has no such default
_DEFAULT_MAX_TOKENS = 16
# BeamSearchParams' names for what the request says under another
BEAM_NAMES = {"beam_width": "n"}
_FOR_BEAMS = (
    "length_penalty", "early_stopping", "temperature", "ignore_eos", "stop_token_ids", "skip_special_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "top_p", "top_k", "do_sample", "seed",
)  # fmt: skip
# Of the model's recommendations only the length is for beams; the others are for drawing.
_DEFAULTS_FOR_BEAMS = ("max_tokens",)

# With use_beam_search: field -> the values that ask for nothing.
NOT_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
    "min_p": (0,),
    "stop": ([],),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "thinking_token_budget": (),
    "include_stop_str_in_output": (False,),
    "prompt_logprobs": (),
    "logprob_token_ids": (),
    "watermarking": (False,),
}
# The same without it.
ONLY_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "early_stopping": (False,),
    "do_sample": (False,),
}

FORMS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
_HALF_64 = 2**63
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_SCHEMA_KEYS = ("name", "schema", "strict", "description")
_TEXT = {"type": "text"}


def generation_params(fields: GenerationFields, defaults: dict[str, Any], **decided: Any) -> GenerationParams:
    """`decided` holds what the endpoint derives itself (max_tokens, logprobs) and wins over the defaults."""
    _check_fields(fields)
    if fields.temperature is not None and fields.temperature > MAX_TEMPERATURE:
        text = f"temperature={fields.temperature:g}: must be between 0 and {MAX_TEMPERATURE:g}."
        raise invalid(text, "temperature")
    _check_seed(fields.seed)
    if fields.use_beam_search:
        return _beam_params(fields, defaults, decided)
    values = dict(defaults)
    for name in _FROM_REQUEST:
        value = getattr(fields, name)
        if value is not None:
            values[name] = value
    values |= decided
    most = values.get("max_tokens")
    if fields.min_tokens is None and most is not None and values.get("min_tokens", 0) > most:
        # the model's own least number is no reason to refuse who asks for fewer
        values["min_tokens"] = most
    return SamplingParams(**values, structured_outputs=_structured_outputs_of(fields))


def _check_seed(seed: int | None) -> None:
    """OpenAI's bounds; in Python there are twice as many seeds. The last word is vLLM's."""
    if seed is None or -_HALF_64 <= seed < _HALF_64:
        return
    code = "less_than_equal" if seed > 0 else "greater_than_equal"
    raise invalid(f"seed={str(seed)[:40]}: must be at least -2**63 and at most 2**63 - 1 ({code}).", "seed", code)


def completion_params(body: CompletionRequest, defaults: dict[str, Any]) -> GenerationParams:
    decided: dict[str, Any] = {}
    if body.max_tokens == 0 and not body.echo:
        raise invalid(
            "max_tokens=0: only with echo=true, which returns the prompt alone; else at least 1.", "max_tokens"
        )
    if body.max_tokens == 0 and body.logprob_token_ids is not None:
        raise invalid("logprob_token_ids: not with max_tokens=0: they are of generated tokens.", "logprob_token_ids")
    if body.max_tokens is not None:
        # the prompt alone: one token is generated, because the engine does no less, and left out
        decided["max_tokens"] = 1 if body.max_tokens == 0 and body.echo else body.max_tokens
    elif "max_tokens" not in defaults:
        decided["max_tokens"] = _DEFAULT_MAX_TOKENS
    if body.logprobs is not None:
        decided["logprobs"] = body.logprobs
        if body.echo and body.prompt_logprobs is None:
            decided["prompt_logprobs"] = body.logprobs
    return generation_params(body, defaults, **decided)


def check_length(num_prompt: int, name: str, max_tokens: int | None, limit: int, *, what: str) -> None:
    """OpenAI's words: clients look for their beginning. `name` is the field that `max_tokens` came from."""
    opening = f"This model's maximum context length is {limit} tokens. However, "
    if num_prompt >= limit:
        raise ContextLengthError(
            f"{opening}your {what} resulted in {num_prompt} tokens. Please reduce the length of the {what}.",
            param=what,
            num_prompt_tokens=num_prompt,
        )
    if max_tokens is not None and num_prompt + max_tokens > limit:
        raise ContextLengthError(
            f"{opening}you requested {num_prompt + max_tokens} tokens ({num_prompt} in the {what}, {max_tokens} in the "
            f"completion). Please reduce the length of the {what} or completion.",
            param=name,
            num_prompt_tokens=num_prompt,
        )


def count_always(fields: GenerationFields) -> None:
    """As the option force_include_usage says."""
    if fields.stream:
        asked = fields.stream_options or StreamOptions()
        fields.stream_options = structs.replace(asked, include_usage=True, continuous_usage_stats=True)


def check_stream_options(fields: GenerationFields) -> None:
    """What goes with a stream only, and what never does."""
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options: only with stream=true.", "stream_options")
    if fields.stream and fields.prompt_logprobs is not None:
        raise invalid("prompt_logprobs: not with stream=true; they are of the prompt as a whole.", "prompt_logprobs")


# ---- beams -----------------------------------------------------------------------------------------------------------


def _check_fields(fields: GenerationFields) -> None:
    """Raises ApiError for a field that would be ignored."""
    for name, neutral in (NOT_WITH_BEAMS if fields.use_beam_search else ONLY_WITH_BEAMS).items():
        value = getattr(fields, name)
        if value is not None and value not in neutral:
            raise _has_no_effect(name, value, is_beams=bool(fields.use_beam_search))


def _has_no_effect(name: str, value: Any, *, is_beams: bool) -> ApiError:
    shown = repr(value)
    said = f"{name}={shown if len(shown) <= 60 else '...'}"
    if is_beams:
        why = "it has no effect on beams, of which none is forbidden but by a form"
        return invalid(f"{said}: not with use_beam_search=true; {why}. Leave it out, or sample.", name)
    return invalid(f"{said}: only with use_beam_search=true; nothing of the kind is searched here. Leave it out.", name)


def _beam_params(fields: GenerationFields, defaults: dict[str, Any], decided: dict[str, Any]) -> BeamSearchParams:
    """`decided` is what the endpoint derives itself (max_tokens, logprobs) and wins over the defaults."""
    values = {name: defaults[name] for name in _DEFAULTS_FOR_BEAMS if name in defaults}
    for name in _FOR_BEAMS:
        value = getattr(fields, name)
        if value is not None:
            values[name] = value
    if "prompt_logprobs" in decided:
        raise invalid("logprobs: not with echo and use_beam_search=true; beams do not score their prompt.", "logprobs")
    width = 1 if fields.n is None else fields.n
    try:
        values |= {**decided, "beam_width": width, "structured_outputs": _structured_outputs_of(fields)}
        return BeamSearchParams(**values)
    except RequestError as error:
        raise renamed(error, BEAM_NAMES) from None


# ---- forms -----------------------------------------------------------------------------------------------------------


def _structured_outputs_of(fields: GenerationFields) -> StructuredOutputsParams | None:
    """The form that is asked for, if one is."""
    names = _given(fields)
    if not names:
        return None
    if len(names) > 1:
        raise invalid(f"{names[1]}: not together with {names[0]}; an answer has one form. Give one of them.", names[1])
    [name] = names
    value = getattr(fields, name)
    try:
        return StructuredOutputsParams(**_parameters(name, value))
    except RequestError as error:
        raise renamed(error, form_names(fields)) from None


def form_names(fields: GenerationFields) -> Mapping[str, str]:
    """For `renamed`."""
    names = _given(fields)
    return {"structured_outputs": names[0]} if names else {}


def _given(fields: GenerationFields) -> list[str]:
    values = {name: getattr(fields, name) for name in FORMS}
    return [name for name, value in values.items() if value is not None and value != _TEXT]


def _parameters(name: str, value: Any) -> dict[str, Any]:
    if name == "response_format":
        return _of_response_format(value)
    if name == "structured_outputs":
        return dict(value)
    return {name.removeprefix("guided_"): value}


def _of_response_format(value: dict[str, Any]) -> dict[str, Any]:
    match value.get("type"):
        case "json_object":
            _check_keys(value, ("type",), "response_format")
            return {"json_object": True}
        case "json_schema":
            _check_keys(value, ("type", "json_schema"), "response_format")
            return {"json": _schema_in(value.get("json_schema"))}
        case "structural_tag":
            return {"structural_tag": value}
        case other:
            raise invalid(f"response_format.type={other!r}: must be one of {', '.join(_FORMATS)}.", "response_format")


def _schema_in(value: Any) -> Any:
    """`strict` makes no difference: what comes out follows the schema in either case."""
    where = "response_format.json_schema"
    if not isinstance(value, dict) or not isinstance(value.get("schema"), dict):
        text = f'{where}: must be {{"name": text, "schema": a JSON schema, "strict": true or false}}.'
        raise invalid(text, "response_format")
    _check_keys(value, _SCHEMA_KEYS, where)
    if not isinstance(value.get("strict"), bool | None):
        raise invalid(f"{where}.strict={value['strict']!r}: must be true or false.", "response_format")
    if not isinstance(value.get("name"), str | None) or not isinstance(value.get("description"), str | None):
        raise invalid(f"{where}: name and description must be texts.", "response_format")
    return value["schema"]


def _check_keys(value: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in value:
        if name not in known:
            raise invalid(f"{where}.{name}: there is no such field.{suggestion(name, known)}", "response_format")
