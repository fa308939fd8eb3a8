"""Lines over numbers as SVG, without a plotting library; readable on light and on dark pages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 640, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 490, 45, 320
_LINE_HEIGHT = 16
_MOST_LINES = 5

# Every colour has a light and a dark tone of similar contrast with its ground.
_STYLE = """
svg { --ground: #ffffff; --ink: #1f2933; --grid: #dfe4e8;
      --line0: #1f6fb4; --line1: #b8511a; --line2: #2b7d47; --line3: #7d4a9c; --line4: #5a6672; }
@media (prefers-color-scheme: dark) {
svg { --ground: #14181c; --ink: #e3e7ea; --grid: #323a42;
      --line0: #6db3f2; --line1: #f0995c; --line2: #66c488; --line3: #c392de; --line4: #a3adb7; } }
text { fill: var(--ink); font-family: sans-serif; font-size: 12px; }
.grid { stroke: var(--grid); }
.line { fill: none; stroke-width: 2; }
.band { stroke: none; opacity: 0.18; }
"""


@dataclass(frozen=True)
class Line:
    """`points` are (x, y), x rising; `spread` has (lowest, highest) for each point, or nothing."""

    name: str
    points: list[tuple[float, float]]
    spread: tuple[tuple[float, float], ...] = ()


class _Axis:
    """From values to pixels."""

    def __init__(self, values: list[float], pixels: tuple[int, int], is_log: bool) -> None:
        self._scale = math.log10 if is_log else float
        self._pixels = pixels
        self._low, self._high = self._scale(min(values)), self._scale(max(values))
        if self._low == self._high:
            self._low, self._high = self._low - 0.5, self._high + 0.5

    def __call__(self, value: float) -> float:
        start, end = self._pixels
        return start + (end - start) * (self._scale(value) - self._low) / (self._high - self._low)


def line_chart(
    title: str, x_label: str, y_label: str, lines: list[Line], *, log_x: bool = False, log_y: bool = False
) -> str:
    """One chart. The x axis is marked where the points are; lines are named at their ends."""
    if len(lines) > _MOST_LINES:
        raise ValueError(f"{len(lines)} lines: at most {_MOST_LINES} can be told apart")
    numbers = sorted({x for line in lines for x, _ in line.points})
    heights = [y for line in lines for _, y in line.points] + [
        y for line in lines for pair in line.spread for y in pair
    ]
    marks = _log_marks(heights) if log_y else _linear_marks(max(heights))
    # A linear axis begins at 0; a logarithmic one shows everything.
    shown = [*heights, marks[0], marks[-1]] if log_y else [0.0, marks[-1]]
    x_axis, y_axis = _Axis(numbers, (_LEFT, _RIGHT), log_x), _Axis(shown, (_BOTTOM, _TOP), log_y)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"><style>{_STYLE}</style>',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" style="fill:var(--ground)"/>',
        _text((_LEFT + _RIGHT) / 2, 24, title, size=15),
        _text((_LEFT + _RIGHT) / 2, _HEIGHT - 20, x_label),
        f'<g transform="translate(18,{(_TOP + _BOTTOM) / 2}) rotate(-90)">{_text(0, 0, y_label)}</g>',
        *(_rule(y_axis(mark), _number(mark)) for mark in marks),
        *(_text(x_axis(x), _BOTTOM + 18, _number(x)) for x in numbers),
        *(_curve(number, line, x_axis, y_axis) for number, line in enumerate(lines)),
        *_names(lines, y_axis),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _curve(number: int, line: Line, x_axis: _Axis, y_axis: _Axis) -> str:
    places = [(x_axis(x), y_axis(y)) for x, y in line.points]
    colour = f"var(--line{number})"
    parts = [f'<polyline class="line" style="stroke:{colour}" points="{_list(places)}"/>']
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill:{colour}"/>' for x, y in places]
    if line.spread:
        across = [x for x, _ in places]
        lower = [(x, y_axis(low)) for x, (low, _) in zip(across, line.spread, strict=True)]
        upper = [(x, y_axis(high)) for x, (_, high) in zip(across, line.spread, strict=True)]
        parts.insert(0, f'<polygon class="band" style="fill:{colour}" points="{_list([*lower, *reversed(upper)])}"/>')
    return "".join(parts)


def _names(lines: list[Line], y_axis: _Axis) -> list[str]:
    """Beside the last points, pushed apart where these lie close together."""
    order = sorted(range(len(lines)), key=lambda number: y_axis(lines[number].points[-1][1]))
    parts, lowest = [], -math.inf
    for number in order:
        y = max(y_axis(lines[number].points[-1][1]) + 4, lowest + _LINE_HEIGHT)
        lowest = y
        colour = f"var(--line{number})"
        parts.append(f'<circle cx="{_RIGHT + 16}" cy="{y - 4:.1f}" r="4" style="fill:{colour}"/>')
        parts.append(_text(_RIGHT + 26, y, lines[number].name, "start"))
    return parts


def _rule(y: float, text: str) -> str:
    line = f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{_RIGHT}" y2="{y:.1f}"/>'
    return line + _text(_LEFT - 8, y + 4, text, "end")


def _log_marks(values: list[float]) -> list[float]:
    """1, 2 and 5 within each power of ten, or the powers alone where these would be many."""
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    marks = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    below = max((mark for mark in marks if mark <= min(values)), default=marks[0])
    above = min((mark for mark in marks if mark >= max(values)), default=marks[-1])
    return [mark for mark in marks if below <= mark <= above]


def _linear_marks(greatest: float) -> list[float]:
    """From 0 on, in some five steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(greatest / 5 or 1.0))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= greatest / 5)
    return [step * number for number in range(math.ceil(greatest / step - 1e-9) + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def _list(places: list[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _text(x: float, y: float, text: str, anchor: str = "middle", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="font-size:{size}px">{escape(text)}</text>'
