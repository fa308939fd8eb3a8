"""From a request's fields to SamplingParams or BeamSearchParams. What the request leaves open comes from
generation_config.json."""

from __future__ import annotations

from typing import Any

from quire.beam_search_params import GenerationParams
from quire.errors import ContextLengthError
from quire.interfaces.server.openai.beam_search import beam_search_params, check_fields
from quire.interfaces.server.openai.requests import CompletionRequest, GenerationFields
from quire.interfaces.server.openai.structured_outputs import structured_outputs_of
from quire.interfaces.server.wire.errors import invalid
from quire.sampling_params import SamplingParams

# Taken over under their own names.
_FROM_REQUEST = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "stop", "stop_token_ids", "bad_words", "ignore_eos", "min_tokens", "thinking_token_budget",
    "skip_special_tokens", "include_stop_str_in_output", "logit_bias", "allowed_token_ids", "prompt_logprobs",
)  # fmt: skip

# OpenAI's; above it there is little but noise
MAX_TEMPERATURE = 2.0
# OpenAI's for a completion; a chat has no such default
_DEFAULT_MAX_TOKENS = 16


def generation_params(fields: GenerationFields, defaults: dict[str, Any], **decided: Any) -> GenerationParams:
    """`decided` holds what the endpoint derives itself (max_tokens, logprobs) and wins over the defaults."""
    check_fields(fields)
    if fields.temperature is not None and fields.temperature > MAX_TEMPERATURE:
        text = f"temperature={fields.temperature:g}: must be between 0 and {MAX_TEMPERATURE:g}."
        raise invalid(text, "temperature")
    if fields.use_beam_search:
        return beam_search_params(fields, defaults, decided)
    values = dict(defaults)
    for name in _FROM_REQUEST:
        value = getattr(fields, name)
        if value is not None:
            values[name] = value
    return SamplingParams(**{**values, **decided}, structured_outputs=structured_outputs_of(fields))


def completion_params(body: CompletionRequest, defaults: dict[str, Any]) -> GenerationParams:
    decided: dict[str, Any] = {}
    if body.max_tokens == 0 and not body.echo:
        raise invalid(
            "max_tokens=0: only with echo=true, which returns the prompt alone; else at least 1.", "max_tokens"
        )
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


def check_stream_options(fields: GenerationFields) -> None:
    """What goes with a stream only, and what never does."""
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options: only with stream=true.", "stream_options")
    if fields.stream and fields.prompt_logprobs is not None:
        raise invalid("prompt_logprobs: not with stream=true; they are of the prompt as a whole.", "prompt_logprobs")
