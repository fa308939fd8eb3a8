"""Grouped bars as SVG, without a plotting library."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _MARGIN = 270, 220, 40
_COLOURS = ("#2f6fab", "#b8c4ce", "#c98a3c", "#7d9f6b")


@dataclass(frozen=True)
class Panel:
    """One chart: `series` has one value a group for each name; None leaves a gap."""

    title: str
    groups: list[str]
    series: dict[str, list[float | None]]


def bar_charts(title: str, panels: list[Panel], columns: int = 2) -> str:
    """All panels on a grid, with one scale a panel."""
    num_rows = -(-len(panels) // columns)
    width, height = columns * _WIDTH, num_rows * _HEIGHT + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(width / 2, 20, title, size=14),
    ]
    for number, name in enumerate(panels[0].series):
        x = width / 2 + (number - 1) * 90
        parts.append(f'<rect x="{x}" y="30" width="10" height="10" fill="{_COLOURS[number]}"/>')
        parts.append(_text(x + 14, 39, name, "start"))
    for place, panel in enumerate(panels):
        row, column = divmod(place, columns)
        parts.append(f'<g transform="translate({column * _WIDTH},{50 + row * _HEIGHT})">{_panel(panel)}</g>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Panel) -> str:
    greatest = max(value for values in panel.series.values() for value in values if value is not None)
    bottom, top = _HEIGHT - _MARGIN, _MARGIN
    parts = [
        _text(_WIDTH / 2, 22, panel.title, size=12),
        f'<line x1="{_MARGIN}" y1="{bottom}" x2="{_WIDTH - 15}" y2="{bottom}" stroke="black"/>',
    ]
    step = (_WIDTH - _MARGIN - 15) / len(panel.groups)
    bar = step * 0.7 / len(panel.series)
    for place, group in enumerate(panel.groups):
        left = _MARGIN + place * step + step * 0.15
        parts.append(_text(left + bar * len(panel.series) / 2, bottom + 15, group))
        for number, values in enumerate(panel.series.values()):
            value = values[place]
            if value is None:
                continue
            height = (bottom - top) * value / greatest
            x, y = left + number * bar, bottom - height
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{bar:.1f}" height="{height:.1f}" fill="{_COLOURS[number]}"/>'
            )
            parts.append(_text(x + bar / 2, y - 3, f"{value:.1f}", size=9))
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str = "middle", size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
