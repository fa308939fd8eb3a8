"""The real core with a buddy manager in the place of the paged one; the simulated cache checks every read."""

import random

import pytest

from quire.messages import sequence_id_of
from quire.simulation.arrivals import request_of
from quire.simulation.baselines.buddy_manager import with_buddies
from quire.simulation.baselines.reservations import longest, oracle, power_of_two_output
from quire.simulation.baselines.run_to_end import RunToEnd
from quire.simulation.paper.assumptions import Assumptions
from quire.simulation.paper.systems import FASTER_TRANSFORMER, MAX, OPT_13B, ORACLE, deploy_system
from quire.simulation.paper.workloads import ALPACA
from quire.simulation.records import Record
from quire.simulation.replica import Replica
from quire.testing.core import CoreUnderTest

RESERVATIONS = {"max": longest(128), "pow2": power_of_two_output(128), "oracle": oracle}


def buddy_core(reservation, **changes) -> CoreUnderTest:
    return CoreUnderTest(
        **{
            "prefix_caching": False,
            "make_manager": with_buddies(reservation),
            "num_blocks": 64,
            "budget": 256,
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("name", "num_blocks", "num_at_once"),
    # a prompt of 12 and 9 answers: 6 blocks of 4, in a piece of 8. With 16 positions for the answer: 7. At most 32.
    [("oracle", 8, 8), ("pow2", 8, 8), ("max", 32, 2)],
)
def test_a_request_takes_a_piece_and_keeps_it(name, num_blocks, num_at_once):
    core = buddy_core(RESERVATIONS[name])
    for number in range(10):
        core.add(number, [number + 1] * 12, max_tokens=9)
    core.step()
    assert len(core.scheduler.running.requests) == num_at_once
    assert core.pool.num_held == num_at_once * num_blocks
    core.step()
    assert core.pool.num_held == num_at_once * num_blocks
    core.run()
    core.assert_empty()
    assert core.manager.space.num_pieces(64) == 1


def test_pow2_reserves_for_the_output_what_it_rounds_up():
    core = buddy_core(power_of_two_output(128), num_blocks=64)
    core.add(1, [1] * 4, max_tokens=25)
    core.step()
    (pieces,) = core.manager.pieces().values()
    assert (pieces.num_tokens, pieces.size) == (4 + 32, 16)
    core.add(2, [2] * 4, max_tokens=65)
    core.step()
    assert core.manager.pieces()[2].num_tokens == 128  # as much as the model allows


@pytest.mark.parametrize("name", RESERVATIONS)
def test_answers_are_those_of_the_paged_manager(name):
    """Whatever runs together, with forks and beams: contents are checked at every read, invariants after each step."""
    rng = random.Random(7)
    asked = [
        (number, [rng.randrange(50) for _ in range(rng.randint(1, 30))], rng.randint(1, 40), rng.choice([1, 1, 2, 3]))
        for number in range(40)
    ]
    cores = [buddy_core(RESERVATIONS[name], num_blocks=150), CoreUnderTest(num_blocks=150)]
    for core in cores:
        for number, prompt, max_tokens, width in asked:
            if number % 2:
                core.beam(number, prompt, width, max_tokens=max_tokens)
            else:
                core.add(number, prompt, max_tokens=max_tokens, n=width, temperature=1.0)
            core.step()
        core.run()
        core.assert_empty()
    assert cores[0].tokens == cores[1].tokens


def test_a_fork_copies_what_its_parent_has_computed():
    core = buddy_core(oracle)
    core.add(1, [3] * 14, max_tokens=4, n=2, temperature=1.0)
    core.run()
    # of 13 tokens that are computed before both part: the last one of the prompt each computes for itself
    assert core.executor.work.num_copied_blocks == 4


def test_free_memory_in_pieces_that_are_too_small():
    core = buddy_core(oracle, num_blocks=8)
    core.add(1, [1] * 3, max_tokens=2)  # 2 blocks
    core.add(2, [2] * 13, max_tokens=2)  # 4 blocks
    core.add(3, [3] * 11, max_tokens=3)  # 4 blocks: 2 are free
    core.step()
    assert [request.request_id for request in core.scheduler.running.requests] == [1, 2]
    core.run()
    core.assert_empty()


def test_a_batch_runs_to_its_end_before_the_next_one_starts():
    policy = RunToEnd()
    core = buddy_core(longest(128), policy=policy, num_blocks=96)
    for number in range(7):
        core.add(number, [number + 1] * 5, max_tokens=4 + 3 * number)
    together = []
    while core.core.has_work:
        core.step()
        together.append([request.request_id for request in core.scheduler.running.requests])
    assert together[0] == [0, 1, 2]
    # one that has ended leaves its place empty
    assert [3, 4, 5] in together
    assert not any(set(ids) & {0, 1, 2} and set(ids) & {3, 4, 5} for ids in together)
    assert policy.batch_by_request == {0: 1, 1: 1, 2: 1, 3: 2, 4: 2, 5: 2, 6: 3}
    assert len(core.tokens[sequence_id_of(6, 0)]) == 22


@pytest.mark.parametrize("system", [ORACLE, MAX, FASTER_TRANSFORMER])
def test_steps_that_are_made_together_change_nothing(system):
    def records(may_leap: bool) -> list[Record]:
        found: list[Record] = []
        replica = Replica(deploy_system(system, OPT_13B, Assumptions()), 0, found.append, may_leap=may_leap)
        for number, arrival in enumerate(ALPACA.arrivals(8.0, 40, Assumptions())):
            replica.advance(arrival.at)
            replica.add(request_of(arrival, number, 50_000), arrival.at)
        replica.advance()
        return found

    assert records(may_leap=True) == records(may_leap=False)
