"""Room for who waits: from what kept sequences offer, without loss for nothing and without counting what is kept."""

from __future__ import annotations

import pytest

from quire.engine_core.block_table import Blocks, BlockTable
from quire.messages import ExtendRequest, sequence_id_of
from quire.testing.core import CoreUnderTest


def with_sessions(number: int, num_blocks: int) -> CoreUnderTest:
    """Sessions of ten blocks each, and so many blocks beside them."""
    core = CoreUnderTest(num_blocks=number * 10 + num_blocks, max_model_len=200, budget=200)
    for handle in range(number):
        core.add(handle, [handle % 50, handle // 50] * 19, max_tokens=3, request={"keep": str(handle)})
        core.run()
    return core


@pytest.mark.parametrize("number", [4, 40])
def test_what_could_be_had_is_known_without_counting_it(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    core = with_sessions(number, num_blocks=12)
    held = BlockTable.held
    tables_read: list[BlockTable] = []

    def counted(table: BlockTable) -> Blocks:
        tables_read.append(table)
        return held(table)

    monkeypatch.setattr(BlockTable, "held", counted)
    assert core.manager.num_within_reach == 10 * number + 12
    assert not tables_read


def waiting_turn(core: CoreUnderTest, num_sent: int) -> None:
    """A session of 40 blocks, somebody who runs and needs 48 to 56 of 100, and a turn that has no room beside both."""
    core.add(1, [number % 47 for number in range(160)], max_tokens=1, request={"keep": "s"})
    core.run()
    core.add(2, [3] * 190, max_tokens=30)
    for _ in range(3):
        core.step()
    core.add(3, [9] * num_sent, max_tokens=4, request={"continues": "s"})
    for _ in range(3):
        core.step()
    assert sequence_id_of(3, 0) not in core.cached


def num_kept_blocks(core: CoreUnderTest) -> int:
    (report,) = core.core.control("list_kept", {})
    return int(report["num_blocks"])


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("num_sent", [100, 180])
def test_a_turn_that_waits_keeps_what_it_goes_on_from(num_sent: int, prefix_caching: bool) -> None:
    core = CoreUnderTest(num_blocks=100, max_model_len=400, budget=400, prefix_caching=prefix_caching)
    waiting_turn(core, num_sent)
    assert num_kept_blocks(core) == 40
    core.run()
    assert core.cached[sequence_id_of(3, 0)] == 160, "a turn computes what is new"


def test_a_session_is_not_given_up_for_who_would_use_its_blocks() -> None:
    core = CoreUnderTest(num_blocks=100, max_model_len=400, budget=400)
    session = [number % 47 for number in range(160)]
    core.add(1, session, max_tokens=1, request={"keep": "s"})
    core.run()
    core.add(2, [3] * 190, max_tokens=30)
    for _ in range(3):
        core.step()
    core.add(3, [*session, *[9] * 180], max_tokens=4)  # 45 blocks behind the session's; fewer than 12 are free
    for _ in range(3):
        core.step()
    assert num_kept_blocks(core) == 40
    core.run()
    assert core.cached[sequence_id_of(3, 0)] == 160


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("num_tokens", [157, 160])
def test_a_turn_that_fills_the_cache_alone_has_its_session_give_way(num_tokens: int, prefix_caching: bool) -> None:
    """Beside the last block of its session, partly filled, which it copies, it would never have room."""
    core = CoreUnderTest(num_blocks=64, max_model_len=256, budget=64, prefix_caching=prefix_caching)
    core.add(1, [number % 47 for number in range(num_tokens)], max_tokens=1, request={"keep": "s"})
    core.run()
    core.add(2, [9] * (254 - num_tokens - 1), max_tokens=2, request={"continues": "s"})
    core.run()
    assert core.ends[sequence_id_of(2, 0)].finish_reason == "length"
    assert core.cached[sequence_id_of(2, 0)] == num_tokens // 4 * 4


def test_it_gives_way_also_while_somebody_more_important_waits_for_the_rows_of_its_turn() -> None:
    core = CoreUnderTest(num_blocks=64, max_model_len=256, budget=64, max_num_seqs=2, prefix_caching=False)
    core.add(1, [number % 47 for number in range(157)], max_tokens=1, request={"keep": "s"})
    core.run()
    core.add(2, [9] * 10, max_tokens=2, is_final=False, request={"continues": "s"})
    for _ in range(4):
        core.step()
    turn = core.scheduler.lifecycle.requests[2]
    assert turn.waits_for_input
    assert turn.holds_rows
    core.scheduler.admission_control.preempt(turn, "somebody needed its blocks")
    core.core.extend(ExtendRequest(request_id=2, token_ids=[9] * 86, is_final=True))
    core.add(3, [5] * 8, n=2, max_tokens=3, request={"priority": -1})
    core.run()
    assert {core.ends[sequence_id_of(*one)].finish_reason for one in ((2, 0), (3, 0), (3, 1))} == {"length"}


def test_sessions_are_given_up_one_by_one_as_blocks_are_taken() -> None:
    core = with_sessions(4, num_blocks=12)
    core.add(9, [49] * 60, max_tokens=40)
    core.step()
    assert [one["num_blocks"] for one in core.core.control("list_kept", {})] == [0, 10, 10, 10]
    core.run()
    assert [one["num_blocks"] for one in core.core.control("list_kept", {})] == [0, 0, 10, 10]


def test_who_has_only_what_others_hold_too_keeps_it() -> None:
    """It would lose its hold for nothing."""
    core = with_sessions(2, num_blocks=4)
    core.add(3, [*[0] * 38, *core.tokens[sequence_id_of(0, 0)], 5], max_tokens=9)
    core.step()
    core.add(4, [48] * 20, max_tokens=4)
    core.step()
    assert (num_within(core, "0"), num_within(core, "1")) == (10, 0)


def num_within(core: CoreUnderTest, handle: str) -> int:
    return next(one["num_blocks"] for one in core.core.control("list_kept", {}) if one["handle"] == handle)
