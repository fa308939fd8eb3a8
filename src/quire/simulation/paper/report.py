"""A figure as it is told: the paper's number, ours and their ratio, line by line, and a drawing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Line:
    """One number. `paper` is what it says, or a range; None: it says nothing of it."""

    name: str
    ours: float
    paper: float | tuple[float, float] | None = None
    unit: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours to the paper's; to the nearer end of a range, 1 within it."""
        if self.paper is None:
            return None
        low, high = self.paper if isinstance(self.paper, tuple) else (self.paper, self.paper)
        nearest = min(max(self.ours, low), high)
        return self.ours / nearest if nearest else None


class Told(Protocol):
    """What a command prints and writes."""

    @property
    def charts(self) -> dict[str, str]:
        """SVG by file name."""

    def text(self) -> str: ...

    def markdown(self) -> str: ...


@dataclass(frozen=True)
class Report:
    """`charts`: SVG by file name."""

    name: str
    title: str
    lines: list[Line]
    charts: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        width = max(len(line.name) for line in self.lines)
        header = f"{self.name}: {self.title}\n{'':<{width}}  {'paper':>14}  {'ours':>10}  ratio"
        return "\n".join([header, *(_row(line, width) for line in self.lines)])

    def markdown(self) -> str:
        """Rows of a table."""
        return "\n".join(
            f"| {self.name} | {line.name} | {_paper(line)} | {_ours(line)} | {_ratio(line)} |" for line in self.lines
        )


def _row(line: Line, width: int) -> str:
    return f"{line.name:<{width}}  {_paper(line):>14}  {_ours(line):>10}  {_ratio(line)}".rstrip()


def _ratio(line: Line) -> str:
    return "" if line.ratio is None else f"{line.ratio:.2f}"


def _ours(line: Line) -> str:
    return f"{number_in_words(line.ours)}{line.unit}"


def _paper(line: Line) -> str:
    if line.paper is None:
        return "-"
    if isinstance(line.paper, tuple):
        return f"{number_in_words(line.paper[0])} - {number_in_words(line.paper[1])}{line.unit}"
    return f"{number_in_words(line.paper)}{line.unit}"


def number_in_words(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"
