"""FIFO's order and victim, and a policy that comes from outside the tree."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from quire.engine_core.request import Request
from quire.engine_core.scheduler import policies
from quire.engine_core.scheduler.policies.fifo import Fifo
from quire.engine_core.scheduler.policies.policy import NumRemaining
from quire.engine_core.scheduler.queues import WaitingQueues
from quire.errors import OptionError
from quire.testing.core import CoreUnderTest
from quire.testing.simulator.workload import check_policy


class Shortest(Fifo):
    """A policy as a user would write it."""

    def waiting(self, queues: WaitingQueues, limit: int | None, num_remaining: NumRemaining) -> Iterator[Request]:
        return iter(sorted(queues.by_arrival(limit), key=lambda request: request.num_prompt_tokens))


def grants(core: CoreUnderTest) -> dict[int, int]:
    output = core.scheduler.schedule()
    assert output is not None
    by_request = {
        core.scheduler.running.sequence_at(row).request.request_id: count
        for row, count in zip(output.rows.tolist(), output.num_tokens.tolist(), strict=True)
    }
    core.scheduler.update_from_output(core.executor.execute(output).result())
    return by_request


def test_algorithm_1_gives_each_what_those_before_it_leave() -> None:
    core = CoreUnderTest(budget=20)
    for number, length in enumerate([12, 5, 9, 2]):
        core.add(number, [number, *range(length - 1)], max_tokens=4)  # nothing in common
    assert grants(core) == {0: 12, 1: 5, 2: 3}
    assert grants(core) == {0: 1, 1: 1, 2: 6, 3: 2}


def test_head_of_line_blocking_is_what_fifo_has() -> None:
    core = CoreUnderTest(budget=10, max_model_len=128)
    core.add(0, list(range(35)), max_tokens=2)
    core.add(1, [1, 2], max_tokens=2)
    assert [grants(core) for _ in range(4)] == [{0: 10}, {0: 10}, {0: 10}, {0: 5, 1: 2}]


def test_budget_may_be_smaller_than_the_number_of_sequences() -> None:
    core = CoreUnderTest(budget=3, max_num_seqs=8)
    for number in range(6):
        core.add(number, [number + 1], max_tokens=5)
    core.run()
    assert {len(tokens) for tokens in core.tokens.values()} == {5}
    assert len(core.tokens) == 6


def test_the_latest_is_preempted_and_nothing_new_overtakes_it() -> None:
    core = CoreUnderTest(num_blocks=6, block_size=4, budget=64, prefix_caching=False)
    core.add(0, list(range(8)), max_tokens=12)
    core.add(1, list(range(20, 28)), max_tokens=12)
    core.add(2, list(range(30, 39)), max_tokens=1)
    admitted: list[int] = []
    while core.core.has_work:
        preempted = core.scheduler.queues.num_preempted
        admitted += [start.sequence_id >> 10 for start in core.step().starts]
        if preempted and core.scheduler.queues.num_preempted:
            assert 2 not in admitted
    assert core.scheduler.recovery.num_by_recompute >= 1
    assert admitted == [0, 1, 2]
    assert next(iter(core.ends)) == 0, "the earliest is never preempted"


def test_victim_is_the_least_important_and_then_the_latest() -> None:
    core = CoreUnderTest()
    for number, priority in enumerate([0, 3, 3, 1]):
        core.add(number, [1], max_tokens=3, request={"priority": priority})
    core.step()
    assert Fifo().victim(core.scheduler.running.requests).request_id == 2


def test_a_policy_from_outside_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint(name="shortest", value=f"{__name__}:Shortest", group="quire.policies")
    monkeypatch.setattr(policies, "entry_points", lambda group: [entry] if group == "quire.policies" else [])
    monkeypatch.setattr(EntryPoint, "load", lambda self: Shortest)
    check_policy(policies.make_policy("shortest"), num_seeds=2)
    core = CoreUnderTest(policy="shortest", budget=10)
    core.add(0, list(range(9)), max_tokens=1)
    core.add(1, [5, 6], max_tokens=1)
    assert grants(core) == {1: 2, 0: 8}


def test_an_unknown_policy_is_an_error_with_a_suggestion() -> None:
    known = r"bounded_srtf, fifo, priority, srtf, two_level"
    with pytest.raises(OptionError, match=rf'fifoo: must be one of {known}\. Did you mean "fifo"\?'):
        policies.make_policy("fifoo")


def test_nobody_gives_way_in_vain() -> None:
    """Request 1 has just come back, and what it will need until it may be a victim again is not for request 3: without
    that it would fit in the place of request 2."""
    core = CoreUnderTest(num_blocks=32, max_model_len=256, budget=4, policy="priority", prefix_caching=False)
    core.add(1, [1] * 40, max_tokens=60, request={"priority": 1})
    core.add(2, [2] * 8, max_tokens=60, request={"priority": 2})
    for _ in range(35):
        core.step()
    core.scheduler.admission_control.preempt(core.scheduler.lifecycle.requests[1], "asked for")
    for _ in range(3):
        core.step()
    core.add(3, [3] * 80, max_tokens=4, request={"priority": 0})
    core.step()
    assert core.core.statistics()["num_preemptions_total"] == 1
    assert core.core.statistics()["num_requests_running"] == 2
    core.run()
    assert len(core.ends) == 3
