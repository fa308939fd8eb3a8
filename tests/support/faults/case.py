"""What a fault is to the harness: a function that breaks something on purpose, and how well that must end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum

from tests.support.faults.stage import Setting

Figures = dict[str, float]
Run = Callable[[Setting], Awaitable[Figures]]


class Core(Enum):
    """Whose server is broken."""

    # no model is needed to see what this breaks
    PACED = "paced"
    # the embedded model, unless a core without a model is asked for
    EITHER = "either"
    # only where a model computes
    EMBEDDED = "embedded"


@dataclass(frozen=True)
class Case:
    """It starts what it needs, breaks something, and returns what it has measured. A figure may not exceed its goal,
    and a case may not raise; that is all the judgement there is.

    Figures and goals are in seconds unless the name ends with another unit behind a comma. `times`: how often a full
    run does it; a case that does its fault many times on one server has its numbers in the setting.
    """

    id: str
    what: str
    run: Run
    goals: dict[str, float] = field(default_factory=dict)
    times: int = 20
    core: Core = Core.PACED

    def is_paced(self, setting: Setting) -> bool:
        return self.core is Core.PACED or (self.core is Core.EITHER and setting.is_paced)
