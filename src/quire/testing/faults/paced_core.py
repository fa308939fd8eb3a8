"""A server on a core without a model, in a process of its own: all is real but the answers, and it starts at once.

    python -m quire.testing.faults.paced_core serve --port 0 ...     as `quire serve`

Its steps take as long as those of a small model, so that there is a middle of a stream to break something in.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.messages import EngineOutputs
from quire.testing.fake_core import MAX_MODEL_LEN, FakeCore

_STEP_SECONDS = 0.005


class PacedCore(FakeCore):
    """Hangs for good in native code that holds the interpreter, once the file that PACED_HANG names is there."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(
            vocab_size=config.facts.vocab_size,
            max_model_len=min(config.max_model_len, MAX_MODEL_LEN),
            max_num_seqs=config.max_num_seqs,
        )
        self._hang = Path(os.environ.get("PACED_HANG", "/nowhere"))

    def step(self) -> EngineOutputs:
        time.sleep(_STEP_SECONDS)
        if self._hang.exists():
            self._hang.unlink()
            ctypes.PyDLL(None).sleep(600)
        return super().step()


def build(config: EngineConfig) -> PacedCore:
    return PacedCore(config)


def build_in_kernel(config: EngineConfig) -> PacedCore:
    """Loads for ever, and holds the interpreter meanwhile."""
    print("building in a kernel", file=sys.stderr, flush=True)
    ctypes.PyDLL(None).sleep(600)
    return PacedCore(config)


def build_slowly(config: EngineConfig) -> PacedCore:
    print("building slowly", file=sys.stderr, flush=True)
    time.sleep(600)
    return PacedCore(config)


def main() -> int:
    """`quire serve` whose engine is this core; the environment says which of the builders."""
    import quire.interfaces.held_engine as room
    from quire.engine_client import AsyncEngineClient, open_link
    from quire.interfaces.cli import main as quire

    core = "quire.testing.faults.paced_core:" + os.environ.get("PACED_CORE", "build")

    def connect(config: EngineConfig) -> Any:
        return AsyncEngineClient(open_link(config, in_own_process=True, is_async=True, core=core))

    room.connect = connect
    return quire(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
