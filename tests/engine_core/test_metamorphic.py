"""The same requests give the same tokens in every setting (I12), on the simulated executor.

144 random cases by default; QUIRE_RANDOM_CASES or `-m nightly` runs 2,000 and more. Each is run in PLAIN and in one of
the 144 settings, which take turns, so that every setting is met, with the engine's settings drawn by chance: policy,
asynchronous scheduling, speculation, limits.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from tests.support.metamorphic import PLAIN, SETTINGS, outputs_of, random_case

from quire.testing.simulator.engine_settings import random_engine

NUM_CASES = int(os.environ.get("QUIRE_RANDOM_CASES", "144"))
NUM_PARTS = 10


@pytest.fixture(scope="module")
def preemptions() -> Counter[str]:
    """How many requests gave way, by kind of memory."""
    return Counter()


def check_case(seed: int, preemptions: Counter[str]) -> None:
    # 144 and 35 have no common divisor: settings that follow each other differ in most respects
    setting = SETTINGS[seed * 35 % len(SETTINGS)]
    case = random_case(seed)
    expected, _ = outputs_of(case, PLAIN)
    engine = random_engine(seed)
    found, num_preemptions = outputs_of(case, setting, engine)
    assert found == expected, f"case {seed}: {setting} {engine}"
    preemptions[setting.memory] += num_preemptions


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_settings_change_no_token(part: int, preemptions: Counter[str]) -> None:
    for seed in range(part, NUM_CASES, NUM_PARTS):
        check_case(seed, preemptions)


def test_memory_ran_short_where_it_was_meant_to(preemptions: Counter[str]) -> None:
    for seed in range(0 if preemptions else 144):
        check_case(seed, preemptions)
    assert preemptions["ample"] == 0
    assert min(preemptions[memory] for memory in ("recompute", "swap", "auto")) > 5, preemptions


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(20))
def test_settings_change_no_token_in_many_cases(part: int) -> None:
    for seed in range(1_000_000 + part, 1_002_000, 20):
        check_case(seed, Counter())


def test_every_setting_is_met() -> None:
    assert {SETTINGS[seed * 35 % len(SETTINGS)] for seed in range(144)} == set(SETTINGS)
