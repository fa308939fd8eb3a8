"""Who worked when, as bars on lanes over time: SVG without a plotting library, for light and for dark pages."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

_WIDTH, _LEFT, _RIGHT, _TOP = 760, 130, 740, 70
_LANE, _BAR = 40, 24

# Every colour has a light and a dark tone of similar contrast with its ground, as in quire.simulation.charts.
_STYLE = """
svg { --ground: #ffffff; --ink: #1f2933; --grid: #dfe4e8;
      --bar0: #1f6fb4; --bar1: #b8511a; --bar2: #2b7d47; --bar3: #7d4a9c; --bar4: #5a6672; }
@media (prefers-color-scheme: dark) {
svg { --ground: #14181c; --ink: #e3e7ea; --grid: #323a42;
      --bar0: #6db3f2; --bar1: #f0995c; --bar2: #66c488; --bar3: #c392de; --bar4: #a3adb7; } }
text { fill: var(--ink); font-family: sans-serif; font-size: 12px; }
.grid { stroke: var(--grid); }
"""


@dataclass(frozen=True)
class Bar:
    """Work of one kind, from when to when, in the unit of the axis."""

    kind: str
    start: float
    end: float


def timeline_chart(title: str, x_label: str, lanes: dict[str, list[Bar]], length: float) -> str:
    """Lanes from top to bottom, time from 0 to `length`; a colour for each kind, in the order in which kinds occur."""
    kinds = list(dict.fromkeys(bar.kind for bars in lanes.values() for bar in bars))
    bottom = _TOP + _LANE * len(lanes)
    scale = (_RIGHT - _LEFT) / length
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 55}"><style>{_STYLE}</style>',
        f'<rect width="{_WIDTH}" height="{bottom + 55}" style="fill:var(--ground)"/>',
        _text(_WIDTH / 2, 22, title, size=15),
        *_names(kinds),
    ]
    for number in range(6):
        x = _LEFT + (_RIGHT - _LEFT) * number / 5
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{_TOP - 6}" x2="{x:.1f}" y2="{bottom}"/>')
        parts.append(_text(x, bottom + 16, f"{length * number / 5:.3g}"))
    parts.append(_text((_LEFT + _RIGHT) / 2, bottom + 40, x_label))
    for number, (name, bars) in enumerate(lanes.items()):
        y = _TOP + _LANE * number
        parts.append(_text(_LEFT - 10, y + _BAR / 2 + 8, name, "end"))
        for bar in bars:
            start, end = max(bar.start, 0.0), min(bar.end, length)
            if end <= start:
                continue
            # what is too short to be seen is drawn as a hair
            width = max((end - start) * scale, 0.7)
            parts.append(
                f'<rect x="{_LEFT + start * scale:.2f}" y="{y + 4}" width="{width:.2f}" height="{_BAR}" '
                f'style="fill:var(--bar{kinds.index(bar.kind)})"/>'
            )
    return "\n".join([*parts, "</svg>\n"])


def _names(kinds: list[str]) -> list[str]:
    parts = []
    for number, kind in enumerate(kinds):
        x = _LEFT + number * 120
        parts.append(f'<rect x="{x}" y="36" width="12" height="12" style="fill:var(--bar{number})"/>')
        parts.append(_text(x + 18, 47, kind, "start"))
    return parts


def _text(x: float, y: float, text: str, anchor: str = "middle", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="font-size:{size}px">{escape(text)}</text>'
