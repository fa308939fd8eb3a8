"""The rules about what a step decides: they notice a scheduler that breaks them, and nothing else."""

from __future__ import annotations

import pytest

from quire.engine_core.scheduler.queues import WaitingQueues
from quire.messages import AbortRequests, Media
from quire.testing.core import CoreUnderTest
from quire.testing.simulator.decision_checks import DecisionChecks


def together(length: int) -> Media:
    """The first tokens of a prompt, which are computed in one step."""
    return Media(
        start=0, length=length, pixels=b"", shape=[0], mean=[], std=[], grid=[1, 1, length], merge_size=1,
        content_hash=b"a", is_whole=True,
    )  # fmt: skip


def preempt(core: CoreUnderTest, number: int) -> None:
    core.scheduler.admission_control.preempt(core.scheduler.lifecycle.requests[number], "asked for")


@pytest.mark.parametrize("length", [1, 8])
def test_a_newcomer_overtakes_when_it_gets_its_place(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tokens in that step, or without any where they go together and the step has too few left."""
    core = CoreUnderTest(budget=8, num_blocks=8)
    DecisionChecks(core)
    core.add(0, list(range(8)), max_tokens=12)
    core.add(1, list(range(20, 36)), max_tokens=2)
    for _ in range(3):
        core.step()
    preempt(core, 1)
    monkeypatch.setattr(WaitingQueues, "limit", None)
    core.add(2, list(range(40, 48)), max_tokens=1, request={"media": [together(length)]})
    with pytest.raises(AssertionError, match=r"request 2 starts while \[1\] are preempted"):
        core.step()


def test_who_gave_way_before_its_first_token_is_no_newcomer() -> None:
    """It goes on in its turn, before one that came later and gave way as well."""
    core = CoreUnderTest(budget=8, num_blocks=9)
    DecisionChecks(core)
    core.add(0, list(range(20)), max_tokens=12)
    for _ in range(4):
        core.step()
    core.add(1, list(range(20, 28)), max_tokens=2, request={"media": [together(8)]})
    core.add(2, list(range(30, 37)), max_tokens=2)
    core.step()
    requests = core.scheduler.lifecycle.requests
    assert (requests[1].was_started, requests[1].is_announced) == (True, False)
    preempt(core, 1)
    preempt(core, 2)
    core.step()
    assert core.scheduler.queues.num_preempted == 2, "they find no room beside the first one"
    core.core.abort(AbortRequests(request_ids=[0]))
    core.run()
    assert len(core.tokens[1 << 10]) == len(core.tokens[2 << 10]) == 2
