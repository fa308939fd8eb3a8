"""The recorder: what it keeps is what happened, it is bounded, and nobody decides otherwise because of it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.support.recordings import recording_of

from quire.observability.decisions import KINDS, Decision
from quire.observability.perfetto import perfetto_trace
from quire.observability.recorder import DecisionRecorder, Ring
from quire.testing.core import CoreUnderTest

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


class Clock:
    """A second passes whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def recorded_core(num_bytes: int = 1 << 22, **settings) -> CoreUnderTest:
    return CoreUnderTest(recorder=DecisionRecorder(num_bytes, Clock()), **settings)


def kinds_of(core: CoreUnderTest, request: int) -> list[str]:
    return [one.kind for one in recording_of(core).decisions if one.request == request]


def busy_core(**settings) -> CoreUnderTest:
    """Sharing, forks, copies, evictions and preemption, by recomputation or by swapping."""
    core = recorded_core(num_blocks=16, **settings)
    for number in range(6):
        core.add(number, [*PROMPT, number], max_tokens=14, n=1 + number % 2, temperature=1.0, seed=number)
    core.run()
    return core


def test_a_ring_keeps_the_newest_that_fit():
    ring: Ring[str] = Ring(100)
    for number in range(10):
        ring.append(f"entry {number}", 30)
    assert (len(ring), ring.first_number, ring.next_number, ring.num_bytes) == (3, 7, 10, 90)
    assert ring.since(0, 2) == ["entry 7", "entry 8"]
    assert ring.since(9, 5) == ring.last(1) == ["entry 9"]
    assert ring.since(10, 5) == ring.since(99, 5) == ring.since(0, 0) == []


def test_a_ring_is_read_the_same_from_both_ends():
    ring: Ring[int] = Ring(100)
    for number in range(25):
        ring.append(number, 10)
    for number in range(30):
        for limit in range(12):
            assert ring.since(number, limit) == list(range(25))[max(15, number) :][:limit]


def test_an_entry_that_is_larger_than_the_ring_is_not_kept():
    ring: Ring[str] = Ring(10)
    ring.append("large", 11)
    assert (len(ring), ring.num_bytes, ring.next_number) == (0, 0, 1)


def test_the_life_of_a_request_is_told_in_order():
    core = recorded_core()
    core.add(1, PROMPT, max_tokens=2)
    core.run()
    core.add(2, PROMPT, max_tokens=2)
    core.run()
    assert kinds_of(core, 1) == ["arrived", "started", "ended"]
    assert kinds_of(core, 2) == ["arrived", "started", "found", "ended"]
    words = recording_of(core).words()
    assert "step 3: request 2 found 8 of its 9 tokens in the cache" in words
    assert any("request 2 ended: it has as many tokens as it may have" in line for line in words)


def test_steps_say_who_computed_how_many_tokens():
    core = recorded_core(budget=4)
    core.add(1, PROMPT, max_tokens=2)
    core.run()
    steps = recording_of(core).steps
    assert [step.num_tokens.tolist() for step in steps] == [[4], [4], [1], [1]]
    assert all((step.sequence_ids >> 10).tolist() == [1] for step in steps)
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert all(step.began < step.ended for step in steps)


def test_a_refusal_shows_no_text_of_its_request():
    core = recorded_core()
    core.add(1, PROMPT, request={"continues": "a secret handle"})
    core.add(2, PROMPT, max_tokens=100, n=16)
    core.add(3, [10_000_000])
    core.run()
    said = "\n".join(recording_of(core).words())
    assert "request 1 was refused: its client was told why" in said
    assert "request 2 was refused: it needs more memory than there is, even alone" in said
    assert "request 3 was refused: it names a token that the model does not have" in said
    assert "secret" not in said
    assert "10000000" not in said.replace(",", "")


@pytest.mark.parametrize("mode, way", [("recompute", "computed again"), ("swap", "swap space")])
def test_who_gives_way_is_named_with_the_reason(mode: str, way: str):
    core = recorded_core(num_blocks=8, preemption_mode=mode, num_host_blocks=8)
    core.add(1, PROMPT, max_tokens=12)
    core.add(2, PROMPT[::-1], max_tokens=12)
    core.run()
    said = [one.words() for one in recording_of(core).decisions if one.kind == "preempted"]
    assert said
    assert all("needs a block and none is free" in line and way in line for line in said)


def test_who_is_turned_away_is_told_once():
    core = recorded_core(num_blocks=8)
    core.add(1, PROMPT, max_tokens=20)
    core.add(2, [*range(20, 44)], max_tokens=2)
    core.run()
    told = [one for one in recording_of(core).decisions if one.kind == "turned_away"]
    assert [(one.request, one.why) for one in told] == [(2, "memory")]
    assert told[0].amount > told[0].other


@pytest.mark.parametrize("settings", [{}, {"preemption_mode": "swap", "num_host_blocks": 16}, {"is_async": True}])
def test_the_pool_can_be_computed_from_what_was_recorded(settings: dict):
    core = busy_core(**settings)
    free, cached = set(range(core.pool.num_blocks)), set()
    for change in recording_of(core).changes:
        blocks = set(change.columns[0].tolist())
        if change.kind == "allocated":
            assert blocks <= free
            free -= blocks
        elif change.kind in ("revived", "evicted"):
            assert blocks <= cached
            cached -= blocks
            free |= blocks if change.kind == "evicted" else set()
        elif change.kind in ("freed", "forgotten"):
            cached -= blocks
            free |= blocks
        elif change.kind == "cached":
            cached |= blocks
    assert free == set(core.pool.free_blocks)
    assert cached == set(core.pool.cached_blocks().tolist())


