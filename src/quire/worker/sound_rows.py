"""What the model is given of a step in which rows listen: what an encoder made of their sounds, and their text.

A sequence begins with as many tokens as an encoder makes of one window of sound; its text follows. The layers of the
decoder compute the text alone. The tokens of the sound are computed, too, but nothing becomes of them beside the keys
and values of cross attention, which lie where they stand in the sequence:

    positions          0 ... num_sources - 1          num_sources ...
    tokens             the sound                      the text
    self attention     nothing                        keys and values, in a chunk of their own
    cross attention    keys and values, seen by       queries
                       all of the text

So forks, the prefix cache, preemption and chunks know nothing of sounds. Owns the sound of each row. Called by
StepComputation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.errors import ModelError
from quire.messages import AdmittedSequence, ForkedSequence, IntArray, Media, SchedulerOutput, StepOutput
from quire.worker.attention import Attention, AttentionBatch
from quire.worker.encoded_media import EncodedMedia
from quire.worker.input_batch import InputBatch
from quire.worker.staging import to_device
from quire.worker.step_member import StepMember


@dataclass(frozen=True)
class Heard:
    """Of a step with tokens of sounds: what was made of these, and where the tokens of text stand among all."""

    encoded_AE: Tensor
    text_X: Tensor
    num_tokens: int

    def spread(self, hidden_XE: Tensor) -> Tensor:
        """A row for each token of the step. Nobody asks for those of sounds."""
        hidden_TE = hidden_XE.new_zeros(self.num_tokens, hidden_XE.shape[1])
        return hidden_TE.index_copy_(0, self.text_X, hidden_XE)


class SoundRows(StepMember):
    """Of a model that listens. Suffixes: A tokens of sounds, X tokens of text, n sequences that have some of these."""

    def __init__(self, model: Any, layers: Sequence[Attention], device: torch.device, cache_bytes: int) -> None:
        self._model = model
        self._device = device
        self._num_sources: int = model.num_sources
        # groups of the layers that look at the sound
        self._crossing = frozenset(layer.group for layer in layers if layer.num_sources)
        self._by_row: dict[int, Media] = {}
        self._encoded = EncodedMedia(cache_bytes)

    def admit(self, sequence: AdmittedSequence) -> None:
        self.release(sequence.row)
        self._by_row[sequence.row] = self._checked(sequence.media)

    def _checked(self, media: list[Media]) -> Media:
        """A strange one is this row's trouble, not that of a step."""
        if len(media) != 1 or media[0].start != 0 or media[0].length != self._num_sources:
            raise ModelError(f"media: a prompt must begin with one sound, which has {self._num_sources} tokens.")
        [sound] = media
        if tuple(sound.shape) != self._model.sound_shape or len(sound.pixels) != 4 * math.prod(sound.shape):
            raise ModelError(f"media: a sound of {sound.shape} numbers; it must have {self._model.sound_shape}.")
        return sound

    def fork(self, fork: ForkedSequence) -> None:
        self._by_row[fork.row] = self._by_row[fork.parent_row]

    def release(self, row: int) -> None:
        self._by_row.pop(row, None)

    def seen(self, batch: InputBatch) -> InputBatch:
        """Attention has the rows of text alone, and keys of sounds are written for layers that look at them."""
        heard_S = self._num_heard(batch)
        text_S = batch.num_tokens_S - heard_S
        if not heard_S.any():
            groups = [
                self._across(group, text_S) if number in self._crossing else group
                for number, group in enumerate(batch.attention)
            ]
            return replace(batch, attention=tuple(groups))
        sequences_n = np.flatnonzero(text_S)
        starts = np.zeros(len(sequences_n) + 1, dtype=np.int32)
        np.cumsum(text_S[sequences_n], out=starts[1:])
        text_X, heard_A = self._places(batch, heard_S)
        starts_n1, index_n, text, heard = to_device([starts, sequences_n, text_X, heard_A], self._device)
        groups = []
        for number, group in enumerate(batch.attention):
            of_text = replace(
                group,
                query_starts_S1=starts_n1,
                seq_lens_S=group.seq_lens_S[index_n],
                block_tables_SM=group.block_tables_SM[index_n],
                slots_T=group.slots_T[heard if number in self._crossing else text],
                max_query_len=int(text_S.max()),
            )
            groups.append(self._across(of_text, text_S) if number in self._crossing else of_text)
        return replace(batch, attention=tuple(groups))

    def _across(self, group: AttentionBatch, text_S: IntArray) -> AttentionBatch:
        """Each token of text sees the whole sound, as if it were the last one of it."""
        ends_T: Tensor | None = None
        if text_S.max() > 1:
            ends_T = group.slots_T.new_full((int(text_S.sum()),), self._num_sources)
        return replace(
            group,
            seq_lens_S=group.seq_lens_S.clamp(max=self._num_sources),
            max_seq_len=min(group.max_seq_len, self._num_sources),
            ends_T=ends_T,
        )

    def of(self, batch: InputBatch) -> tuple[Any, ...]:
        heard_S = self._num_heard(batch)
        if not heard_S.any():
            return batch.input_ids_T, batch.positions_T
        parts: list[Tensor] = []
        for number in np.flatnonzero(heard_S).tolist():
            sound = self._by_row[int(batch.rows_S[number])]
            first = int(batch.num_computed_S[number])
            parts.append(self._encode(sound)[first : first + int(heard_S[number])])
        [text_X] = to_device([self._places(batch, heard_S)[0]], self._device)
        heard = Heard(torch.cat(parts), text_X, len(batch.input_ids_T))
        return batch.input_ids_T[text_X], batch.positions_T[text_X], heard

    def _num_heard(self, batch: InputBatch) -> IntArray:
        """Tokens of sounds, by sequence."""
        heard_S: IntArray = np.clip(self._num_sources - batch.num_computed_S, 0, batch.num_tokens_S)
        return heard_S

    def _places(self, batch: InputBatch, heard_S: IntArray) -> tuple[IntArray, IntArray]:
        """Where tokens of text, and those of sounds, stand in the step."""
        lengths_S = batch.num_tokens_S
        offset_T = np.arange(lengths_S.sum()) - np.repeat(batch.query_starts_S1[:-1], lengths_S)
        is_text_T = offset_T >= np.repeat(heard_S, lengths_S)
        return np.flatnonzero(is_text_T), np.flatnonzero(~is_text_T)

    def _encode(self, sound: Media) -> Tensor:
        def encode() -> Tensor:
            features = torch.frombuffer(bytearray(sound.pixels), dtype=torch.float32).reshape(sound.shape)
            encoded: Tensor = self._model.encode_sound(features.to(self._device))
            return encoded

        return self._encoded.of(sound, encode)

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
