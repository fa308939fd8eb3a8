"""What a client sees of a beam request, without a search: settled tokens first, each output's own rest at the end.

The outputs repeat their prompt for the first half of max_tokens, one token a step for all of them alike. Then all end
in one step: output k goes on with the prompt's tokens k places further, each a quarter less probable for every k, so
that outputs come best first. The best one ends with the model's end token, the second one with the first of
stop_token_ids, as far as there are any; the others end at their length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.messages import EngineRequest, SequenceEnd, sequence_id_of

SETTLED_LOGPROB = -0.5


def logprob_of_tail(index: int) -> float:
    return SETTLED_LOGPROB - 0.25 * index


@dataclass
class BeamTokens:
    """What one output gets in one step."""

    sequence_id: int
    token_ids: list[int] = field(default_factory=list)
    logprob: float = SETTLED_LOGPROB
    end: SequenceEnd | None = None


class FakeBeams:
    """All outputs of one request."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.num_settled = 0
        self.sequence_ids = [sequence_id_of(request.request_id, index) for index in range(request.sampling.n)]

    @property
    def max_tokens(self) -> int:
        return self.request.sampling.max_tokens or 16

    def step(self) -> Iterator[BeamTokens]:
        """The next settled token for all, or at the end what is left for each."""
        if self.num_settled < self.max_tokens // 2:
            token_id = self._token(self.num_settled)
            self.num_settled += 1
            for sequence_id in self.sequence_ids:
                yield BeamTokens(sequence_id, [token_id])
            return
        for index, sequence_id in enumerate(self.sequence_ids):
            positions = range(self.num_settled, self.max_tokens)
            tail = [self._token(position + index) for position in positions]
            end = SequenceEnd(sequence_id, "length")
            sampling = self.request.sampling
            if index == 0 and self.request.eos_token_ids:
                tail[-1], end = self.request.eos_token_ids[0], SequenceEnd(sequence_id, "stop")
            elif index == 1 and sampling.stop_token_ids:
                tail[-1] = sampling.stop_token_ids[0]
                end = SequenceEnd(sequence_id, "stop", stop_reason=tail[-1])
            yield BeamTokens(sequence_id, tail, logprob_of_tail(index), end)

    def _token(self, position: int) -> int:
        prompt = self.request.prompt_token_ids
        return prompt[position % len(prompt)]
