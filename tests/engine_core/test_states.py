"""Recurrent states in the core, case by case; random workloads have them as well (test_random_schedules.py)."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine_core.kv_cache_manager.block_moves import BlockMoves
from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.errors import UserError
from quire.messages import ExtendRequest
from quire.testing.core import FULL, CoreUnderTest
from quire.testing.simulator.checking_model import expected_tokens

STATE = KVGroup(("states",), num_state_blocks=2)
HYBRID = (FULL, STATE)
WINDOWED = (KVGroup(("far",)), KVGroup(("near",), sliding_window=5), STATE)
PROMPT = list(range(10, 21))


class Watched(CoreUnderTest):
    """Blocks of 4 tokens; remembers grants and copies."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"groups": HYBRID, "checkpoint_interval": 1000, **options})
        self.grants: list[list[int]] = []
        self.executor.observers.append(lambda output: self.grants.append(output.num_tokens.tolist()))

    def sequences(self) -> list[list[int]]:
        """The blocks of each state."""
        return [list(one.block_tables[-1]) for one in self.scheduler.running.living_sequences()]


def expect(core: CoreUnderTest, number: int, prompt: list[int], count: int) -> None:
    assert core.tokens[number << 10] == expected_tokens(prompt, count, vocab_size=50)


@pytest.mark.parametrize("groups", [HYBRID, (STATE,)], ids=["hybrid", "no attention"])
def test_a_state_has_its_blocks_from_the_first_token_to_the_last(groups: tuple[KVGroup, ...]) -> None:
    core = Watched(groups=groups, checkpoint_share=0.0)
    core.add(1, PROMPT, max_tokens=20)
    core.step()
    (blocks,) = core.sequences()
    assert len(set(blocks)) == 2
    for _ in range(12):
        core.step()
        assert core.sequences() == [blocks]
    core.run()
    expect(core, 1, PROMPT, 20)
    core.assert_empty()


def test_a_prompt_that_begins_alike_goes_on_from_a_checkpoint() -> None:
    core = Watched()
    core.add(1, PROMPT, max_tokens=3)
    core.run()
    # the grant ends at the last boundary of the prompt, where the state is left behind
    assert core.grants[:2] == [[8], [3]]
    core.add(2, PROMPT, max_tokens=3)
    core.run()
    assert core.cached[2 << 10] == 8
    assert core.core.statistics()["num_state_checkpoint_hit_tokens_total"] == 8
    expect(core, 2, PROMPT, 3)
    core.assert_empty()


def test_checkpoints_stand_in_long_prompts_and_a_hit_is_what_all_groups_can_serve() -> None:
    core = Watched(checkpoint_interval=6)  # rounded up to 8
    prompt = [index % 50 for index in range(30)]
    core.add(1, prompt, max_tokens=2)
    core.run()
    assert core.grants[:4] == [[8], [8], [8], [4]]
    core.add(2, [*prompt[:22], 49, 49, 49, 49], max_tokens=2)
    core.run()
    assert core.cached[2 << 10] == 16  # keys and values of 20 tokens are there, but no state behind them
    core.assert_empty()


def test_the_second_that_begins_alike_leaves_a_checkpoint_for_the_third() -> None:
    """As prompts with a common beginning do that ends anywhere."""
    core = Watched()
    common = [index % 50 for index in range(14)]
    for number in (1, 2, 3):
        core.add(number, [*common, *[40 + number] * 12], max_tokens=2)
        core.run()
        expect(core, number, [*common, *[40 + number] * 12], 2)
    assert [core.cached[number << 10] for number in (1, 2, 3)] == [0, 0, 12]
    core.assert_empty()


def test_without_a_share_nothing_is_found() -> None:
    core = Watched(checkpoint_share=0.0)
    for number in (1, 2):
        core.add(number, PROMPT, max_tokens=3)
        core.run()
    assert core.cached[2 << 10] == 0
    assert core.executor.work.num_copied_blocks == 0


def test_forks_write_states_of_their_own() -> None:
    core = Watched(checkpoint_share=0.0)
    core.add(1, PROMPT, max_tokens=6, n=3, temperature=1.0, seed=3)
    for _ in range(4):
        core.step()
    states = core.sequences()
    assert len(states) == 3
    assert len({block for blocks in states for block in blocks}) == 6
    core.run()
    for index in range(3):
        seed = 3 if index == 0 else (3 + index * 0x9E3779B97F4A7C15) & 0x7FFFFFFFFFFFFFFF
        tokens = core.tokens[(1 << 10) + index]
        assert tokens == expected_tokens(PROMPT, 6, vocab_size=50, seed=seed, is_greedy=False)
    core.assert_empty()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_who_gave_way_goes_on_with_the_same_tokens(mode: str) -> None:
    core = Watched(num_blocks=14, num_host_blocks=14, preemption_mode=mode, checkpoint_share=0.0)
    for number in (1, 2):
        core.add(number, [*PROMPT, number], max_tokens=14)
    core.run()
    assert core.core.statistics()[f"num_preemptions_by_{mode}_total"] > 0
    for number in (1, 2):
        expect(core, number, [*PROMPT, number], 14)
    core.assert_empty()


