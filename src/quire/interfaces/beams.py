"""What LLM.beam_search and AsyncLLM.beam_search add to `generate`: vLLM's shape of the answer, and scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.beam_search_params import BeamSearchParams
from quire.errors import RequestError
from quire.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from quire.renderer import Renderer


def check_beams(params: BeamSearchParams | Sequence[BeamSearchParams]) -> None:
    """Raises RequestError for anything but BeamSearchParams, one or many."""
    for one in params if isinstance(params, list | tuple) else (params,):
        if not isinstance(one, BeamSearchParams):
            raise RequestError(
                f"params: {type(one).__name__} given, must be BeamSearchParams: beam search draws nothing. Give "
                "BeamSearchParams(beam_width=4), or call generate to sample.",
                param="params",
            )


def beam_search_output(output: RequestOutput, params: BeamSearchParams, renderer: Renderer) -> BeamSearchOutput:
    """The outputs of a request for beams, which come best first, each with its prompt in front."""
    prompt = output.prompt_token_ids
    sequences = [_sequence(one, prompt, params, renderer) for one in _found(output.outputs)]
    return BeamSearchOutput(sequences, output.prompt, prompt)


def _found(outputs: Sequence[CompletionOutput]) -> list[CompletionOutput]:
    """A form may have fewer continuations than were asked for: the others are what all have in common, at most. Those
    that ended at the greatest length are equally long."""
    longest = max(len(one.token_ids) for one in outputs)
    return [one for one in outputs if one.finish_reason != "length" or len(one.token_ids) == longest]


def score_of(output: CompletionOutput, params: BeamSearchParams) -> float:
    """What beams are ordered by."""
    return params.score(output.cumulative_logprob or 0.0, len(output.token_ids))


def _sequence(
    one: CompletionOutput, prompt: list[int], params: BeamSearchParams, renderer: Renderer
) -> BeamSearchSequence:
    tokens = prompt + one.token_ids
    skip = params.skip_special_tokens
    return BeamSearchSequence(
        tokens=tokens,
        text=renderer.decode(tokens, skip_special_tokens=skip) if renderer.has_tokenizer else "",
        output_text=one.text,
        cum_logprob=one.cumulative_logprob or 0.0,
        score=score_of(one, params),
        logprobs=one.logprobs,
        finish_reason=one.finish_reason,
        stop_reason=one.stop_reason,
    )
