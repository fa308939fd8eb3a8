"""A recording as a trace in Chrome's JSON format, which ui.perfetto.dev and chrome://tracing open.

engine      one track of steps, one of what concerns no request; counters of blocks, requests and tokens
requests    a lane each: waiting, running, gave way, in swap space; in it the chunks of its prompt and each decision
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from quire.observability.decisions import Decision
from quire.observability.recorded import Recording, Step

Event = dict[str, Any]
_ENGINE = 1
_REQUESTS = 2
_STEPS = 1
_DECISIONS = 2
# what a request does from this decision on
_BEGINS = {"arrived": "waiting", "started": "running"}


def perfetto_trace(recording: Recording) -> dict[str, Any]:
    """Ready for json.dumps. Times are microseconds from the first thing that was recorded."""
    starts = [step.began for step in recording.steps[:1]] + [one.time for one in recording.decisions[:1]]
    origin = min(starts, default=recording.now)
    events = [*_names(recording), *_steps(recording, origin), *_lanes(recording, origin), *_told(recording, origin)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"num_blocks": recording.num_blocks, "block_size": recording.block_size},
    }


def _names(recording: Recording) -> Iterator[Event]:
    yield _name("process_name", _ENGINE, 0, "engine")
    yield _name("process_name", _REQUESTS, 0, "requests")
    yield _name("thread_name", _ENGINE, _STEPS, "steps")
    yield _name("thread_name", _ENGINE, _DECISIONS, "blocks")
    for request in sorted({decision.request for decision in recording.decisions if decision.request >= 0}):
        yield _name("thread_name", _REQUESTS, request, f"request {request}")


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


# ---------------------------------------------------------------------------------------------- steps


def _steps(recording: Recording, origin: float) -> Iterator[Event]:
    for step, began, ended in executed(recording):
        tokens = int(step.num_tokens.sum())
        args = {"tokens": tokens, "sequences": len(step.sequence_ids), "running": step.num_running}
        yield _span(f"step {step.step}", _ENGINE, _STEPS, began - origin, ended - began, args)
        yield from _chunks(step, began - origin, ended - began)
        at = step.began - origin
        yield _counter("KV cache blocks", at, {"held": step.num_held, "cached": step.num_cached})
        yield _counter("requests", at, {"running": step.num_running, "waiting": step.num_waiting})
        yield _counter("tokens of a step", at, {"tokens": tokens})


def executed(recording: Recording) -> Iterator[tuple[Step, float, float]]:
    """(step, from, until): a step that was decided while another one ran begins when that one ends (4.6.1)."""
    free_at = 0.0
    for number, step in enumerate(recording.steps):
        began = max(step.began, free_at)
        ended = step.ended
        if not ended:  # in flight, or longer ago than ends are remembered
            following = recording.steps[number + 1 : number + 2]
            ended = following[0].began if following else recording.now
        free_at = max(began, ended)
        yield step, began, free_at


def _chunks(step: Step, at: float, seconds: float) -> Iterator[Event]:
    """Requests that computed more than a token for each of their sequences."""
    if not len(step.num_tokens) or int(step.num_tokens.max()) <= 1:
        return
    requests, index = np.unique(step.sequence_ids >> 10, return_inverse=True)
    tokens, most = np.zeros((2, len(requests)), dtype=np.int64)
    np.add.at(tokens, index, step.num_tokens)
    np.maximum.at(most, index, step.num_tokens)
    for request, count in zip(requests[most > 1].tolist(), tokens[most > 1].tolist(), strict=True):
        yield _span(f"{count} tokens", _REQUESTS, request, at, seconds, {"step": step.step})


def _span(name: str, process: int, thread: int, at: float, seconds: float, args: dict[str, Any]) -> Event:
    times = {"ts": round(at * 1e6, 1), "dur": round(max(seconds, 0.0) * 1e6, 1)}
    return {"ph": "X", "name": name, "pid": process, "tid": thread, **times, "args": args}


def _counter(name: str, at: float, values: dict[str, int]) -> Event:
    return {"ph": "C", "name": name, "pid": _ENGINE, "tid": 0, "ts": round(at * 1e6, 1), "args": values}


# ---------------------------------------------------------------------------------------------- requests


def _lanes(recording: Recording, origin: float) -> Iterator[Event]:
    open_spans: dict[int, tuple[str, float]] = {}
    for decision in recording.decisions:
        begun = _begun_by(decision)
        is_end = decision.kind == "refused" or (decision.kind == "ended" and not decision.amount)
        if begun is None and not is_end:
            continue
        before = open_spans.pop(decision.request, None)
        if before is not None:
            yield _span(before[0], _REQUESTS, decision.request, before[1] - origin, decision.time - before[1], {})
        if begun is not None:
            open_spans[decision.request] = (begun, decision.time)
    for request, (name, since) in open_spans.items():
        yield _span(name, _REQUESTS, request, since - origin, recording.now - since, {"open": True})


def _begun_by(decision: Decision) -> str | None:
    if decision.kind == "preempted":
        return "in swap space" if decision.amount else "gave way"
    return _BEGINS.get(decision.kind)


def _told(recording: Recording, origin: float) -> Iterator[Event]:
    for one in recording.decisions:
        process, thread = (_REQUESTS, one.request) if one.request >= 0 else (_ENGINE, _DECISIONS)
        yield {
            "ph": "i", "s": "t", "name": one.kind, "pid": process, "tid": thread,
            "ts": round((one.time - origin) * 1e6, 1), "args": {"step": one.step, "words": one.words()},
        }  # fmt: skip
