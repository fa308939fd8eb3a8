"""ik_llama.cpp through a few functions around its C library (ik_llama_cpp.c), which were compiled beside it.

Weights are repacked for the processor when they are loaded, as its own -rtr does; `{"repacked": false}` leaves them.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np
from llama_batches import MOST_SEQUENCES, MOST_TOKENS, Batches, Columns
from protocol import serve

# a folder with the compiled library, and what says of which source it is
FOLDER = "IK_LLAMA_CPP"


class IkLlamaCpp:
    """A model, a context of fixed size, and a batch."""

    def __init__(self, settings: dict[str, Any], folder: Path) -> None:
        self.c = ctypes.CDLL(str(folder / "librival.so"))
        self.c.rival_logits.restype = ctypes.POINTER(ctypes.c_float)
        options = settings.get("options", {})
        self.vocab_size = self.c.rival_open(
            settings["model"].encode(),
            settings["threads"],
            settings.get("context", 24_576),
            MOST_TOKENS,
            options.get("ubatch", 512),
            MOST_SEQUENCES,
            int(options.get("repacked", True)),
        )
        if not self.vocab_size:
            raise RuntimeError(f"{settings['model']} was not loaded")

    def decode(self, columns: Columns) -> bool:
        numbers = (columns.tokens, columns.positions, columns.sequences)
        arrays = [np.asarray(one, dtype=np.int32) for one in numbers]
        is_chosen = np.asarray(columns.is_chosen, dtype=np.int8)
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (*arrays, is_chosen)]
        return bool(self.c.rival_decode(len(columns.tokens), *pointers) == 0)

    def logits(self, place: int) -> Any:
        return np.ctypeslib.as_array(self.c.rival_logits(place), (self.vocab_size,))

    def clear(self) -> None:
        self.c.rival_clear()

    def remove(self, sequence: int) -> None:
        self.c.rival_remove(sequence)

    def copy(self, source: int, target: int) -> None:
        self.c.rival_copy(source, target)


def load(settings: dict[str, Any]) -> Any:
    folder = Path(os.environ[FOLDER])
    engine = Batches(IkLlamaCpp(settings, folder))
    version = (folder / ".ready").read_text(encoding="utf-8").strip()
    return engine.generate, {"version": version, "settings": settings.get("options", {})}


if __name__ == "__main__":
    serve(load)
