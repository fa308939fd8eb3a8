"""A server on a core without a model, in a process of its own: all is real but the model, and it starts at once.

    python -m tests.support.faults.paced_core serve --port 0 ...     as `quire serve`

The model is the simulator's: what it says follows from the prefix, and it checks what is read from the cache. Its steps
take as long as those of a small one, so that there is a middle of a stream to break something in. The environment says
what goes wrong: PACED_CORE one of the builders below, PACED_HANG, PACED_CLOCK and PACED_STEP_SECONDS the rest.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.config import EngineConfig

_BUILDERS = "tests.support.faults.builders:"


def follow_clock() -> None:
    """The wall clock of this process is wrong by as many seconds as the file says that PACED_CLOCK names, from now on.
    To be called before anything else is imported that may keep the clock."""
    file = Path(os.environ.get("PACED_CLOCK", "/nowhere"))
    if not file.is_file():
        return
    seconds, nanoseconds = time.time, time.time_ns

    def error() -> int:
        return int(file.read_text(encoding="utf-8") or 0)

    time.time = lambda: seconds() + error()
    time.time_ns = lambda: nanoseconds() + error() * 10**9


def hang(file: Path) -> None:
    """For good, in native code that holds the interpreter, once the file is there."""
    if file.exists():
        file.unlink()
        ctypes.PyDLL(None).sleep(600)


def main() -> int:
    """`quire serve` whose engine is made by one of the builders."""
    follow_clock()
    from tests.support.faults.noise import noisy

    import quire.interfaces.async_llm as room
    from quire.engine_client import AsyncEngineClient, open_link
    from quire.interfaces.cli import main as quire

    core = _BUILDERS + os.environ.get("PACED_CORE", "build")

    def connect(config: EngineConfig, hooks: object) -> Any:
        return AsyncEngineClient(noisy(open_link(config, in_own_process=True, core=core)))

    room.connect = connect
    return quire(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