def test_without_room_for_a_copy_the_checkpoint_itself_is_written() -> None:
    """Eight blocks: another request holds three, the prefix and its state three more. One that is new is needed, two
    for a copy are not there."""
    core = Watched(num_blocks=8, checkpoint_share=1.0, max_model_len=12)
    core.add(1, PROMPT[:5], max_tokens=1)
    core.run()
    # behind four tokens, and behind all of them
    assert core.core.statistics()["num_state_checkpoints"] == 2
    core.add(3, [40, 41], max_tokens=2)
    core.add(2, [*PROMPT[:5], 30, 31, 32], max_tokens=4)
    core.step()
    assert core.core.statistics()["num_state_checkpoints"] == 0
    core.run()
    assert core.cached[2 << 10] == 5
    expect(core, 2, [*PROMPT[:5], 30, 31, 32], 4)
    core.assert_empty()


def nobody_gives_way(num_blocks: int) -> None:
    core = Watched(num_blocks=num_blocks, checkpoint_share=1.0, checkpoint_interval=4, max_model_len=12)
    for number in (1, 2):
        core.add(number, [*PROMPT[:5], number], max_tokens=6)
    core.run()
    assert core.core.statistics()["num_preemptions_total"] == 0
    for number in (1, 2):
        expect(core, number, [*PROMPT[:5], number], 6)
    core.assert_empty()


@pytest.mark.parametrize("num_blocks", [10, 11])
def test_nobody_gives_way_for_a_checkpoint(num_blocks: int) -> None:
    """With eleven blocks the first leaves one in the step in which the second needs the blocks of its copy."""
    nobody_gives_way(num_blocks)


def test_copies_that_are_not_taken_back_cost_somebody_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockMoves, "take_back", lambda self, target: None)
    with pytest.raises(AssertionError):
        nobody_gives_way(11)


def test_checkpoints_take_their_share_and_no_more() -> None:
    core = Watched(num_blocks=64, checkpoint_share=0.125)  # eight blocks
    for number in range(9):
        core.add(number, [number, *PROMPT], max_tokens=2)
        core.run()
    statistics = core.core.statistics()
    # of each request one in its prompt, and one where its output ends
    assert statistics["num_state_checkpoints_made_total"] == 18
    assert statistics["num_state_checkpoints"] == 4
    assert statistics["num_state_checkpoint_blocks"] == 8
    core.add(10, [8, *PROMPT], max_tokens=1)
    core.add(11, [0, *PROMPT], max_tokens=1)
    core.run()
    assert (core.cached[10 << 10], core.cached[11 << 10]) == (8, 0)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("groups", [HYBRID, (STATE,), WINDOWED], ids=["hybrid", "no attention", "windows"])
def test_the_next_turn_of_a_chat_goes_on_where_the_answer_ended(groups: tuple[KVGroup, ...], is_async: bool) -> None:
    """However it ends: by length, or by a token that a step in flight may have taken in."""
    core = Watched(groups=groups, is_async=is_async, checkpoint_interval=8)
    tokens = PROMPT
    end = expected_tokens(PROMPT, 9, vocab_size=50)[-1]
    for turn, sampling in enumerate(
        [{"max_tokens": 6}, {"max_tokens": 30, "stop_token_ids": [end]}, {"max_tokens": 2}]
    ):
        core.add(turn, tokens, **sampling)
        core.run()
        answer = core.tokens[turn << 10]
        expect(core, turn, tokens, len(answer))
        # all but the last token, which was sampled and not computed
        assert core.cached[turn << 10] == (len(tokens) - 4 if turn else 0)
        tokens = [*tokens, *answer, 40, 41, 42]
        # for the checkpoint in the prompt, none for the end of the answer
        assert core.executor.work.num_copied_blocks == 2 or turn
    core.assert_empty()


def test_who_says_something_else_begins_at_a_checkpoint_before() -> None:
    core = Watched()
    core.add(1, PROMPT, max_tokens=6, request={"cache_salt": "blue"})
    core.run()
    said = [*PROMPT, *core.tokens[1 << 10]]
    others = [*said[:15], (said[15] + 1) % 50, 40]
    for number, (prompt, salt) in enumerate(
        [(others, "blue"), ([*said, 40], ""), ([*said, 40], "blue"), (said, "blue")], 2
    ):
        core.add(number, prompt, max_tokens=2, request={"cache_salt": salt})
        core.run()
        expect(core, number, prompt, 2)
    assert [core.cached[number << 10] for number in (2, 3, 4, 5)] == [8, 0, 16, 16]
    core.assert_empty()


