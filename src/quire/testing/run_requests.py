"""Runs requests through a core until they have ended, and collects what each sequence got."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quire.engine_core.engine_core import EngineCore
from quire.messages import EngineOutputs, EngineRequest, SequenceEnd, split_sequence_id


@dataclass
class SequenceResult:
    """One output. `logprobs` are those of its tokens, where the core sent them."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # the token ids that each position's entry lists: the chosen one first
    listed: list[list[int]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    # by step in which it got tokens: how many
    counts: list[int] = field(default_factory=list)

    def end(self, message: SequenceEnd) -> None:
        assert self.finish_reason is None, "a sequence ended twice"
        assert message.error is None, message.error
        self.finish_reason, self.stop_reason = message.finish_reason, message.stop_reason


Results = dict[int, list[SequenceResult]]


def run_requests(
    core: EngineCore,
    requests: Iterable[EngineRequest],
    each_step: Callable[[EngineOutputs], None] | None = None,
    max_steps: int = 20_000,
) -> Results:
    """All at once; the outputs of each request by its id, in order of their index. An error fails at once."""
    asked = {}
    for request in requests:
        asked[request.request_id] = request.sampling.n
        core.add(request)
    results = {request_id: [SequenceResult() for _ in range(n)] for request_id, n in asked.items()}
    num_steps = 0
    while core.has_work:
        num_steps += 1
        assert num_steps <= max_steps, f"still at work after {max_steps} steps"
        outputs = core.step()
        collect(outputs, results)
        if each_step is not None:
            each_step(outputs)
    for request_id, sequences in results.items():
        assert all(sequence.finish_reason for sequence in sequences), f"request {request_id} has not ended"
    return results


def collect(outputs: EngineOutputs, results: Results) -> None:
    """Adds what one step brought."""
    new: dict[int, int] = {}
    for sequence_id, token in zip(outputs.sequence_ids.tolist(), outputs.token_ids.tolist(), strict=True):
        result = _find(results, sequence_id)
        assert result.finish_reason is None, "a token after the end"
        result.tokens.append(token)
        new[sequence_id] = new.get(sequence_id, 0) + 1
    for sequence_id, count in new.items():
        _find(results, sequence_id).counts.append(count)
    for entry in outputs.logprobs:
        result = _find(results, entry.sequence_id)
        result.logprobs += [position.logprobs[0] for position in entry.positions]
        result.listed += [position.token_ids for position in entry.positions]
    for end in outputs.ends:
        _find(results, end.sequence_id).end(end)


def _find(results: Results, sequence_id: int) -> SequenceResult:
    request_id, index = split_sequence_id(sequence_id)
    return results[request_id][index]
