"""What the model is given of a step in which rows begin with a source: what an encoder made of it, and their text.

A source is a window of sound, or a text that is to be answered. A sequence begins with as many tokens as the encoder
makes of it; what the decoder writes follows. The layers of the decoder compute that text alone. The tokens of the
source are computed, too, but nothing becomes of them beside the keys and values of cross attention, which lie where
they stand in the sequence:

    positions          0 ... num_sources - 1          num_sources ...
    tokens             the source                     the text
    self attention     nothing                        keys and values, seen from the first of them on
    cross attention    keys and values, seen by       queries
                       all of the text

So forks, the prefix cache, preemption and chunks know nothing of encoders. Owns the source of each row. Called by
StepComputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.errors import ModelError
from quire.messages import SOURCE, AdmittedSequence, ForkedSequence, IntArray, Media, SchedulerOutput, StepOutput
from quire.worker.attention import Attention, AttentionBatch
from quire.worker.encoded_media import EncodedMedia
from quire.worker.input_batch import InputBatch
from quire.worker.staging import send, to_device
from quire.worker.step_member import StepMember


@dataclass(frozen=True)
class Encoded:
    """Of a step with tokens of sources: what was made of these, and where the tokens of text stand among all."""

    encoded_AE: Tensor
    text_X: Tensor
    num_tokens: int

    def spread(self, hidden_XE: Tensor) -> Tensor:
        """A row for each token of the step. Nobody asks for those of sources."""
        hidden_TE = hidden_XE.new_zeros(self.num_tokens, hidden_XE.shape[1])
        return hidden_TE.index_copy_(0, self.text_X, hidden_XE)


class SourceRows(StepMember):
    """Of a model with an encoder and a decoder. Suffixes: A tokens of sources, X tokens of text, n sequences that have
    some of these."""

    def __init__(
        self, model: Any, layers: Sequence[Attention], num_rows: int, device: torch.device, cache_bytes: int
    ) -> None:
        self._model = model
        self._device = device
        # groups of the layers that look at the source
        self._crossing = frozenset(layer.group for layer in layers if layer.part == SOURCE)
        self._by_row: dict[int, Media] = {}
        self._num_sources = np.zeros(num_rows, dtype=np.int64)
        self._encoded = EncodedMedia(cache_bytes)

    def admit(self, sequence: AdmittedSequence) -> None:
        self.release(sequence.row)
        self._hold(sequence.row, self._checked(sequence.media))

    def _hold(self, row: int, source: Media) -> None:
        self._by_row[row] = source
        self._num_sources[row] = source.length

    def _checked(self, media: list[Media]) -> Media:
        """A strange one is this row's trouble, not that of a step."""
        if len(media) != 1 or media[0].start != 0 or media[0].length < 1:
            raise ModelError("media: a prompt must begin with one source, of which an encoder makes its first tokens.")
        [source] = media
        self._model.source_of(source)
        return source

    def fork(self, fork: ForkedSequence) -> None:
        self._hold(fork.row, self._by_row[fork.parent_row])

    def release(self, row: int) -> None:
        self._by_row.pop(row, None)

    def seen(self, batch: InputBatch) -> InputBatch:
        """Attention has the rows of text alone, and keys of sources are written for layers that look at them."""
        num_sources_S: IntArray = self._num_sources[batch.rows_S]
        read_S = self._num_read(batch)
        text_S = batch.num_tokens_S - read_S
        if not read_S.any():
            [sources] = to_device([num_sources_S.astype(np.int32)], self._device)
            groups = [
                self._across(group, text_S, num_sources_S, sources)
                if number in self._crossing
                else replace(group, begins_S=sources)
                for number, group in enumerate(batch.attention)
            ]
            return replace(batch, attention=tuple(groups))
        sequences_n = np.flatnonzero(text_S)
        starts = np.zeros(len(sequences_n) + 1, dtype=np.int32)
        np.cumsum(text_S[sequences_n], out=starts[1:])
        num_sources_n = num_sources_S[sequences_n]
        text_X, read_A = self._places(batch, read_S)
        arrays: list[npt.NDArray[Any]] = [starts, sequences_n, text_X, read_A, num_sources_n.astype(np.int32)]
        starts_n1, index_n, text, read, sources_n = to_device(arrays, self._device)
        groups = []
        for number, group in enumerate(batch.attention):
            is_crossing = number in self._crossing
            of_text = replace(
                group,
                query_starts_S1=starts_n1,
                seq_lens_S=group.seq_lens_S[index_n],
                block_tables_SM=group.block_tables_SM[index_n],
                slots_T=group.slots_T[read if is_crossing else text],
                max_query_len=int(text_S.max()),
                begins_S=None if is_crossing else sources_n,
            )
            groups.append(
                self._across(of_text, text_S[sequences_n], num_sources_n, sources_n) if is_crossing else of_text
            )
        return replace(batch, attention=tuple(groups))

    def _across(
        self, group: AttentionBatch, text_n: IntArray, num_sources_n: IntArray, sources_n: Tensor
    ) -> AttentionBatch:
        """Each token of text sees the whole source, as if it were the last one of it."""
        ends_T: Tensor | None = None
        if len(text_n) and text_n.max() > 1:
            [ends_T] = to_device([np.repeat(num_sources_n, text_n).astype(np.int32)], self._device)
        return replace(
            group,
            seq_lens_S=torch.minimum(group.seq_lens_S, sources_n),
            max_seq_len=min(group.max_seq_len, int(num_sources_n.max(initial=0))),
            ends_T=ends_T,
        )

    def of(self, batch: InputBatch) -> tuple[Any, ...]:
        read_S = self._num_read(batch)
        if not read_S.any():
            return batch.input_ids_T, batch.positions_T
        parts: list[Tensor] = []
        for number in np.flatnonzero(read_S).tolist():
            source = self._by_row[int(batch.rows_S[number])]
            first = int(batch.num_computed_S[number])
            parts.append(self._encode(source)[first : first + int(read_S[number])])
        [text_X] = to_device([self._places(batch, read_S)[0]], self._device)
        encoded = Encoded(torch.cat(parts), text_X, len(batch.input_ids_T))
        return batch.input_ids_T[text_X], batch.positions_T[text_X], encoded

    def _num_read(self, batch: InputBatch) -> IntArray:
        """Tokens of sources, by sequence."""
        left_S = self._num_sources[batch.rows_S] - batch.num_computed_S
        read_S: IntArray = np.clip(left_S, 0, batch.num_tokens_S)
        return read_S

    def _places(self, batch: InputBatch, read_S: IntArray) -> tuple[IntArray, IntArray]:
        """Where tokens of text, and those of sources, stand in the step."""
        lengths_S = batch.num_tokens_S
        offset_T = np.arange(lengths_S.sum()) - np.repeat(batch.query_starts_S1[:-1], lengths_S)
        is_text_T = offset_T >= np.repeat(read_S, lengths_S)
        return np.flatnonzero(is_text_T), np.flatnonzero(~is_text_T)

    def _encode(self, source: Media) -> Tensor:
        def encode() -> Tensor:
            encoded: Tensor = self._model.encode(send(self._model.source_of(source), self._device))
            return encoded

        return self._encoded.of(source, encode)

    def positions(self, batch: InputBatch) -> Tensor:
        return batch.positions_T

    def middle(self, row: int, first: int, end: int) -> int:
        return (first + end) // 2

    def end(self, scheduled: SchedulerOutput, output: StepOutput) -> None:
        self._encoded.report(output)

    def weights_changed(self) -> None:
        self._encoded.clear()

    def statistics(self) -> dict[str, float]:
        return self._encoded.statistics()
