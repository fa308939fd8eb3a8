"""The core decides what it decided when the decisions of 200 random workloads were recorded."""

import pytest
from tests.support.golden_decisions import RECORDED, SEEDS, digest_of, recorded

# in the default run
SAMPLE = SEEDS[::5]


def test_every_workload_is_recorded() -> None:
    assert list(recorded()) == list(SEEDS), f"{RECORDED}: record it anew"


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in SAMPLE else pytest.mark.nightly) for seed in SEEDS]
)
def test_decisions(seed: int) -> None:
    assert digest_of(seed) == recorded()[seed]
