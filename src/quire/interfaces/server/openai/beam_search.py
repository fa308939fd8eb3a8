"""`use_beam_search`: n beams are followed, and all of them are choices, best first. Names and meanings are vLLM's.

Fields that draw tokens or change their probabilities have no meaning for beams: one that asks for something is refused.
"""

from __future__ import annotations

from typing import Any

from quire.beam_search_params import BeamSearchParams
from quire.errors import RequestError
from quire.interfaces.server.openai.requests import GenerationFields
from quire.interfaces.server.wire.errors import ApiError, invalid, renamed

# BeamSearchParams' names for what the request says under another
NAMES = {"beam_width": "n"}
_FROM_REQUEST = (
    "length_penalty", "early_stopping", "temperature", "ignore_eos", "stop_token_ids", "skip_special_tokens",
)  # fmt: skip
# Of the model's recommendations only the length is for beams; the others are for drawing.
_FROM_DEFAULTS = ("max_tokens",)

# With use_beam_search: field -> the values that ask for nothing.
NOT_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "seed": (),
    "stop": ([],),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "min_tokens": (0,),
    "thinking_token_budget": (),
    "include_stop_str_in_output": (False,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
# The same without it.
ONLY_WITH_BEAMS: dict[str, tuple[Any, ...]] = {"length_penalty": (1,), "early_stopping": (False,)}


def check_fields(fields: GenerationFields) -> None:
    """Raises ApiError for a field that would be ignored."""
    for name, neutral in (NOT_WITH_BEAMS if fields.use_beam_search else ONLY_WITH_BEAMS).items():
        value = getattr(fields, name)
        if value is not None and value not in neutral:
            raise _has_no_effect(name, value, is_beams=bool(fields.use_beam_search))


def _has_no_effect(name: str, value: Any, *, is_beams: bool) -> ApiError:
    shown = repr(value)
    said = f"{name}={shown if len(shown) <= 60 else '...'}"
    if is_beams:
        why = "it has no effect on beams, which are the most probable continuations as the model sees them"
        return invalid(f"{said}: not with use_beam_search=true; {why}. Leave it out, or sample.", name)
    return invalid(f"{said}: only with use_beam_search=true; nothing of the kind is searched here. Leave it out.", name)


def beam_search_params(fields: GenerationFields, defaults: dict[str, Any], decided: dict[str, Any]) -> BeamSearchParams:
    """`decided` is what the endpoint derives itself (max_tokens, logprobs) and wins over the defaults."""
    values = {name: defaults[name] for name in _FROM_DEFAULTS if name in defaults}
    for name in _FROM_REQUEST:
        value = getattr(fields, name)
        if value is not None:
            values[name] = value
    if "prompt_logprobs" in decided:
        raise invalid("logprobs: not with echo and use_beam_search=true; beams do not score their prompt.", "logprobs")
    width = 1 if fields.n is None else fields.n
    try:
        return BeamSearchParams(**{**values, **decided, "beam_width": width})
    except RequestError as error:
        raise renamed(error, NAMES) from None
