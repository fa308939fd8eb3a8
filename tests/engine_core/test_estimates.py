"""What admission and recovery set aside is enough: a request that has come back takes no more until it may give way."""

from __future__ import annotations

import random

import pytest

from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.engine_core.request import Request, Status
from quire.engine_core.scheduler.constraints import LongPrefill
from quire.messages import DecodingSpec, EngineRequest, SchedulerOutput
from quire.sampling_params import SamplingParams
from quire.testing.core import FULL, CoreUnderTest
from quire.testing.simulator.checked_core import CheckedCore
from quire.testing.simulator.checking_model import END_TOKEN
from quire.testing.simulator.executor import SimulatedDrafts

WINDOWED = [KVGroup(("a",)), KVGroup(("b",), 7)]


class SetAside:
    """Blocks that each preempted request was last expected to need, and what it holds once it is back."""

    def __init__(self, core: CoreUnderTest) -> None:
        self.num_looks = 0
        self._core = core
        self._most: dict[int, int] = {}
        core.executor.observers.append(self._look)

    def before_step(self) -> None:
        for request in self._core.scheduler.lifecycle.requests.values():
            if request.status is Status.PREEMPTED:
                self._most[request.arrival] = self._to_come(request)

    def _look(self, _: SchedulerOutput) -> None:
        for request in self._core.scheduler.running.requests:
            if self._core.scheduler.recovery.may_be_victim(request):
                self._most.pop(request.arrival, None)
            elif request.arrival in self._most:
                self.num_looks += 1
                held, most = num_held(request), self._most[request.arrival]
                assert held <= most, f"request {request.request_id} holds {held} blocks, {most} were set aside"
                # what is set aside for it when somebody else is let in must do as well
                self._most[request.arrival] = min(most, held + self._to_come(request))

    def _to_come(self, request: Request) -> int:
        manager, scheduler = self._core.manager, self._core.scheduler
        step_tokens = scheduler.max_num_batched_tokens + manager.num_uncertain + manager.lookahead
        return manager.estimates.blocks_to_come(request, step_tokens, manager.block_size)


def num_held(request: Request) -> int:
    tables = [table for sequence in request.sequences.values() for table in sequence.block_tables]
    return len({block for table in tables for block in table.held().tolist()})


def some_requests(pick: random.Random) -> list[EngineRequest]:
    """Groups that fork, whose members get on and end at different times, and beams."""
    requests = []
    for number in range(pick.randrange(2, 4)):
        n = pick.randrange(1, 6)
        is_beams = n > 1 and pick.random() < 0.3
        requests.append(
            EngineRequest(
                request_id=number,
                prompt_token_ids=[pick.randrange(50) for _ in range(pick.randrange(2, 20))],
                sampling=SamplingParams(n=n, temperature=1.0, max_tokens=pick.randrange(6, 25)),
                seed=pick.randrange(1000),
                eos_token_ids=pick.choice([[], [END_TOKEN], [END_TOKEN, 2, 3, 4]]),
                decoding=DecodingSpec(method="beam_search", args={"width": n}) if is_beams else None,
            )
        )
    return requests


def run(seed: int, has_windows: bool) -> int:
    pick = random.Random(seed)
    num_blocks, limit = pick.randrange(60, 200), pick.choice([0, 0, 2, 8])
    core = CoreUnderTest(
        num_blocks=num_blocks,
        num_host_blocks=num_blocks,
        block_size=pick.choice([1, 2, 4]),
        budget=pick.choice([4, 8, 64]),
        max_model_len=48,
        groups=WINDOWED if has_windows else [FULL],
        prefix_caching=False,  # so that what a request holds is its own
        preemption_mode=pick.choice(["recompute", "swap"]),
        num_drafts=pick.choice([0, 2, 5]),
        drafts=SimulatedDrafts(acceptance=pick.choice([0.0, 0.4, 0.8]), has_cache=pick.random() < 0.4),
        constraints=[LongPrefill(limit)] if limit else [],
    )
    checked, set_aside, rate = CheckedCore(core), SetAside(core), pick.choice([0.05, 0.1, 0.2])
    for request in some_requests(pick):
        checked.add(request)
    while checked.plans:
        if pick.random() < rate:
            for one in filter(core.scheduler.recovery.may_be_victim, list(core.scheduler.running.requests)):
                core.scheduler._preempt(one, "asked for")
        set_aside.before_step()
        checked.step()
    return set_aside.num_looks


@pytest.mark.parametrize("has_windows", [False, True])
def test_who_comes_back_takes_no_more_than_was_set_aside(has_windows: bool) -> None:
    assert sum(run(seed, has_windows) for seed in range(40)) > 400


@pytest.mark.parametrize("block_size", [1, 2])
def test_beams_that_are_computed_again_one_after_the_other_share_as_they_did(block_size: int) -> None:
    """Also what one of them computed in the step in which it began, and in which nobody began after it."""
    core = CoreUnderTest(
        num_blocks=200, block_size=block_size, budget=4, prefix_caching=False, preemption_mode="recompute"
    )
    checked = CheckedCore(core)
    sampling = SamplingParams(temperature=0.0, max_tokens=30)
    beams = DecodingSpec(method="beam_search", args={"width": 5, "early_stopping": "never"})
    checked.add(EngineRequest(request_id=1, prompt_token_ids=[6, 13, 43], sampling=sampling, decoding=beams))
    for _ in range(4):
        checked.step()
    request = core.scheduler.lifecycle.requests[1]
    while checked.plans:
        core.scheduler._preempt(request, "asked for")
        expected, length = core.manager.estimates.blocks_to_come(request, 4), request.longest
        while request.longest == length:
            assert num_held(request) <= expected
            checked.step()
