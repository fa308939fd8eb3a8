"""One HTML page of a simulation: the numbers, and plots that need nothing but a browser."""

from __future__ import annotations

import html
import json
from typing import Any

import numpy as np

from quire.simulation.charts.line_chart import Line, line_chart
from quire.simulation.summary import Tally

_TITLES = {
    "ttft": "first token",
    "tpot": "each further token",
    "latency": "whole request",
    "normalized_latency": "per token of answer",
}
_SHARES = (10, 25, 50, 75, 90, 99)
# of the engines, by what they did, so many are shown
_MOST_MARKS = 8
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .8rem;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}svg{max-width:40rem;display:block}pre{background:#f4f4f4;padding:1rem;overflow:auto;font-size:12px}
"""


def page_of(document: dict[str, Any], tally: Tally) -> str:
    """The same numbers, the same bytes."""
    title = f"{document['model']} on {document['devices']} x {document['device']}: {document['trace']}"
    plots = [_latencies(tally), _engines(document["engines"])]
    return "\n".join(
        [
            "<!doctype html><html lang=en><meta charset=utf-8>",
            f"<title>{html.escape(title)}</title><style>{_STYLE}</style>",
            f"<h1>{html.escape(title)}</h1>",
            _table(document),
            *plots,
            f"<h2>All numbers</h2><pre>{html.escape(json.dumps(document, indent=1))}</pre></html>\n",
        ]
    )


def _table(document: dict[str, Any]) -> str:
    names = ("mean", "p50", "p90", "p99", "max")
    rows: list[tuple[str, ...]] = [("", *names)]
    for key in ("ttft_s", "inter_token_s", "tpot_s", "normalized_latency_s", "latency_s"):
        rows.append(
            (f"{key.removesuffix('_s').replace('_', ' ')}, ms", *(f"{document[key][n] * 1e3:,.1f}" for n in names))
        )
    lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    requests = document["requests"]
    facts = [
        f"{requests['completed']:,} requests in {document['seconds']:,.1f} s, {requests['failed']:,} failed",
        f"{document['tokens']['output_per_second']:,.0f} output tokens a second",
        f"{document['cache_hit_rate']:.1%} of prompt tokens from the prefix cache",
        f"{document['preemptions']['recomputed']:,.0f} preempted and computed again, "
        f"{document['preemptions']['swapped']:,.0f} swapped",
    ]
    if "slo" in document:
        slo = document["slo"]
        facts += [f"{term}: {'holds' if holds else 'fails'}" for term, holds in slo["terms"].items()]
        facts.append(f"goodput {slo['goodput_per_second']:.2f} requests a second")
    listed = "".join(f"<li>{html.escape(fact)}</li>" for fact in facts)
    return f"<ul>{listed}</ul><table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _latencies(tally: Tally) -> str:
    lines = []
    for metric, name in _TITLES.items():
        values = tally.values(metric)
        values = values[values > 0]
        if len(values):
            milliseconds = np.percentile(values, _SHARES) * 1e3
            lines.append(Line(name, list(zip(map(float, _SHARES), milliseconds.tolist(), strict=True))))
    if not lines:
        return ""
    return line_chart("Latencies", "of so many per cent of the requests", "ms, at most", lines, log_y=True)


def _engines(engines: list[dict[str, float]]) -> str:
    """From the least to the most of each, so that a few marks show a thousand."""
    places = sorted({round(place) for place in np.linspace(0, len(engines) - 1, _MOST_MARKS)})
    lines = []
    for key, name in (("busy", "time busy"), ("kv_blocks_held", "KV blocks held")):
        shares = sorted(100 * one[key] for one in engines)
        lines.append(Line(name, [(float(place + 1), shares[place]) for place in places]))
    return line_chart("Engines", "engines, sorted", "per cent", lines)
