"""Beams of a core and of the brute-force reference, held against each other."""

from __future__ import annotations

from typing import Any

from quire.messages import DecodingSpec, EngineRequest
from quire.sampling_params import SamplingParams
from quire.testing.beam_reference import BeamResult, BeamSettings, Hypothesis
from quire.testing.run_requests import SequenceResult

# A decision between two sums that lie closer together than this is left to rounding.
CLOSE_CALL = 1e-4
SCORE_TOLERANCE = 1e-4


def beam_request(request_id: int, prompt: list[int], settings: BeamSettings, **sampling: Any) -> EngineRequest:
    """The same search as a request to a core; all hypotheses are asked for unless `n` says otherwise."""
    args: dict[str, Any] = {
        "width": settings.width,
        "length_penalty": settings.length_penalty,
        "early_stopping": settings.early_stopping,
    }
    method = "beam_search"
    if settings.num_groups > 1:
        method = "diverse_beam_search"
        args |= {"num_groups": settings.num_groups, "diversity_penalty": settings.diversity_penalty}
    asked = {
        "n": settings.width,
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "ignore_eos": settings.ignore_eos,
        "stop_token_ids": list(settings.stop_token_ids),
        "repetition_penalty": settings.repetition_penalty,
        "presence_penalty": settings.presence_penalty,
        "frequency_penalty": settings.frequency_penalty,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        **sampling,
    }
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**asked),
        eos_token_ids=list(settings.eos_token_ids),
        decoding=DecodingSpec(method=method, args=args),
    )


def assert_same_beams(ours: list[SequenceResult], reference: BeamResult, settings: BeamSettings, what: str) -> bool:
    """Tokens, scores and reasons are equal, best first. False: a close call went the other way, which is excused."""
    expected = reference.hypotheses[: len(ours)]
    if [beam.tokens for beam in ours] != [hypothesis.tokens for hypothesis in expected]:
        told = "\n".join(f"  {a.tokens}\n  {b.tokens}" for a, b in zip(ours, expected, strict=True))
        assert reference.margin < CLOSE_CALL, f"{what}: margin {reference.margin:.6f}, ours and expected:\n{told}"
        return False
    for beam, hypothesis in zip(ours, expected, strict=True):
        _assert_same_hypothesis(beam, hypothesis, settings, what)
    return True


def _assert_same_hypothesis(beam: SequenceResult, hypothesis: Hypothesis, settings: BeamSettings, what: str) -> None:
    assert len(beam.logprobs) == len(beam.tokens), f"{what}: {len(beam.logprobs)} entries, {len(beam.tokens)} tokens"
    assert [listed[0] for listed in beam.listed] == beam.tokens, f"{what}: the chosen token is listed first"
    difference = abs(sum(beam.logprobs) - hypothesis.cumulative_logprob)
    assert difference < SCORE_TOLERANCE, f"{what}: cumulative log-probability off by {difference}"
    assert beam.finish_reason == hypothesis.finish_reason, f"{what}: ended with {beam.finish_reason}"
    asked_for = beam.tokens[-1] in settings.stop_token_ids
    assert beam.stop_reason == (beam.tokens[-1] if asked_for else None), f"{what}: stop_reason {beam.stop_reason}"
