"""Random workloads on the simulated executor: every rule after every step, and every token as it must be.

The number of steps is QUIRE_RANDOM_STEPS (default 30,000). `python -m quire.testing.soak` runs as many as you like;
`make nightly` runs 20 million. A seed that once failed stands in tests/seeds/found.txt and is run each time.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from quire.engine_core.scheduler.policies import make_policy
from quire.testing.simulator.coverage import RARE_TRANSITIONS, TRANSITIONS, counts_of
from quire.testing.simulator.engine_settings import PLAIN_ENGINE, POLICIES
from quire.testing.simulator.workload import Workload, check_policy
from quire.testing.soak import FIRST_SEED, STEPS_OF_A_SEED, run_seed

NUM_STEPS = int(os.environ.get("QUIRE_RANDOM_STEPS", "30000"))
NUM_PARTS = 25
NUM_STATE_PARTS = 12
FOUND = Path(__file__).parents[1] / "seeds" / "found.txt"
OFTEN = 50
SOMETIMES = 5


@pytest.fixture(scope="module")
def counts() -> Counter[str]:
    """What all parts together have brought about."""
    return Counter()


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_every_rule_holds_over_random_schedules(part: int, counts: Counter[str]) -> None:
    num_steps, seed = 0, part
    while num_steps < NUM_STEPS / NUM_PARTS:
        workload = run_seed(seed)
        num_steps += workload.core.executor.work.num_steps
        counts.update(counts_of(workload))
        counts["workloads"] += 1
        seed += NUM_PARTS


@pytest.mark.parametrize("part", range(NUM_STATE_PARTS))
def test_every_rule_holds_with_states(part: int, counts: Counter[str]) -> None:
    num_steps, seed = 0, FIRST_SEED + part
    while num_steps < NUM_STEPS / NUM_PARTS:
        workload = run_seed(seed)
        num_steps += workload.core.executor.work.num_steps
        counts.update(counts_of(workload))
        counts["workloads with states"] += 1
        seed += NUM_STATE_PARTS


def test_the_workloads_reach_every_transition_often(counts: Counter[str]) -> None:
    """Counts those of the test above; alone, it runs some workloads of its own."""
    for seed in range(120) if counts["workloads"] < 80 else ():
        counts.update(counts_of(run_seed(seed)))
    for seed in range(FIRST_SEED, FIRST_SEED + 40) if counts["workloads with states"] < 40 else ():
        counts.update(counts_of(run_seed(seed)))
    assert {name: counts[name] for name in TRANSITIONS if counts[name] < OFTEN} == {}
    assert {name: counts[name] for name in RARE_TRANSITIONS if counts[name] < SOMETIMES} == {}


def seeds() -> list[tuple[int, bool]]:
    """A seed a line, and whether its engine is the plain one; what follows is a comment."""
    lines = [line.split("#")[0].split() for line in FOUND.read_text(encoding="utf-8").splitlines()]
    return [(int(line[0]), line[1:] == ["plain"]) for line in lines if line]


@pytest.mark.parametrize(("seed", "is_plain"), seeds())
def test_a_seed_that_failed_once_passes(seed: int, is_plain: bool) -> None:
    run_seed(seed, engine=PLAIN_ENGINE if is_plain else None)


def test_the_same_calls_give_the_same_schedule() -> None:
    """I16."""
    logs = []
    for _ in range(2):
        workload = Workload(7)
        logs.append([workload.step() for _ in range(STEPS_OF_A_SEED)])
    assert logs[0] == logs[1]
    assert any(logs[0])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_keeps_its_contract(policy: str) -> None:
    check_policy(make_policy(policy), num_seeds=4)
