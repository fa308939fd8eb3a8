"""Prompts that become vectors, in the core: two numbers as ever, beside others, in chunks, after giving way."""

from __future__ import annotations

import itertools
import random

import pytest

from quire.messages import DecodingSpec, sequence_id_of
from quire.sampling_params import SamplingParams
from quire.simulation.costs.linear import LinearCosts
from quire.testing.core import CoreUnderTest
from quire.testing.simulator.checking_model import expected_tokens, expected_vector

LONG = [number % 47 for number in range(60)]


def pooled(core: CoreUnderTest, request_id: int, prompt: list[int], pooling: str = "last", **fields) -> None:
    core.add(request_id, prompt, request={"pooling": pooling, **fields})


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("budget", [64, 7, 1])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_prompt_becomes_a_vector_whole_or_in_chunks(pooling, budget, is_async):
    core = CoreUnderTest(budget=budget, is_async=is_async)
    pooled(core, 1, LONG, pooling)
    core.run()
    number = sequence_id_of(1, 0)
    assert core.vectors == {number: expected_vector(LONG)}
    assert core.ends[number].finish_reason == "stop"
    assert core.tokens == {}
    assert core.executor.work.num_tokens == len(LONG), "nothing is computed behind the prompt"
    core.assert_empty()


@pytest.mark.parametrize(
    ("is_async", "num_drafts", "policy", "mode"),
    list(itertools.product([False, True], [0, 3], ["fifo", "two_level", "priority"], ["recompute", "swap"])),
)
def test_beside_others_that_take_its_memory(is_async, num_drafts, policy, mode):
    """Twelve requests of both kinds with room for a few: all give what they give alone."""
    draw = random.Random(f"{is_async}{num_drafts}{policy}{mode}")
    core = CoreUnderTest(
        num_blocks=40,
        budget=23,
        num_host_blocks=40,
        preemption_mode=mode,
        is_async=is_async,
        num_drafts=num_drafts,
        policy=policy,
        costs=LinearCosts(),
    )
    prompts = {number: [draw.randrange(50) for _ in range(draw.randint(1, 90))] for number in range(12)}
    for number, prompt in prompts.items():
        fields = {"priority": draw.randrange(3)}
        if number % 3:
            pooled(core, number, prompt, ["last", "mean"][number % 2], **fields)
        else:
            core.add(number, prompt, max_tokens=30, request=fields)
        for _ in range(draw.randrange(3)):
            core.step()
            core.poison_free_blocks()
    core.run()
    for number, prompt in prompts.items():
        sequence_id = sequence_id_of(number, 0)
        if number % 3:
            assert core.vectors[sequence_id] == expected_vector(prompt)
        else:
            assert core.tokens[sequence_id] == expected_tokens(prompt, 30, vocab_size=50)
    core.assert_empty()


def test_memory_was_short_enough_for_somebody_to_give_way():
    """What the test above is about does happen: growing outputs push pooled prompts out half-way."""
    core = CoreUnderTest(num_blocks=23, budget=7, policy="fifo")
    for number in range(3):
        core.add(number, [number] * 8, max_tokens=20)
    pooled(core, 3, LONG, "mean")
    core.run()
    assert core.vectors == {sequence_id_of(3, 0): expected_vector(LONG)}
    assert core.scheduler.statistics()["num_preemptions_total"] > 0
    core.assert_empty()


def test_the_last_token_alone_is_computed_where_the_rest_is_cached():
    core = CoreUnderTest()
    for number, pooling in enumerate(["last", "last", "mean"]):
        pooled(core, number, LONG, pooling)
        core.run()
    cached = [core.cached[sequence_id_of(number, 0)] for number in range(3)]
    assert cached == [0, 56, 0], "a mean needs the states of all positions, and a cache has none"
    assert len(set(core.vectors.values())) == 1


def test_what_it_computed_others_find():
    core = CoreUnderTest()
    pooled(core, 1, LONG, "mean")
    core.run()
    core.add(2, LONG, max_tokens=2)
    core.run()
    assert core.cached[sequence_id_of(2, 0)] == 56


def test_a_prompt_may_fill_the_model_to_the_last_position():
    core = CoreUnderTest(max_model_len=60, is_async=True)
    pooled(core, 1, LONG)
    core.add(2, LONG, max_tokens=1)
    core.run()
    assert core.vectors == {sequence_id_of(1, 0): expected_vector(LONG)}
    assert "maximum context length is 60" in core.ends[sequence_id_of(2, 0)].error


def test_a_prompt_that_arrives_in_pieces():
    core = CoreUnderTest()
    core.add(1, LONG[:20], is_final=False, request={"pooling": "mean"})
    core.run()
    core.scheduler.extend(1, LONG[20:], is_final=False)
    core.core._is_idle = False
    core.run()
    core.scheduler.extend(1, [], is_final=True)
    core.core._is_idle = False
    core.run()
    assert core.vectors == {sequence_id_of(1, 0): expected_vector(LONG)}
    core.assert_empty()


def test_a_row_that_fails_ends_its_request():
    core = CoreUnderTest()
    pooled(core, 1, LONG)
    core.executor.failing_rows[0] = "not finite"
    core.run()
    assert core.ends[sequence_id_of(1, 0)].error == "not finite"
    assert not core.vectors
    core.assert_empty()


def test_one_that_is_aborted_while_its_step_runs_brings_nothing():
    core = CoreUnderTest(is_async=True)
    pooled(core, 1, LONG)
    core.step()
    core.scheduler.abort([1])
    core.run()
    assert core.ends[sequence_id_of(1, 0)].finish_reason == "abort"
    assert not core.vectors
    core.assert_empty()


@pytest.mark.parametrize(
    ("fields", "sampling", "reason"),
    [
        ({"pooling": "max"}, {}, "pooling='max': must be one of last, mean, cls"),
        ({"pooling": "cls"}, {}, "has seen no other"),
        ({"pooling": "last"}, {"n": 2}, "a prompt becomes one vector"),
        ({"pooling": "last", "keep": "x"}, {}, "a prompt becomes one vector"),
        ({"pooling": "last", "decoding": DecodingSpec(method="beam_search", args={"width": 1})}, {}, "one vector"),
        ({"pooling": "mean", "continues": "kept"}, {}, "Send the whole prompt"),
    ],
)
def test_the_core_looks_at_what_it_is_asked(fields, sampling, reason):
    core = CoreUnderTest()
    core.add(0, LONG, max_tokens=1, request={"keep": "kept"})
    core.run()
    core.add(1, LONG, request=fields, **sampling)
    core.run()
    assert reason in core.ends[sequence_id_of(1, 0)].error
    assert SamplingParams(**sampling).n == sum(number >> 10 == 1 for number in core.ends)
