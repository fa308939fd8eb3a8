"""llama.cpp through llama-cpp-python's functions of the C library: requests in one batch, each a sequence, greedy.

As its own server does, prompts are computed request by request in the order of arrival, at most `_BATCH` tokens a step,
and those that have their prompt get a token in every step. Answers to one prompt copy its sequence. Its library has no
beam search any more.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from protocol import NotSupportedError, Recorder, Request, serve

_BATCH = 2048
_MAX_SEQUENCES = 64


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


class Engine:
    """A model, a context of fixed size, and batches filled by hand."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp

        self.c = llama_cpp
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(settings["model"].encode(), params)
        if not self.model:
            raise RuntimeError(f"{settings['model']} was not loaded")
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = settings.get("context", 24_576)
        context.n_batch = _BATCH
        context.n_ubatch = settings.get("ubatch", 512)
        context.n_seq_max = _MAX_SEQUENCES
        context.n_threads = context.n_threads_batch = settings["threads"]
        # sequences share the room: without it each gets a 64th of it
        context.kv_unified = True
        for name, value in settings.get("options", {}).items():
            setattr(context, name, value)
        self.context = llama_cpp.llama_init_from_model(self.model, context)
        if not self.context:
            raise RuntimeError("no context")
        self.memory = llama_cpp.llama_get_memory(self.context)
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        self.draw = np.random.default_rng(0)

    def generate(self, request: Request) -> Recorder:
        if request.beam_width:
            raise NotSupportedError("llama.cpp has no beam search")
        self.c.llama_memory_clear(self.memory, True)
        recorder = Recorder(len(request.prompts))
        waiting = [
            Sequence(number, number, length, pending=list(prompt))
            for number, (prompt, length) in enumerate(zip(request.prompts, request.output_lengths, strict=True))
        ]
        if len(waiting) * request.num_answers > _MAX_SEQUENCES:
            raise NotSupportedError(f"more than {_MAX_SEQUENCES} sequences")
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
                    self.c.llama_memory_seq_rm(self.memory, sequence.number, -1, -1)
            alive = [sequence for sequence in alive if sequence.num_tokens < sequence.length]
        return recorder

    def _give(self, sequence: Sequence, token: int) -> None:
        sequence.num_tokens += 1
        sequence.pending = [token]

    def _forked(self, alive: list[Sequence], first: Sequence, count: int, token: int) -> list[Sequence]:
        """The answers to one prompt, which is computed once."""
        for number in range(1, count):
            self.c.llama_memory_seq_cp(self.memory, first.number, number, -1, -1)
            sequence = Sequence(number, first.request, first.length, position=first.position)
            self._give(sequence, token)
            alive = [*alive, sequence]
        self._give(first, token)
        return alive

    def _step(self, alive: list[Sequence], *, is_drawn: bool) -> list[tuple[Sequence, int]]:
        """One batch: those with one token to compute first, prompts as far as there is room."""
        batch, room = self.batch, _BATCH
        batch.n_tokens = 0
        chosen: list[tuple[Sequence, int]] = []
        for sequence in sorted(alive, key=lambda one: len(one.pending) > 1):
            count = min(room, len(sequence.pending))
            for offset in range(count):
                at = batch.n_tokens
                batch.token[at] = sequence.pending[offset]
                batch.pos[at] = sequence.position + offset
                batch.n_seq_id[at] = 1
                batch.seq_id[at][0] = sequence.number
                batch.logits[at] = offset == len(sequence.pending) - 1
                batch.n_tokens += 1
            if count and count == len(sequence.pending):
                chosen.append((sequence, batch.n_tokens - 1))
            sequence.pending = sequence.pending[count:]
            sequence.position += count
            room -= count
        if self.c.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        return [(sequence, self._token(at, is_drawn)) for sequence, at in chosen]

    def _token(self, at: int, is_drawn: bool) -> int:
        pointer = self.c.llama_get_logits_ith(self.context, at)
        logits = np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self.vocab_size,))
        if not is_drawn:
            return int(logits.argmax())
        # the greatest of logits with Gumbel noise is a draw from their softmax
        return int((logits - np.log(self.draw.standard_exponential(self.vocab_size, dtype=np.float32))).argmax())


def load(settings: dict[str, Any]) -> Any:
    import llama_cpp

    engine = Engine(settings)
    facts = {"version": f"llama-cpp-python {llama_cpp.__version__}", "settings": settings.get("options", {})}
    return engine.generate, facts


if __name__ == "__main__":
    serve(load)
