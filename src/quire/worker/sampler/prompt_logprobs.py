"""Log-probabilities of prompt tokens, chunk by chunk: token i + 1 is judged by the logits of position i.

Owns how far each row has come, so that a recomputed prompt (preemption) is not reported twice. Same hooks as a logits
processor. The core lets such a request compute its whole prompt; a prefix taken from the cache has no logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

import numpy as np
from torch import Tensor

from quire.messages import AdmittedSequence, ForkedSequence, IntArray, TokenLogprobs
from quire.worker.input_batch import InputBatch
from quire.worker.row_table import RowTable
from quire.worker.sampler.logprobs import LogprobReader
from quire.worker.sampler.reading import Sampled
from quire.worker.staging import Array, to_device

# Logits exist for so many numbers at a time: 64 MiB in float32.
_SLICE = 1 << 24
STREAMED_PROMPT = "prompt_logprobs cannot be combined with a prompt that arrives in pieces: leave one of the two out."


class PromptLogprobs:
    """Nothing is computed or allocated unless a row of the step asks."""

    parameter_of = attrgetter("sampling.prompt_logprobs")
    none = None

    def __init__(self, table: RowTable, compute_logits: Callable[[Tensor], Tensor]) -> None:
        self._table = table
        self._compute_logits = compute_logits
        self._counts = np.full(table.num_rows, -1, dtype=np.int64)
        # those with a count that is not below 0
        self.rows: set[int] = set()
        # positions below this one are reported
        self._next_position = np.zeros(table.num_rows, dtype=np.int64)

    def admit(self, sequence: AdmittedSequence) -> None:
        self._set(sequence.row, sequence.sampling.prompt_logprobs)
        self._next_position[sequence.row] = sequence.num_reported_positions

    def fork(self, fork: ForkedSequence) -> None:
        # the parent reports the prompt for all of its request
        self._set(fork.row, None)

    def release(self, row: int) -> None:
        self._set(row, None)

    def start(self, hidden_TE: Tensor, batch: InputBatch) -> PromptReading:
        """What this step can report; its tensors go to the host together with the sampled tokens."""
        reading = PromptReading(self._next_position)
        for s in np.flatnonzero(self._counts[batch.rows_S] >= 0).tolist():
            self._add_row(reading, s, batch)
        if reading.rows:
            self._read(reading, hidden_TE)
        return reading

    def _set(self, row: int, count: int | None) -> None:
        self._counts[row] = -1 if count is None else count
        (self.rows.discard if count is None else self.rows.add)(row)

    def _add_row(self, reading: PromptReading, s: int, batch: InputBatch) -> None:
        row = int(batch.rows_S[s])
        start = int(batch.num_computed_S[s])
        first = max(start, int(self._next_position[row]))
        end = min(start + int(batch.num_tokens_S[s]), int(self._table.num_prompt[row]) - 1)
        if not self._table.is_final[row]:
            reading.failures[row] = STREAMED_PROMPT
        elif first < end:
            place = int(batch.query_starts_S1[s]) - start
            reading.rows.append((row, end - first))
            reading.indices.append(np.arange(place + first, place + end))
            reading.tokens.append(self._table.token_ids[row, first + 1 : end + 1].astype(np.int64))
            reading.counts.append(np.full(end - first, self._counts[row]))
            reading.ends[row] = end

    def _read(self, reading: PromptReading, hidden_TE: Tensor) -> None:
        indices, tokens, counts = map(np.concatenate, (reading.indices, reading.tokens, reading.counts))
        index_n, token_n = to_device([indices, tokens], hidden_TE.device)
        start = 0
        step = 1
        while start < len(indices):
            logits_nV = self._compute_logits(hidden_TE[index_n[start : start + step]])
            reader = LogprobReader(counts[start : start + step], logits_nV.shape[1])
            reading.parts.append((reader, reader.read(logits_nV, token_n[start : start + step])))
            # The first slice, of one row, tells how wide a row is.
            start = start + step
            step = max(1, _SLICE // logits_nV.shape[1])


class PromptReading:
    """Prompt positions of one step on their way to the host."""

    def __init__(self, next_position: IntArray) -> None:
        self._next_position = next_position
        # positions below these are reported once they are settled
        self.ends: dict[int, int] = {}
        self.rows: list[tuple[int, int]] = []
        self.indices: list[IntArray] = []
        self.tokens: list[IntArray] = []
        self.counts: list[IntArray] = []
        self.parts: list[tuple[LogprobReader, list[Tensor]]] = []
        self.failures: dict[int, str] = {}

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for _, tensors in self.parts for tensor in tensors]

    def settle(self, arrays: Sequence[Array], sampled: Sampled) -> None:
        """Entries in the order of positions."""
        entries: list[TokenLogprobs] = []
        start = 0
        for reader, tensors in self.parts:
            entries += reader.entries(arrays[start : start + len(tensors)])
            start += len(tensors)
        for row, count in self.rows:
            sampled.output.prompt_logprobs[row] = entries[:count]
            entries = entries[count:]
        for row, end in self.ends.items():
            self._next_position[row] = end
        for row, reason in self.failures.items():
            sampled.fail(row, reason)
