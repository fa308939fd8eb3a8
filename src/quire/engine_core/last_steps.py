"""The last decisions of an engine, in memory that its parent reads after its death: numbers, and no token and no name.

A ring of rows of numbers beside the pulse. Written when a step was decided and before it runs, so the last row is the
step that the engine died in, if it died in one. Nothing is asked of the engine to read it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.messages import SchedulerOutput

NUM_STEPS = 100
# What a row holds; docs/reliability.md says what it means.
COLUMNS = (
    "step", "decided", "num_rows", "num_tokens", "most_tokens_of_a_row", "num_admitted", "num_resumed", "num_forked",
    "num_released", "num_appended", "num_new_blocks", "num_copied_blocks", "num_swapped_out_blocks",
    "num_swapped_in_blocks",
)  # fmt: skip
_WIDTH = len(COLUMNS)
NUM_BYTES = NUM_STEPS * _WIDTH * 8
# all but the first
_pack_into = struct.Struct(f"{_WIDTH - 1}q").pack_into


class LastSteps:
    """The ring in some memory; either side has one. Numbers of steps begin with 1, so 0 stands for no step."""

    def __init__(self, numbers: memoryview[int]) -> None:
        """`numbers`: NUM_BYTES of memory as signed numbers of 64 bits."""
        self._numbers = numbers

    def write(self, decision: SchedulerOutput, num_tokens: int, now: int) -> None:
        """`now`: in nanoseconds of the system's monotonic clock."""
        at = decision.step % NUM_STEPS * _WIDTH
        # whoever dies in between leaves no step, and not half of one
        self._numbers[at] = 0
        _pack_into(
            self._numbers, 8 * at + 8,
            now, len(decision.rows), num_tokens, int(decision.num_tokens.max(initial=0)),
            len(decision.admitted), len(decision.progress), len(decision.forked), len(decision.released),
            len(decision.appended), decision.block_writes.shape[1], decision.block_copies.shape[1],
            decision.swapped_out.shape[1], decision.swapped_in.shape[1],
        )  # fmt: skip
        self._numbers[at] = decision.step

    def read(self, now: int) -> list[dict[str, Any]]:
        """Oldest first; `decided` becomes `seconds_ago`."""
        rows = [self._numbers[at : at + _WIDTH].tolist() for at in range(0, NUM_STEPS * _WIDTH, _WIDTH)]
        found = []
        for row in sorted(row for row in rows if row[0]):
            step, decided, *others = row
            ago = round((now - decided) / 1e9, 6)
            found.append({"step": step, "seconds_ago": ago, **dict(zip(COLUMNS[2:], others, strict=True))})
        return found
