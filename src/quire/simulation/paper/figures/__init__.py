"""Figures and tables by name, and what is said of all of them. Each says what is to run and what its results say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from quire.simulation.paper.assumptions import Assumptions
from quire.simulation.paper.figures.ablations import BlockSizes, Recoveries
from quire.simulation.paper.figures.derivation import Derivation
from quire.simulation.paper.figures.memory import BatchedRequests, SlotTable, Waste
from quire.simulation.paper.figures.outside import Outside
from quire.simulation.paper.figures.rates import BasicSampling, Chat, Decoding, SharedPrefix
from quire.simulation.paper.figures.real import Real
from quire.simulation.paper.figures.sensitivity import Sensitivity
from quire.simulation.paper.figures.sharing import SavedBlocks
from quire.simulation.paper.lab import Task
from quire.simulation.paper.report import Told


class Figure(Protocol):
    """One of the paper's, or one of its own."""

    name: str

    def tasks(self, assumed: Assumptions) -> Sequence[Task]: ...

    def report(self, results: dict[Task, Any], assumed: Assumptions) -> Told: ...


_ALL: tuple[Figure, ...] = (
    SlotTable(), Waste(), BasicSampling(), BatchedRequests(), Decoding(), SavedBlocks(), SharedPrefix(), Chat(),
    BlockSizes(), Recoveries(), Real(), Outside(), Derivation(), Sensitivity(),
)  # fmt: skip
FIGURES = {figure.name: figure for figure in _ALL}
