"""What a fake core shows of itself: the state of a small real core in the middle of its work, always the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OBSERVING = ("observe_state", "observe_blocks", "recent_decisions", "recording")
_PROMPT = [*range(1, 13)]


def observing_operations() -> dict[str, Callable[..., Any]]:
    """Two requests share three blocks, one of them as two sequences; a third waits for memory."""
    # here, because most users of the fake core never look
    from quire.observability.recorder import DecisionRecorder
    from quire.testing.core import CoreUnderTest

    core = CoreUnderTest(num_blocks=16, recorder=DecisionRecorder(1 << 20, lambda: 1.0))
    for number in (1, 2):
        core.add(number, [*_PROMPT, number], max_tokens=12, n=number)
    for _ in range(3):
        core.step()
    core.add(3, [*range(4, 48)], max_tokens=4)
    for _ in range(2):
        core.step()
    return {name: _operation(core, name) for name in OBSERVING}


def _operation(core: Any, name: str) -> Callable[..., Any]:
    return lambda **args: core.core.control(name, args)