def test_of_several_outputs_the_first_one_can_be_gone_on_with() -> None:
    core = Watched()
    core.add(1, PROMPT, max_tokens=6, n=3, temperature=1.0, seed=3)
    core.run()
    for index, cached in enumerate([16, 8, 8]):
        core.add(2 + index, [*PROMPT, *core.tokens[(1 << 10) + index], 40], max_tokens=1)
        core.run()
        assert core.cached[(2 + index) << 10] == cached
    core.assert_empty()


def test_a_session_goes_on_where_its_state_stands_and_a_cut_one_from_a_checkpoint() -> None:
    core = Watched()
    core.add(1, PROMPT, max_tokens=5, request={"keep": "a"})
    core.run()
    tokens = [*PROMPT, *core.tokens[1 << 10]]
    core.add(2, [40, 41], max_tokens=2, request={"continues": "a"})
    core.run()
    assert core.cached[2 << 10] == 15  # all but the last token, which was sampled and not computed
    expect(core, 2, [*tokens, 40, 41], 2)
    core.core.control("rewind_kept", {"handle": "a", "num_tokens": 13})
    core.add(3, [42], max_tokens=2, request={"continues": "a"})
    core.run()
    assert core.cached[3 << 10] == 8
    expect(core, 3, [*tokens[:13], 42], 2)


@pytest.mark.parametrize("groups", [HYBRID, (STATE,)], ids=["hybrid", "no attention"])
def test_prompts_go_on_from_a_pinned_prefix(groups: tuple[KVGroup, ...]) -> None:
    """Which ends inside of a block, and stays when the prefix cache is emptied."""
    core = Watched(groups=groups, checkpoint_share=0.0)
    core.add(1, PROMPT, max_tokens=1, request={"keep": "a"})
    core.run()
    pinned = core.core.control("pin_kept", {"handle": "a", "num_tokens": 11})
    assert (pinned["is_pinned"], pinned["num_computed_tokens"]) == (True, 11)
    core.core.control("reset_prefix_cache", {})
    for number in (2, 3):
        core.add(number, [*PROMPT, 40, number], max_tokens=3)
    core.add(4, PROMPT, max_tokens=3)
    core.run()
    assert [core.cached[number << 10] for number in (2, 3, 4)] == [11, 11, 0]
    for number in (2, 3):
        expect(core, number, [*PROMPT, 40, number], 3)
    (report,) = core.core.control("list_kept", {})
    assert report["num_hits"] == 2
    core.core.control("release_kept", {"handle": "a"})
    core.assert_empty()


def test_a_prefix_is_pinned_where_its_state_stands() -> None:
    core = Watched()
    core.add(1, PROMPT, max_tokens=5, request={"keep": "a"})
    core.run()
    with pytest.raises(UserError, match="a recurrent state stands elsewhere"):
        core.core.control("pin_kept", {"handle": "a", "num_tokens": 8})
    assert core.core.control("pin_kept", {"handle": "a", "num_tokens": 15})["is_pinned"]


def test_a_state_that_a_step_in_flight_changes_is_not_pinned() -> None:
    core = Watched(is_async=True)
    end = expected_tokens(PROMPT, 6, vocab_size=50)[-1]
    core.add(1, PROMPT, max_tokens=20, stop_token_ids=[end], request={"keep": "a"})
    core.run()
    (report,) = core.core.control("list_kept", {})
    with pytest.raises(UserError, match="a recurrent state stands elsewhere"):
        core.core.control("pin_kept", {"handle": "a", "num_tokens": report["num_computed_tokens"]})
    # and goes on with the token that it has taken in
    core.add(2, [40], max_tokens=2, request={"continues": "a"})
    core.run()
    assert core.cached[2 << 10] == report["num_computed_tokens"]
    expect(core, 2, [*PROMPT, *core.tokens[1 << 10], 40], 2)


def test_streamed_input_that_ends_reads_its_last_token_again() -> None:
    core = Watched()
    core.add(1, PROMPT[:7], is_final=False, max_tokens=3)
    core.step()
    core.core.extend(ExtendRequest(request_id=1, token_ids=PROMPT[7:]))
    core.step()
    core.core.extend(ExtendRequest(request_id=1, token_ids=[], is_final=True))
    core.run()
    expect(core, 1, PROMPT, 3)
    core.assert_empty()