def test_block_tables_can_be_computed_from_what_was_recorded():
    core = recorded_core()
    core.add(1, PROMPT, max_tokens=30)
    core.add(2, PROMPT[::-1], max_tokens=30)
    for _ in range(9):
        core.step()
    tables: dict[int, dict[int, int]] = {}
    for change in recording_of(core).changes:
        if change.kind == "attached":
            for sequence, index, block in change.columns.T.tolist():
                tables.setdefault(sequence, {})[index] = block
    living = {one.sequence_id: one.block_tables[0].blocks.tolist() for one in core.scheduler.running.living_sequences()}
    assert {number: [table[index] for index in sorted(table)] for number, table in tables.items()} == living


def test_copies_and_evictions_are_told_as_sums():
    core = busy_core()
    told = [one for one in recording_of(core).decisions if one.kind in ("copied", "evicted")]
    copied = sum(one.amount for one in told if one.kind == "copied")
    assert 0 < copied <= core.manager.num_copied_blocks
    assert all(one.request == -1 for one in told)


def test_memory_is_bounded_and_numbers_go_on():
    core = recorded_core(num_bytes=6_000)
    for number in range(60):
        core.add(number, [*PROMPT, number % 40], max_tokens=5)
    core.run()
    recorder = core.recorder
    for ring in (recorder.steps, recorder.decisions, recorder.blocks):
        assert ring.num_bytes <= 6_000
        assert ring.next_number > len(ring) > 0
    assert recording_of(core).decisions[-1].number == recorder.decisions.next_number - 1


@pytest.mark.parametrize("settings", [{}, {"is_async": True}, {"preemption_mode": "swap", "num_host_blocks": 16}])
def test_nobody_decides_otherwise_because_of_it(settings: dict):
    def schedule(core: CoreUnderTest) -> tuple[object, ...]:
        for number in range(8):
            core.add(number, [*PROMPT, number], max_tokens=14, n=1 + number % 3, temperature=1.0, seed=number)
        core.run()
        return dict(core.tokens), core.ends, core.core.statistics()

    watched, alone = recorded_core(num_blocks=16, **settings), CoreUnderTest(num_blocks=16, **settings)
    for number in (0, 1):
        watched.core.control("observe_blocks", {})
        watched.core.control("recent_decisions", {"since": number})
    assert schedule(watched) == schedule(alone)


def test_every_kind_has_words():
    for kind in KINDS:
        why = {"started": "new", "turned_away": "rows", "ended": "stop"}.get(kind, "a reason")
        said = Decision(0, 1, 0.0, kind, 7, 1, 3, 9, why).words()
        assert said
        assert not said.endswith(".")


# ---------------------------------------------------------------------------------------------- trace


def trace_of(core: CoreUnderTest) -> list[dict]:
    trace = json.loads(json.dumps(perfetto_trace(recording_of(core))))
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    return trace["traceEvents"]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_trace_has_the_form_that_perfetto_reads(is_async: bool):
    events = trace_of(busy_core(is_async=is_async))
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["args"]["name"]
            continue
        assert event["ts"] >= 0
        assert event["ph"] in {"X", "C", "i"}
        assert event["ph"] != "X" or event["dur"] >= 0
        assert event["ph"] != "i" or event["s"] == "t"
        assert event["ph"] != "C" or all(isinstance(value, int) for value in event["args"].values())
        assert event["ph"] == "C" or (event["pid"], event["tid"]) in named
    assert_nested([event for event in events if event["ph"] == "X"])


def assert_nested(spans: list[dict]) -> None:
    """Two spans of one track lie beside each other or one in the other, else viewers drop one of them."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for span in spans:
        tracks.setdefault((span["pid"], span["tid"]), []).append((span["ts"], span["ts"] + span["dur"]))
    for track in tracks.values():
        open_until: list[float] = []
        for start, end in sorted(track, key=lambda one: (one[0], -one[1])):
            while open_until and open_until[-1] <= start + 0.2:  # times are rounded to tenths
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.2
            open_until.append(end)


def test_a_lane_shows_waiting_running_and_what_gave_way():
    core = recorded_core(num_blocks=8, preemption_mode="swap", num_host_blocks=8)
    core.add(1, PROMPT, max_tokens=12)
    core.add(2, PROMPT[::-1], max_tokens=12)
    core.run()
    lanes: dict[int, list[str]] = {1: [], 2: []}
    for event in trace_of(core):
        if event["ph"] == "X" and event["pid"] == 2 and not event["name"].endswith("tokens"):
            lanes[event["tid"]].append(event["name"])
    assert lanes[1] == ["waiting", "running"]
    assert lanes[2][:4] == ["waiting", "running", "in swap space", "running"]


def test_steps_that_overlap_are_drawn_one_after_the_other():
    events = [event for event in trace_of(busy_core(is_async=True)) if event["name"].startswith("step ")]
    ends = np.array([event["ts"] + event["dur"] for event in events])
    starts = np.array([event["ts"] for event in events])
    assert len(events) > 5
    assert (starts[1:] >= ends[:-1] - 0.2).all()
