"""What became of one request of a recorded run, in plain sentences; and the whole run as the recorder would have it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import msgspec

from quire.errors import OptionError
from quire.messages import split_sequence_id
from quire.observability.decisions import Decision, plural
from quire.observability.recorded import Recording, read_change, read_step
from quire.simulation.replay import Replay


def recording_of(replay: Replay) -> Recording:
    """Everything that its recorder was told."""
    core = replay.core
    assert core is not None
    pieces = {}
    for part in ("steps", "decisions", "changes"):
        entries: list[Any] = []
        while True:
            piece = core.control("recording", {"part": part, "since": len(entries)})
            entries += piece["entries"]
            if not piece["entries"]:
                break
        pieces[part] = entries
    return Recording(
        now=replay.now(),
        num_blocks=core.ready.num_blocks,
        block_size=core.ready.block_size,
        steps=[read_step(entry) for entry in pieces["steps"]],
        decisions=[msgspec.convert(entry, Decision) for entry in pieces["decisions"]],
        changes=[read_change(entry) for entry in pieces["changes"]],
    )


@dataclass
class _Work:
    """What steps did for a request."""

    steps: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_blocks: int = 0


def life_of(request: int, recording: Recording) -> str:
    """A line for each decision about it, then what it came to."""
    told = [decision for decision in recording.decisions if decision.request == request]
    if not told:
        known = sorted({decision.request for decision in recording.decisions if decision.request >= 0})
        there = f"It has {known[0]} to {known[-1]}." if known else "It has none."
        raise OptionError(f"--explain {request}: the log has no such request. {there}")
    lines = []
    for _, alike in groupby(told, key=lambda decision: (decision.kind, decision.why, decision.sequence)):
        decisions = list(alike)
        first, last = decisions[0], decisions[-1]
        again = f", and again until step {last.step} ({len(decisions)} times)" if len(decisions) > 1 else ""
        lines.append(f"{first.time:9.3f} s  step {first.step:<6} {first.words()}{again}.")
    work = _work_for(request, recording)
    if work.steps:
        lines.append(
            f"It was computed in {plural(len(work.steps), 'step')} from {work.steps[0]} to {work.steps[-1]}, "
            f"{plural(work.num_tokens, 'token')} in all, into {plural(work.num_blocks, 'block')}."
        )
    lines.append(_waiting_of(told))
    return "\n".join(lines)


def _work_for(request: int, recording: Recording) -> _Work:
    work = _Work()
    for step in recording.steps:
        is_its = [split_sequence_id(sequence_id)[0] == request for sequence_id in step.sequence_ids.tolist()]
        num_tokens = int(step.num_tokens[is_its].sum()) if any(is_its) else 0
        if num_tokens:
            work.steps.append(step.step)
            work.num_tokens += num_tokens
    blocks = set()
    for change in recording.changes:
        if change.kind == "attached":
            for sequence_id, _, block in change.columns.T.tolist():
                if split_sequence_id(sequence_id)[0] == request:
                    blocks.add(block)
    work.num_blocks = len(blocks)
    return work


def _waiting_of(told: list[Decision]) -> str:
    """How long it was there and did not run."""
    waited = 0.0
    since: float | None = None
    for decision in told:
        if decision.kind in ("arrived", "preempted"):
            since = decision.time
        elif decision.kind == "started" and since is not None:
            waited += decision.time - since
            since = None
    seconds = told[-1].time - told[0].time
    preempted = sum(decision.kind == "preempted" for decision in told)
    gave_way = f", and gave way {plural(preempted, 'time')}" if preempted else ""
    return f"Of {seconds:.3f} s it waited {waited:.3f} s{gave_way}."
