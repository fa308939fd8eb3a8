"""llama.cpp through llama-cpp-python's functions of the C library (llama_batches.py)."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llama_batches import MOST_SEQUENCES, MOST_TOKENS, Batches, Columns
from protocol import serve


class LlamaCpp:
    """A model, a context of fixed size, and a batch."""

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
        context.n_batch = MOST_TOKENS
        context.n_ubatch = settings.get("ubatch", 512)
        context.n_seq_max = MOST_SEQUENCES
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
        self.batch = llama_cpp.llama_batch_init(MOST_TOKENS, 0, 1)

    def decode(self, columns: Columns) -> bool:
        batch = self.batch
        batch.n_tokens = len(columns.tokens)
        for at, token in enumerate(columns.tokens):
            batch.token[at] = token
            batch.pos[at] = columns.positions[at]
            batch.n_seq_id[at] = 1
            batch.seq_id[at][0] = columns.sequences[at]
            batch.logits[at] = columns.is_chosen[at]
        return bool(self.c.llama_decode(self.context, batch) == 0)

    def logits(self, place: int) -> Any:
        pointer = self.c.llama_get_logits_ith(self.context, place)
        return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self.vocab_size,))

    def clear(self) -> None:
        self.c.llama_memory_clear(self.memory, True)

    def remove(self, sequence: int) -> None:
        self.c.llama_memory_seq_rm(self.memory, sequence, -1, -1)

    def copy(self, source: int, target: int) -> None:
        self.c.llama_memory_seq_cp(self.memory, source, target, -1, -1)


def load(settings: dict[str, Any]) -> Any:
    import llama_cpp

    engine = Batches(LlamaCpp(settings))
    facts = {"version": f"llama-cpp-python {llama_cpp.__version__}", "settings": settings.get("options", {})}
    return engine.generate, facts


if __name__ == "__main__":
    serve(load)
