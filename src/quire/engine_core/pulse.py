"""The pulse of an engine's process: a page of numbers that the process writes and its parent reads.

Whether an engine lives is judged by what it gets done, never by a flag that says so. The page is memory that both
processes share, so reading it needs nothing of the engine: neither its loop nor its interpreter's lock. Behind the
numbers lie the last decisions (LastSteps). Behind the page lie the stacks of the engine's threads: Python's
faulthandler writes them there when the process crashes, or when its parent asks for them. The file behind all this has
no name; it is gone with the last process that has it open.

    [ beats | is_serving | is_busy | num_done | num_received | num_tokens | step_began ]
    4096 [ last steps ] ... [ stacks ]
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.processes.nameless_file import nameless_file

if TYPE_CHECKING:
    from quire.messages import SchedulerOutput

BEAT_SECONDS = 0.25
STACKS_SIGNAL = signal.SIGUSR2
# a descriptor that stands for no page: the numbers are written where nobody reads them
NO_PAGE = -1
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
_NUMBERS_BYTES = 4096
# whole pages of the system's
_PAGE_BYTES = _NUMBERS_BYTES + -(-NUM_BYTES // 4096) * 4096
_MOST_STACK_BYTES = 256 * 1024
_BEATS, _IS_SERVING, _IS_BUSY, _NUM_DONE, _NUM_RECEIVED, _NUM_TOKENS, _STEP_BEGAN = range(7)


class Pulse(NamedTuple):
    """The numbers at one moment."""

    # of a thread of the process that does nothing else, four in a second
    beats: int = 0
    # the core is built
    is_serving: bool = False
    # the loop is not waiting for messages
    is_busy: bool = False
    # messages that were dealt with, and steps that have ended
    num_done: int = 0
    # messages that were taken from the socket
    num_received: int = 0
    # of all steps that were under way when one was begun last: while one runs, the next is decided. A token that sees
    # many others counts as so many as take its time.
    num_tokens: int = 0
    # when that was, in nanoseconds of the system's monotonic clock
    step_began: int = 0


class PulsePage:
    """The parent's side: makes the file, reads it, closes it."""

    def __init__(self) -> None:
        self.descriptor = nameless_file("quire-pulse", size=_PAGE_BYTES)
        # faulthandler writes where the file stands, which both processes share
        os.lseek(self.descriptor, _PAGE_BYTES, os.SEEK_SET)
        self._page = mmap.mmap(self.descriptor, _PAGE_BYTES)
        self._numbers = memoryview(self._page).cast("q")
        self._steps = _steps_of(self._numbers)

    def read(self) -> Pulse:
        """The numbers now; those of a process whose page was closed are all zero."""
        if self.descriptor == NO_PAGE:
            return Pulse()
        values = self._numbers
        return Pulse(
            beats=values[_BEATS],
            is_serving=bool(values[_IS_SERVING]),
            is_busy=bool(values[_IS_BUSY]),
            num_done=values[_NUM_DONE],
            num_received=values[_NUM_RECEIVED],
            num_tokens=values[_NUM_TOKENS],
            step_began=values[_STEP_BEGAN],
        )

    def last_steps(self) -> list[dict[str, Any]]:
        """What was decided last, oldest first."""
        if self.descriptor == NO_PAGE:
            return []
        return LastSteps(self._steps).read(time.monotonic_ns())

    def ask_for_stacks(self, pid: int) -> None:
        """They come a little later; not from a process that was stopped, until it goes on."""
        os.kill(pid, STACKS_SIGNAL)

    @property
    def num_stack_bytes(self) -> int:
        """How much faulthandler has written so far."""
        return 0 if self.descriptor == NO_PAGE else os.fstat(self.descriptor).st_size - _PAGE_BYTES

    def stacks(self, since: int = 0) -> str:
        """What faulthandler has written after so many bytes; of very much the last part, where the end of it all is."""
        if self.descriptor == NO_PAGE:
            return ""
        start = max(since, self.num_stack_bytes - _MOST_STACK_BYTES)
        return os.pread(self.descriptor, _MOST_STACK_BYTES, _PAGE_BYTES + start).decode(errors="replace")

    def close(self) -> None:
        if self.descriptor == NO_PAGE:
            return
        descriptor = self.descriptor
        self.descriptor = NO_PAGE
        self._steps.release()
        self._numbers.release()
        self._page.close()
        os.close(descriptor)


class PulseWriter:
    """The engine's side. All but the beats is written by the thread of the loop."""

    def __init__(self, descriptor: int) -> None:
        self._page = mmap.mmap(descriptor, _PAGE_BYTES)
        self._numbers = memoryview(self._page).cast("q")
        self._steps = LastSteps(_steps_of(self._numbers))
        self._numbers[_IS_BUSY] = 1
        if descriptor != NO_PAGE:
            faulthandler.enable(file=descriptor, all_threads=True)
            faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True)
            threading.Thread(target=self._beat, name="quire-pulse", daemon=True).start()

    def serves(self) -> None:
        """The core is built, the loop begins."""
        self._numbers[_IS_SERVING] = 1

    def rests(self) -> None:
        """There is nothing to do until a message comes."""
        self._numbers[_IS_BUSY] = 0

    def wakes(self) -> None:
        self._numbers[_IS_BUSY] = 1

    def receives(self) -> None:
        """One more message, which is dealt with now."""
        self._numbers[_NUM_RECEIVED] += 1

    def begins(self, decision: SchedulerOutput, work: int) -> None:
        """A step that was just decided, and the tokens of all that are under way with it, those of images that they
        encode included."""
        now = time.monotonic_ns()
        self._numbers[_NUM_TOKENS] = work
        self._numbers[_STEP_BEGAN] = now
        self._steps.write(decision, decision.num_scheduled_tokens, now)

    def has_done(self) -> None:
        """A message or a step is behind us."""
        self._numbers[_NUM_DONE] += 1

    def _beat(self) -> None:
        while True:
            self._numbers[_BEATS] += 1
            time.sleep(BEAT_SECONDS)


def _steps_of(numbers: memoryview[int]) -> memoryview[int]:
    return numbers[_NUMBERS_BYTES // 8 : (_NUMBERS_BYTES + NUM_BYTES) // 8]


class LastSteps:
    """The last decisions of an engine: a ring of numbers, and no token and no name, in memory that its parent reads
    after its death. Either side has one.

    Written when a step was decided and before it runs, so the last row is the step that the engine died in, if it died
    in one. Nothing is asked of the engine to read it. Numbers of steps begin with 1, so 0 stands for no step.
    """

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
