"""The kinds of figure 3.2, counted by hand."""

from dataclasses import astuple

import pytest

from quire.simulation.baselines.buddy_manager import with_buddies
from quire.simulation.baselines.reservations import longest, oracle, power_of_two_output
from quire.simulation.baselines.waste import MemoryUse, memory_use
from quire.testing.core import CoreUnderTest


def use_after_two_steps(**changes) -> MemoryUse:
    """One request: 12 tokens of a prompt and then one a step are computed, of 21 that will be."""
    core = CoreUnderTest(prefix_caching=False, num_blocks=40, **changes)
    core.add(1, [1] * 12, max_tokens=9)
    core.step()
    core.step()
    return memory_use(core.manager, core.scheduler.running.requests)


@pytest.mark.parametrize(
    ("reservation", "use"),
    [
        # 160 slots in all. A piece of 32: rounding takes 11 of it, 128 are free
        (oracle, (13, 8, 0, 139)),
        # 16 positions for the answer of 9
        (power_of_two_output(128), (13, 8, 7, 132)),
        (longest(128), (13, 8, 107, 32)),
    ],
)
def test_a_reservation(reservation, use):
    assert astuple(use_after_two_steps(make_manager=with_buddies(reservation))) == use


def test_blocks_waste_less_than_one_of_them():
    assert astuple(use_after_two_steps()) == (13, 0, 3, 144)


def test_shares_of_a_sum():
    use = MemoryUse(1, 2, 3, 4) + MemoryUse(3, 2, 1, 0)
    assert astuple(use.shares()) == (0.25, 0.25, 0.25, 0.25)
    assert astuple(MemoryUse().shares()) == (0, 0, 0, 0)
