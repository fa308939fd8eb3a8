"""Requests in one batch of llama.cpp's, or of a fork's: each is a sequence, greedy.

As its own server does, prompts are computed request by request in the order of arrival, at most `MOST_TOKENS` a step,
and those that have their prompt get a token in every step. Answers to one prompt copy its sequence. The library has no
beam search any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from protocol import NotSupportedError, Recorder, Request

MOST_TOKENS = 2048
MOST_SEQUENCES = 64


@dataclass
class Columns:
    """One batch: tokens, their positions and sequences, and whether logits are wanted behind each."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    is_chosen: list[bool] = field(default_factory=list)


class Library(Protocol):
    """A loaded model and its context."""

    vocab_size: int

    def decode(self, columns: Columns) -> bool:
        """Whether it could be computed."""

    def logits(self, place: int) -> npt.NDArray[np.float32]:
        """Behind the token at that place of the last batch."""

    def clear(self) -> None: ...

    def remove(self, sequence: int) -> None: ...

    def copy(self, source: int, target: int) -> None: ...


@dataclass
class Sequence:
    """One line of tokens."""

    number: int
    request: int
    length: int
    num_tokens: int = 0
    position: int = 0
    # what is still to be computed: the rest of the prompt, or the last token
    pending: list[int] = field(default_factory=list)


class Batches:
    """Filled by hand."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.draw = np.random.default_rng(0)

    def generate(self, request: Request) -> Recorder:
        if request.beam_width:
            raise NotSupportedError("the library has no beam search")
        self.library.clear()
        recorder = Recorder(len(request.prompts))
        waiting = [
            Sequence(number, number, length, pending=list(prompt))
            for number, (prompt, length) in enumerate(zip(request.prompts, request.output_lengths, strict=True))
        ]
        if len(waiting) * request.num_answers > MOST_SEQUENCES:
            raise NotSupportedError(f"more than {MOST_SEQUENCES} sequences")
        alive = waiting
        while alive:
            for sequence, token in self._step(alive, is_drawn=request.num_answers > 1):
                if sequence.num_tokens == 0 and request.num_answers > 1:
                    alive = self._forked(alive, sequence, request.num_answers, token)
                    recorder.add(sequence.request, request.num_answers)
                    continue
                self._give(sequence, token)
                recorder.add(sequence.request)
            for sequence in alive:
                if sequence.num_tokens == sequence.length:
                    self.library.remove(sequence.number)
            alive = [sequence for sequence in alive if sequence.num_tokens < sequence.length]
        return recorder

    def _give(self, sequence: Sequence, token: int) -> None:
        sequence.num_tokens += 1
        sequence.pending = [token]

    def _forked(self, alive: list[Sequence], first: Sequence, count: int, token: int) -> list[Sequence]:
        """The answers to one prompt, which is computed once."""
        for number in range(1, count):
            self.library.copy(first.number, number)
            sequence = Sequence(number, first.request, first.length, position=first.position)
            self._give(sequence, token)
            alive = [*alive, sequence]
        self._give(first, token)
        return alive

    def _step(self, alive: list[Sequence], *, is_drawn: bool) -> list[tuple[Sequence, int]]:
        """One batch: those with one token to compute first, prompts as far as there is room."""
        columns = Columns()
        room = MOST_TOKENS
        chosen: list[tuple[Sequence, int]] = []
        for sequence in sorted(alive, key=lambda one: len(one.pending) > 1):
            count = min(room, len(sequence.pending))
            columns.tokens += sequence.pending[:count]
            columns.positions += range(sequence.position, sequence.position + count)
            columns.sequences += [sequence.number] * count
            columns.is_chosen += [offset == len(sequence.pending) - 1 for offset in range(count)]
            if count and count == len(sequence.pending):
                chosen.append((sequence, len(columns.tokens) - 1))
            sequence.pending = sequence.pending[count:]
            sequence.position += count
            room -= count
        if not self.library.decode(columns):
            raise RuntimeError("the batch could not be computed")
        return [(sequence, self._token(at, is_drawn)) for sequence, at in chosen]

    def _token(self, at: int, is_drawn: bool) -> int:
        logits: Any = self.library.logits(at)
        if not is_drawn:
            return int(logits.argmax())
        # the greatest of logits with Gumbel noise is a draw from their softmax
        noise = np.log(self.draw.standard_exponential(self.library.vocab_size, dtype=np.float32))
        return int((logits - noise).argmax())
