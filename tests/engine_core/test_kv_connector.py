"""KV that comes from another engine, with everything it can meet: prefixes, chunks, preemption, loss, refusals.

Two cores share a store. What the second one reads is checked cell by cell, so a block that was not brought is noticed.
"""

from __future__ import annotations

from typing import Any

import pytest

from quire.kv_connectors.memory.store import PrefixStore
from quire.messages import AbortRequests, ExtendRequest, KVTransfer
from quire.testing.core import CoreUnderTest
from quire.testing.simulator.checking_model import expected_tokens
from quire.testing.simulator.connector import SimulatedConnector
from quire.testing.simulator.executor import SimulatedDrafts

BLOCK_SIZE = 4
NUM_TOKENS = 9

in_both_ways = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


def prompt_of(number: int, length: int = 14) -> list[int]:
    return [(number * 17 + 3 * position) % 50 for position in range(length)]


def expected(prompt: list[int], count: int = NUM_TOKENS) -> list[int]:
    return expected_tokens(prompt, count, vocab_size=50)


class Pair:
    """An engine that computes prompts and one that goes on."""

    def __init__(self, is_async: bool = False, first: dict[str, Any] | None = None, **second: Any) -> None:
        self.store = PrefixStore()
        common = {"block_size": BLOCK_SIZE, "store": self.store, "is_async": is_async}
        self.first = CoreUnderTest(**{**common, **(first or {})})
        self.second = CoreUnderTest(**{**common, **second})

    def compute(self, number: int, prompt: list[int], **options: Any) -> None:
        """The first engine computes the prompt and one token, and leaves the KV under "kv-NUMBER"."""
        request = {"transfer": KVTransfer(store=f"kv-{number}")}
        self.first.add(number, prompt, max_tokens=1, request=request, **options)
        self.first.run()
        assert self.first.tokens[number << 10] == expected(prompt, 1)

    def go_on(self, number: int, prompt: list[int], **options: Any) -> None:
        """The second engine gets the request with its first token."""
        transfer = KVTransfer(fetch=f"kv-{number}", num_fetch_tokens=len(prompt), num_output_tokens=1)
        sent = [*prompt, *expected(prompt, 1)]
        self.second.add(number, sent, **{"max_tokens": NUM_TOKENS, "request": {"transfer": transfer}, **options})

    def finish(self, prompts: dict[int, list[int]]) -> None:
        """Runs the second engine; free blocks are poisoned after each step. Every token must be the model's."""
        while self.second.core.has_work:
            self.second.step()
            self.second.poison_free_blocks()
        for number, prompt in prompts.items():
            assert self.second.ends[number << 10].error is None
            assert self.second.tokens[number << 10] == expected(prompt)[1:]
        self.second.assert_empty()

    @property
    def num_loaded_blocks(self) -> int:
        connector = self.second.executor.connector
        assert isinstance(connector, SimulatedConnector)
        assert connector.num_loaded_blocks == self.second.core.statistics()["fetched_blocks_total"]
        return connector.num_loaded_blocks


