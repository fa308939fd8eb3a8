"""Sums of times and bytes, and what is made of them when somebody asks."""

from quire.observability.metrics import ENGINE_STATISTICS, ServerMetrics
from quire.observability.step_times import CORE_PHASES, SENT, WORKER_PHASES, NoStepTimes, StepTimes


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_phase_ends_where_the_next_begins():
    clock = Clock()
    times = StepTimes(clock, ("first", "second"), prefix="worker_")
    for first, second in ((1.0, 0.5), (2.0, 0.25)):
        clock.now += 7.0
        times.begin()
        clock.now += first
        times.ends("first")
        clock.now += second
        times.ends("second")
    times.sent("clients", 30)
    times.sent("clients", 12)
    assert times.statistics() == {
        "worker_step_seconds_first_total": 3.0,
        "worker_step_seconds_second_total": 0.75,
        "step_bytes_clients_total": 42,
    }


def test_nobody_counts_by_default():
    times = NoStepTimes()
    times.begin()
    times.ends("schedule")
    times.sent("clients", 1)
    assert times.statistics() == {}


def test_every_sum_is_named():
    sums = {
        *(f"step_seconds_{phase}_total" for phase in CORE_PHASES),
        *(f"worker_step_seconds_{phase}_total" for phase in WORKER_PHASES),
        *(f"step_bytes_{what}_total" for what in SENT),
    }
    assert sums <= set(ENGINE_STATISTICS)


def exposed(statistics):
    lines = ServerMetrics().exposition(statistics).decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if line.startswith("quire:"))


def test_ratios_follow_from_the_sums():
    seconds = {"receive": 1.0, "control": 4.0, "schedule": 2.0, "execute": 8.0, "wait": 80.0, "update": 3.0}
    statistics = {f"step_seconds_{phase}_total": value for phase, value in seconds.items()}
    statistics |= {"step_seconds_deliver_total": 2.0, "preemption_lost_seconds_total": 25.0}
    found = exposed({**statistics, "num_steps_total": 1000, "num_requests_total": 40})
    assert float(found['quire:preemption_tax_ratio{model_name=""}']) == 0.25
    assert float(found['quire:engine_overhead_seconds_per_step{model_name=""}']) == 0.008
    assert float(found['quire:engine_overhead_seconds_per_request{model_name=""}']) == 0.2
    assert float(found['quire:step_seconds_total{model_name="",phase="wait"}']) == 80.0


def test_what_is_not_known_is_not_told():
    """An engine that has done nothing, and one that counts no times."""
    for statistics in ({}, {"num_steps_total": 5, "num_requests_total": 1, "preemption_lost_seconds_total": 1.0}):
        assert not [name for name in exposed(statistics) if "overhead" in name or "tax" in name]
