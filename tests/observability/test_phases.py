"""The table of start-up phases, on a clock that is handed in."""

import itertools

from quire.observability.phases import PhaseTimer


def timer_on(*times: float) -> PhaseTimer:
    moments = itertools.chain(times, itertools.repeat(times[-1]))
    return PhaseTimer(clock=lambda: next(moments))


def test_a_phase_has_its_start_and_its_length():
    phases = timer_on(100.0, 101.0, 103.5, 104.0)
    with phases.measure("load", "cold"):
        pass
    (phase,) = phases.phases
    assert (phase.name, phase.start, phase.seconds, phase.note) == ("load", 1.0, 2.5, "cold")
    assert phases.table().splitlines() == [
        "phase      from      took",
        "load     1.00 s    2.50 s  cold",
        "ready    4.00 s",
    ]


def test_a_phase_that_fails_is_there_too():
    phases = timer_on(0.0, 1.0, 2.0)
    try:
        with phases.measure("load"):
            raise ValueError
    except ValueError:
        pass
    assert [phase.name for phase in phases.phases] == ["load"]


def test_phases_of_another_process_stand_under_its_own():
    theirs = timer_on(0.0, 1.0, 3.0, 3.0, 4.0)
    for name in ("load", "measure"):
        with theirs.measure(name):
            pass
    ours = timer_on(0.0, 10.0, 15.0)
    with ours.measure("engine"):
        pass
    ours.add_reported([*theirs.report(), "KV cache: 16 blocks"], end=15.0)
    assert [(phase.name, phase.start, phase.seconds) for phase in ours.phases] == [
        ("engine", 10.0, 5.0),
        ("  load", 12.0, 2.0),
        ("  measure", 14.0, 1.0),
    ]