@in_both_ways
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 14, 16])
def test_only_the_token_that_came_along_is_computed(length: int, is_async: bool) -> None:
    pair, prompt = Pair(is_async), prompt_of(1, length)
    pair.compute(1, prompt)
    pair.go_on(1, prompt)
    pair.finish({1: prompt})
    assert pair.num_loaded_blocks == -(-length // BLOCK_SIZE)
    assert pair.second.executor.work.num_tokens == NUM_TOKENS - 1
    assert pair.second.cached[1 << 10] == length


@in_both_ways
def test_the_prompt_may_be_computed_in_chunks(is_async: bool) -> None:
    pair, prompt = Pair(is_async, first={"budget": 3}), prompt_of(1)
    pair.compute(1, prompt)
    assert pair.first.executor.work.num_steps == 5
    pair.go_on(1, prompt)
    pair.finish({1: prompt})
    assert pair.second.executor.work.num_tokens == NUM_TOKENS - 1


@in_both_ways
def test_the_prompt_may_arrive_in_pieces(is_async: bool) -> None:
    pair, prompt = Pair(is_async), prompt_of(1)
    request = {"transfer": KVTransfer(store="kv-1")}
    pair.first.add(1, prompt[:6], max_tokens=1, is_final=False, request=request)
    pair.first.step()
    assert pair.store.find("kv-1") is None
    pair.first.core.extend(ExtendRequest(request_id=1, token_ids=prompt[6:], is_final=True))
    pair.first.run()
    pair.go_on(1, prompt)
    pair.finish({1: prompt})
    assert pair.second.executor.work.num_tokens == NUM_TOKENS - 1


@in_both_ways
@pytest.mark.parametrize("num_shared", [0, 3, 4, 8, 11, 12])
def test_what_is_here_is_not_fetched(num_shared: int, is_async: bool) -> None:
    """4.4.4: only L_prompt - L_cached tokens are moved, in whole blocks."""
    pair, prompt = Pair(is_async), prompt_of(1)
    pair.second.add(7, [*prompt[:num_shared], 49], max_tokens=1)
    pair.second.run()
    pair.compute(1, prompt)
    pair.go_on(1, prompt)
    pair.finish({1: prompt})
    assert pair.num_loaded_blocks == 4 - num_shared // BLOCK_SIZE
    assert pair.second.core.statistics()["fetched_tokens_total"] == 14 - num_shared // BLOCK_SIZE * BLOCK_SIZE
    assert pair.second.executor.work.num_tokens == num_shared + 1 + NUM_TOKENS - 1


@in_both_ways
def test_fetched_blocks_are_known_at_once(is_async: bool) -> None:
    """Two that begin alike and arrive together: the second one finds what is on its way for the first."""
    pair, prompt = Pair(is_async), prompt_of(1)
    pair.compute(1, prompt)
    pair.go_on(1, prompt)
    pair.second.add(2, [*prompt[:12], 40, 41], max_tokens=NUM_TOKENS)
    pair.second.step()
    assert pair.second.cached[2 << 10] == 12
    pair.finish({1: prompt})
    assert pair.second.tokens[2 << 10] == expected([*prompt[:12], 40, 41])


@in_both_ways
def test_two_requests_may_fetch_the_same(is_async: bool) -> None:
    pair, prompt = Pair(is_async), prompt_of(1)
    pair.compute(1, prompt)
    pair.go_on(1, prompt)
    pair.second.add(
        2,
        [*prompt, *expected(prompt, 1)],
        max_tokens=NUM_TOKENS,
        request={"transfer": KVTransfer(fetch="kv-1", num_fetch_tokens=14, num_output_tokens=1)},
    )
    pair.finish({1: prompt, 2: prompt})
    assert pair.num_loaded_blocks == 5, "the partly filled block is each one's own"


@in_both_ways
@pytest.mark.parametrize("num_sampled", [1, 2, 5])
def test_a_request_may_move_on_later_and_store_again(num_sampled: int, is_async: bool) -> None:
    """Limits count from the prompt's end, wherever the tokens were sampled; the rest of the KV is computed."""
    pair, prompt = Pair(is_async), prompt_of(1)
    pair.compute(1, prompt)
    transfer = KVTransfer(store="again", fetch="kv-1", num_fetch_tokens=14, num_output_tokens=num_sampled)
    tokens = expected(prompt)
    pair.second.add(1, [*prompt, *tokens[:num_sampled]], max_tokens=NUM_TOKENS, request={"transfer": transfer})
    pair.second.run()
    assert pair.second.tokens[1 << 10] == tokens[num_sampled:]
    assert pair.second.ends[1 << 10].finish_reason == "length"
    assert pair.second.executor.work.num_tokens == NUM_TOKENS - 1
    again = pair.store.find("again")
    assert again is not None
    assert again.token_ids.tolist() == prompt


@in_both_ways
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_who_fetched_may_give_way(mode: str, prefix_caching: bool, is_async: bool) -> None:
    pair = Pair(
        is_async,
        num_blocks=14,
        max_model_len=40,
        num_host_blocks=40,
        preemption_mode=mode,
        prefix_caching=prefix_caching,
        budget=10,
    )
    prompts = {number: prompt_of(number, 9 + number) for number in range(6)}
    for number, prompt in prompts.items():
        pair.compute(number, prompt)
        pair.go_on(number, prompt)
    pair.finish(prompts)
    statistics = pair.second.core.statistics()
    assert statistics[f"num_preemptions_by_{mode}_total"] > 0
    assert statistics["fetched_tokens_total"] > 0


@in_both_ways
def test_with_drafts(is_async: bool) -> None:
    drafts = SimulatedDrafts(acceptance=0.7, shortfall=0.1, has_cache=True)
    options = {"drafts": drafts, "num_drafts": 3}
    pair = Pair(is_async, first=options, **options)
    prompts = {number: prompt_of(number) for number in range(4)}
    for number, prompt in prompts.items():
        pair.compute(number, prompt)
        pair.go_on(number, prompt)
    pair.finish(prompts)
    assert pair.num_loaded_blocks == 16


@in_both_ways
def test_several_outputs_of_what_was_fetched(is_async: bool) -> None:
    pair, prompt = Pair(is_async), prompt_of(1)
    pair.compute(1, prompt)
    request = {"transfer": KVTransfer(fetch="kv-1", num_fetch_tokens=14)}
    pair.second.add(1, prompt, n=3, temperature=1.0, max_tokens=4, seed=5, request=request)
    pair.second.run()
    alone = CoreUnderTest(block_size=BLOCK_SIZE)
    alone.add(1, prompt, n=3, temperature=1.0, max_tokens=4, seed=5)
    alone.run()
    assert pair.second.tokens == alone.tokens
    assert pair.second.cached[1 << 10] == 13, "the last token is computed, so that one can be sampled after it"


# ---- what is lost, or of no use


@in_both_ways
def test_what_is_lost_is_computed(is_async: bool) -> None:
    pair, prompt = Pair(is_async), prompt_of(1)
    pair.go_on(1, prompt)
    pair.finish({1: prompt})
    assert pair.num_loaded_blocks == 0
    assert pair.second.executor.work.num_tokens == 14 + NUM_TOKENS - 1


def test_what_was_evicted_is_computed() -> None:
    pair = Pair()
    pair.store.max_bytes = 400
    for number in range(3):
        pair.compute(number, prompt_of(number))
    assert pair.store.num_bytes <= 400
    assert pair.store.statistics()["num_prefixes_evicted_total"] == 1
    for number in range(3):
        pair.go_on(number, prompt_of(number))
    pair.finish({number: prompt_of(number) for number in range(3)})
    assert pair.num_loaded_blocks == 8


def test_what_is_evicted_while_it_is_lent_is_still_loaded() -> None:
    """It leaves the store between the decision and the step."""
    pair, prompt = Pair(), prompt_of(1)
    pair.compute(1, prompt)
    pair.go_on(1, prompt)
    pair.second.executor.observers.append(lambda _: pair.store.drop("kv-1"))
    pair.finish({1: prompt})
    assert pair.num_loaded_blocks == 4


def test_other_tokens_under_the_key_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair()
    pair.compute(1, prompt_of(2))
    pair.go_on(1, prompt_of(1))
    pair.finish({1: prompt_of(1)})
    assert pair.num_loaded_blocks == 0
    assert "belongs to other tokens" in caplog.text


def test_blocks_of_another_size_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    pair, prompt = Pair(first={"block_size": 8}), prompt_of(1)
    pair.compute(1, prompt)
    pair.go_on(1, prompt)
    pair.finish({1: prompt})
    assert pair.num_loaded_blocks == 0
    assert "block_size 4, not 8" in caplog.text


@in_both_ways
def test_who_is_aborted_or_fails_stores_nothing(is_async: bool) -> None:
    pair = Pair(is_async, first={"budget": 4})
    for number in (1, 2):
        request = {"transfer": KVTransfer(store=f"kv-{number}")}
        pair.first.add(number, prompt_of(number, 4), max_tokens=1, request=request)
    pair.first.executor.failing_rows[0] = "a failure that was asked for"
    pair.first.step()
    pair.first.core.abort(AbortRequests(request_ids=[2]))
    pair.first.run()
    assert pair.store.find("kv-1") is None
    assert pair.store.find("kv-2") is None
    pair.first.assert_empty()


def test_who_fails_stores_nothing_in_the_step_that_was_decided_already() -> None:
    pair = Pair(is_async=True, first={"budget": 4})
    pair.first.add(1, prompt_of(1, 8), max_tokens=1, request={"transfer": KVTransfer(store="kv-1")})
    pair.first.executor.failing_rows[0] = "a failure that was asked for"
    pair.first.run()
    assert pair.first.ends[1 << 10].finish_reason == "error"
    assert pair.first.executor.work.num_steps == 2
    assert pair.store.find("kv-1") is None
    pair.first.assert_empty()


# ---- refusals


@pytest.mark.parametrize(
    ("transfer", "options", "reason"),
    [
        (KVTransfer(num_output_tokens=5), {}, "the prompt is empty"),
        (KVTransfer(num_output_tokens=7), {}, "num_output_tokens=7 of 5"),
        (KVTransfer(num_output_tokens=-1), {}, "num_output_tokens=-1"),
        (KVTransfer(num_output_tokens=1), {"n": 2}, "as one sequence"),
        (KVTransfer(num_output_tokens=1), {"is_final": False}, "come whole"),
        (KVTransfer(num_output_tokens=3), {"max_tokens": 3}, "nothing is left to generate"),
        (KVTransfer(fetch="a"), {}, "num_fetch_tokens"),
    ],
)
def test_a_transfer_that_cannot_be(transfer: KVTransfer, options: dict[str, Any], reason: str) -> None:
    core = CoreUnderTest(store=PrefixStore())
    core.add(1, prompt_of(1, 5), **{"max_tokens": 9, "request": {"transfer": transfer}, **options})
    core.run()
    assert reason in (core.ends[1 << 10].error or "")
    core.assert_empty()


@pytest.mark.parametrize("transfer", [KVTransfer(store="a"), KVTransfer(fetch="a", num_fetch_tokens=3)])
def test_an_engine_without_a_connector_says_so(transfer: KVTransfer) -> None:
    core = CoreUnderTest()
    core.add(1, prompt_of(1), max_tokens=2, request={"transfer": transfer})
    core.run()
    assert "kv_connector" in (core.ends[1 << 10].error or "")


def test_without_a_connector_a_request_may_still_move() -> None:
    core, prompt = CoreUnderTest(), prompt_of(1)
    request = {"transfer": KVTransfer(num_output_tokens=2)}
    core.add(1, [*prompt, *expected(prompt, 2)], max_tokens=NUM_TOKENS, request=request)
    core.run()
    assert core.tokens[1 << 10] == expected(prompt)[2:]
