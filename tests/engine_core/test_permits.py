"""Rows that wait for somebody outside before they sample on: the others go on, and nobody's tokens change."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.messages import AbortRequests, PermitTokens, sequence_id_of
from quire.testing.core import CoreUnderTest

WAYS: list[dict[str, Any]] = [
    {},
    {"is_async": True},
    {"num_drafts": 3},
    {"num_drafts": 3, "is_async": True},
    {"prefix_caching": False},
    {"budget": 5},
]


def run_until_idle(core: CoreUnderTest) -> None:
    core.run(500)


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("stride", [1, 2, 5])
def test_a_row_goes_as_far_as_it_may_and_no_further(stride: int, options: dict[str, Any]) -> None:
    core = CoreUnderTest(**options)
    plain = CoreUnderTest(**options)
    for number, request in ((1, {"permitted": stride}), (2, {})):
        core.add(number, [3, 4, 5 + number], max_tokens=12, request=request)
        plain.add(number, [3, 4, 5 + number], max_tokens=12)
    plain.run()
    watched = sequence_id_of(1, 0)
    run_until_idle(core)
    # the other one has ended meanwhile
    assert core.ends.keys() == {sequence_id_of(2, 0)}
    for permitted in range(stride, 12, stride):
        assert len(core.tokens[watched]) == permitted
        core.core.permit(PermitTokens(request_id=1, index=0, num_tokens=permitted + stride))
        run_until_idle(core)
    assert core.tokens == plain.tokens
    assert core.ends[watched].finish_reason == "length"
    core.assert_empty()


@pytest.mark.parametrize("options", WAYS)
def test_nothing_is_sampled_before_the_first_word(options: dict[str, Any]) -> None:
    core = CoreUnderTest(**options)
    core.add(1, list(range(3, 20)), max_tokens=3, request={"permitted": 0})
    run_until_idle(core)
    # all of the prompt but its last token is computed meanwhile
    assert core.rows.num_computed[core.rows.sequence_id >= 0].tolist() == [16]
    assert not core.tokens
    core.core.permit(PermitTokens(request_id=1, index=0, num_tokens=3))
    core.run()
    assert len(core.tokens[sequence_id_of(1, 0)]) == 3
    core.assert_empty()


@pytest.mark.parametrize("options", WAYS)
def test_who_waits_and_is_stopped_holds_no_block_in_the_next_step(options: dict[str, Any]) -> None:
    core = CoreUnderTest(**options)
    core.add(1, list(range(3, 20)), max_tokens=30, request={"permitted": 4})
    core.add(2, [1, 2], max_tokens=30)
    while len(core.tokens[sequence_id_of(1, 0)]) < 4:
        core.step()
    held = core.pool.num_held
    core.core.abort(AbortRequests(sequence_ids=[sequence_id_of(1, 0)]))
    assert core.pool.num_held <= held - 5
    core.run()
    assert core.ends[sequence_id_of(1, 0)].finish_reason == "abort"
    assert len(core.tokens[sequence_id_of(2, 0)]) == 30
    core.assert_empty()


@pytest.mark.parametrize("options", WAYS)
def test_tokens_that_are_put_are_as_good_as_a_prompt(options: dict[str, Any]) -> None:
    """What follows them is what would follow if they had stood in the prompt."""
    core = CoreUnderTest(**options)
    core.add(1, [3, 4, 5], max_tokens=12, request={"permitted": 2}, logprobs=1)
    run_until_idle(core)
    before = core.tokens[sequence_id_of(1, 0)].copy()
    core.core.permit(PermitTokens(request_id=1, index=0, num_tokens=12, token_ids=[7, 8, 9]))
    core.run()
    plain = CoreUnderTest(**options)
    plain.add(1, [3, 4, 5, *before, 7, 8, 9], max_tokens=7)
    plain.run()
    assert core.tokens[sequence_id_of(1, 0)] == [*before, 7, 8, 9, *plain.tokens[sequence_id_of(1, 0)]]
    core.assert_empty()


@pytest.mark.parametrize("options", WAYS)
def test_tokens_that_are_put_end_a_sequence_by_length_and_by_a_stop_token(options: dict[str, Any]) -> None:
    for put, reason, kept in (([7, 8, 9, 6], "length", [7, 8, 9]), ([7, 2, 9], "stop", [7, 2])):
        core = CoreUnderTest(**options)
        core.add(1, [3, 4, 5], max_tokens=5, request={"permitted": 2}, stop_token_ids=[2], min_tokens=3)
        run_until_idle(core)
        core.core.permit(PermitTokens(request_id=1, index=0, num_tokens=9, token_ids=put))
        core.run()
        assert core.tokens[sequence_id_of(1, 0)][2:] == kept
        assert core.ends[sequence_id_of(1, 0)].finish_reason == reason
        core.assert_empty()


def test_a_token_beside_the_vocabulary_ends_its_request_alone() -> None:
    core = CoreUnderTest()
    core.add(1, [3, 4, 5], max_tokens=5, request={"permitted": 1})
    core.add(2, [3, 4, 6], max_tokens=5)
    run_until_idle(core)
    core.core.permit(PermitTokens(request_id=1, index=0, num_tokens=9, token_ids=[50]))
    core.run()
    assert core.ends[sequence_id_of(1, 0)].finish_reason == "error"
    assert len(core.tokens[sequence_id_of(2, 0)]) == 5
    core.assert_empty()


def test_beams_do_not_wait() -> None:
    core = CoreUnderTest()
    core.beam(1, [3, 4, 5], 2, request={"permitted": 1})
    core.run()
    assert "not together with beams" in str(core.ends[sequence_id_of(1, 0)].error)


@pytest.mark.parametrize("options", [*WAYS, {"num_host_blocks": 64, "preemption_mode": "swap"}])
@pytest.mark.parametrize("limits", [{"max_num_seqs": 1}, {"num_blocks": 8}])
def test_who_waits_stands_in_nobodys_way(limits: dict[str, int], options: dict[str, Any]) -> None:
    """Its judge may need the row and the blocks that it has."""
    core = CoreUnderTest(**{**options, **limits})
    plain = CoreUnderTest()
    for one in (core, plain):
        one.add(1, list(range(3, 20)), max_tokens=6, request={"permitted": 2} if one is core else {})
    run_until_idle(core)
    watched = sequence_id_of(1, 0)
    for number, permitted in enumerate((4, 6)):
        core.add(7 + number, list(range(30, 47)), max_tokens=2)
        core.run()
        assert core.ends[sequence_id_of(7 + number, 0)].finish_reason == "length"
        core.core.permit(PermitTokens(request_id=1, index=0, num_tokens=permitted))
        core.run()
    plain.run()
    assert core.tokens[watched] == plain.tokens[watched]
    core.assert_empty()


@pytest.mark.parametrize("seed", range(12))
def test_random_permits_change_no_token(seed: int) -> None:
    """Few blocks, so that who waits gives way and comes back; several samples; with and without swap space."""
    draw = random.Random(seed)
    options: dict[str, Any] = {
        "num_blocks": draw.choice([24, 40]),
        "num_host_blocks": draw.choice([0, 24]),
        "is_async": draw.random() < 0.5,
        "num_drafts": draw.choice([0, 2]),
        "policy": draw.choice(["fifo", "priority", "two_level"]),
        "max_num_seqs": 6,
        "budget": draw.choice([8, 64]),
    }
    core = CoreUnderTest(**options)
    plain = CoreUnderTest(**{**options, "num_blocks": 256})
    sizes: dict[int, int] = {}
    for number in range(10):
        n = draw.choice([1, 1, 2])
        prompt = [draw.randrange(3, 50) for _ in range(draw.randrange(1, 16))]
        stride = draw.choice([None, 1, 3])
        sampling = {"max_tokens": draw.randrange(1, 16), "n": n, "temperature": draw.choice([0.0, 1.0])}
        request = {"priority": draw.randrange(2)}
        core.add(number, prompt, seed=number, request={**request, "permitted": stride}, **sampling)
        plain.add(number, prompt, seed=number, request=request, **sampling)
        if stride is not None:
            sizes[number] = stride
    plain.run()
    for _ in range(3000):
        if not core.core.has_work and len(core.ends) == len(plain.ends):
            break
        core.step()
        for number, stride in sizes.items():
            for index in range(2):
                sequence_id = sequence_id_of(number, index)
                if sequence_id not in core.ends and core.tokens[sequence_id] and draw.random() < 0.3:
                    num_tokens = len(core.tokens[sequence_id]) + stride
                    core.core.permit(PermitTokens(request_id=number, index=index, num_tokens=num_tokens))
    assert {key: value for key, value in core.tokens.items() if value} == plain.tokens
    core.assert_empty()
