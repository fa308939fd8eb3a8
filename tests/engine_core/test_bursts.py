"""Steps in which rows get several tokens: the core hears how many these were, and has decided the next step by then."""

import pytest

from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.messages import SchedulerOutput
from quire.testing.core import CoreUnderTest
from quire.testing.simulator.workload import Workload

WINDOW = KVGroup(("window",), 3)


def core_with_bursts(**options) -> tuple[CoreUnderTest, list[SchedulerOutput]]:
    """In each step that may bring several tokens there are some."""
    core = CoreUnderTest(**{"block_size": 16, "num_blocks": 16, "max_num_seqs": 4, **options})
    core.scheduler.most_tokens = 32
    core.executor.bursts.share = 1.0
    decided: list[SchedulerOutput] = []
    core.core.watch_steps(lambda decision, work: decided.append(decision))
    return core, decided


def plain_tokens(**sampling) -> list[int]:
    core = CoreUnderTest(block_size=16, num_blocks=16)
    core.add(0, [1, 2, 3], **sampling)
    core.run()
    return core.tokens[0]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("groups", [(KVGroup(("all",)),), (KVGroup(("all",)), WINDOW)])
def test_the_same_tokens_in_fewer_steps(is_async: bool, groups: tuple[KVGroup, ...]) -> None:
    core, decided = core_with_bursts(is_async=is_async, groups=groups)
    for number in range(2):
        core.add(number, [1, 2, 3], max_tokens=60, ignore_eos=True)
    core.run()
    expected = plain_tokens(max_tokens=60, ignore_eos=True)
    assert core.tokens == {0: expected, 1 << 10: expected}
    assert len(decided) < 40
    assert core.executor.bursts.num_steps > 5
    core.assert_empty()


@pytest.mark.parametrize("is_async", [False, True])
def test_one_ends_where_it_would_have_ended(is_async: bool) -> None:
    """A worker that has gone on too far is not believed."""
    tokens = plain_tokens(max_tokens=60, ignore_eos=True)
    stop = tokens[20]
    core, _ = core_with_bursts(is_async=is_async)
    core.add(0, [1, 2, 3], max_tokens=60, ignore_eos=True, stop_token_ids=[stop])
    core.add(1, [1, 2, 3], max_tokens=11, ignore_eos=True)
    core.run()
    assert core.tokens[0] == tokens[: tokens.index(stop) + 1]
    assert core.tokens[1 << 10] == tokens[:11]


def test_nothing_is_computed_behind_the_last_token_but_one() -> None:
    """What was promised before anybody knew how many tokens a step brings: the last block would not be reserved."""
    core, _ = core_with_bursts(is_async=True, block_size=4, num_blocks=4, max_model_len=16)
    core.add(0, [1, 2, 3], max_tokens=13, ignore_eos=True)
    core.run()
    assert len(core.tokens[0]) == 13
    assert core.executor.bursts.num_steps


def test_nobody_goes_on_who_is_to_be_looked_at_first() -> None:
    core, decided = core_with_bursts()
    core.add(0, [1, 2, 3], max_tokens=30, ignore_eos=True, request={"permitted": 30})
    core.run()
    assert not any(decision.most_tokens > 1 for decision in decided)
    core.add(1, [1, 2, 3], max_tokens=30, ignore_eos=True)
    core.run()
    # the last one of a sequence, and that of its prompt, bring one token
    assert sum(decision.most_tokens > 1 for decision in decided) > 2
    assert decided[-1].most_tokens == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_one_that_is_computed_again_in_the_middle_of_a_burst_comes_to_its_end(is_async: bool) -> None:
    core, _ = core_with_bursts(is_async=is_async)
    core.add(0, [1, 2, 3], max_tokens=60, ignore_eos=True)
    while len(core.tokens[0]) < 20:
        core.step()
    core.core.scheduler.forget_computed(b"other weights")
    core.step()
    core.step()
    # from here on a token a step, so that nothing corrects what was believed
    core.scheduler.most_tokens = 1
    core.run()
    assert core.tokens[0] == plain_tokens(max_tokens=60, ignore_eos=True)
    core.assert_empty()


def test_random_workloads_have_bursts() -> None:
    workloads = [Workload(seed, has_bursts=True) for seed in range(40_000_000, 40_000_010)]
    for workload in workloads:
        workload.run(120)
    assert sum(workload.core.executor.bursts.num_steps for workload in workloads) > 10


@pytest.mark.parametrize("seed", range(40_000_000, 40_000_024))
def test_every_rule_holds_with_bursts(seed: int) -> None:
    workload = Workload(
        seed,
        has_mishaps=True,
        has_late_rows=True,
        has_states=seed % 4 == 0,
        is_chunked=seed % 3 == 2,
        has_ranges=seed % 2 == 0,
        has_bursts=True,
    )
    workload.run(120)
    workload.finish()
