"""Blocks that go on living elsewhere, with all that a request can meet: waiting, loss, preemption, failures, transfers.

Cores share tiers. What one reads is checked cell by cell: a block that is brought wrongly, or not at all, is noticed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.shelf import Shelf

from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.engine_core.rows import Rows
from quire.engine_core.scheduler.constraints import Constraint, OneStepAtATime
from quire.kv_connectors.tiered.guard import GuardedStore
from quire.kv_connectors.tiered.payload import Frames
from quire.kv_connectors.tiered.settings import TierSettings
from quire.kv_connectors.tiered.tiers import Tiers
from quire.messages import AbortRequests, IntArray, KVTransfer, Tenancy
from quire.testing.core import CoreUnderTest
from quire.testing.simulator.checking_model import expected_tokens
from quire.testing.simulator.connector import SimulatedTieredConnector
from quire.testing.simulator.executor import SimulatedDrafts

BLOCK_SIZE = 4
NUM_TOKENS = 6

in_both_ways = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


def tiers_over(shelf: Shelf | None, *, host_bytes: int = 1 << 20, max_wait: float = 30.0) -> Tiers:
    settings = TierSettings((), host_bytes, max_wait, "always")
    stores = [] if shelf is None else [GuardedStore("file:///shelf", shelf, Frames(b"key"))]
    return Tiers(settings, stores)


def core_of(tiers: Tiers, **options: Any) -> CoreUnderTest:
    return CoreUnderTest(**{"block_size": BLOCK_SIZE, "tiers": tiers, **options})


def prompt_of(number: int, length: int = 14) -> list[int]:
    return [(number * 17 + 3 * position) % 50 for position in range(length)]


def run(core: CoreUnderTest, number: int, prompt: list[int], **options: Any) -> int:
    """How many of its tokens were not computed. What it answers must be the model's."""
    core.add(number, prompt, **{"max_tokens": NUM_TOKENS, **options})
    finish(core, {number: prompt})
    return core.cached[number << 10]


def finish(core: CoreUnderTest, prompts: dict[int, list[int]]) -> None:
    while core.core.has_work:
        core.step()
        core.poison_free_blocks()
    for number, prompt in prompts.items():
        assert core.ends[number << 10].error is None
        assert core.tokens[number << 10] == expected_tokens(prompt, len(core.tokens[number << 10]), vocab_size=50)
    core.assert_empty()


# ---- what is found


@in_both_ways
@pytest.mark.parametrize("has_store", [False, True])
def test_another_engine_computes_the_rest_only(has_store: bool, is_async: bool) -> None:
    shelf = Shelf() if has_store else None
    tiers = tiers_over(shelf)
    first = core_of(tiers, is_async=is_async)
    assert run(first, 1, prompt_of(1)) == 0
    if shelf is not None:
        assert tiers.flush(10.0)
        tiers = tiers_over(shelf)  # a process that has started anew
    second = core_of(tiers, is_async=is_async)
    assert run(second, 1, prompt_of(1)) == 12
    assert second.executor.work.num_tokens == 2 + NUM_TOKENS - 1
    assert run(second, 2, [*prompt_of(1)[:9], 40, 41]) == 8
    assert second.core.statistics()["fetched_tokens_total"] == 12, "the second one finds it in the prefix cache"


def test_one_that_begins_in_a_later_step_than_it_is_admitted_in_finds_it_as_well() -> None:
    tiers = tiers_over(None)
    prompts = {number: prompt_of(number) for number in (1, 2, 3)}
    for number, prompt in prompts.items():
        run(core_of(tiers), number, prompt)
    second = core_of(tiers, constraints=[OneStepAtATime(2)])
    for number, prompt in prompts.items():
        second.add(number, prompt, max_tokens=NUM_TOKENS)
    finish(second, prompts)
    assert [second.cached[number << 10] for number in prompts] == [12, 12, 12]


@in_both_ways
def test_output_is_found_as_well(is_async: bool) -> None:
    tiers = tiers_over(None)
    first = core_of(tiers, is_async=is_async)
    run(first, 1, prompt_of(1), max_tokens=12)
    conversation = [*prompt_of(1), *first.tokens[1 << 10], 7, 8]
    assert run(core_of(tiers, is_async=is_async), 1, conversation) == 24


@in_both_ways
def test_what_is_here_is_not_brought(is_async: bool) -> None:
    tiers = tiers_over(None)
    second = core_of(tiers, is_async=is_async)
    run(second, 7, [*prompt_of(1)[:8], 49], max_tokens=1)
    run(core_of(tiers, is_async=is_async), 1, prompt_of(1))
    assert run(second, 1, prompt_of(1)) == 12
    connector = second.executor.connector
    assert isinstance(connector, SimulatedTieredConnector)
    assert connector.num_loaded_blocks == 1


@in_both_ways
@pytest.mark.parametrize("num_stored", [2, 7])
def test_conversations_ten_times_as_large_as_the_pool_go_on(num_stored: int, is_async: bool) -> None:
    """Each comes back after the others have pushed it out, and computes only what is new."""
    core = core_of(
        tiers_over(Shelf(), host_bytes=600 if num_stored == 2 else 1 << 20), num_blocks=10, is_async=is_async
    )
    turns = {number: prompt_of(number, 16) for number in range(20)}
    for number, prompt in turns.items():
        assert run(core, number, prompt, max_tokens=2) == 0
        tiers_of(core).flush(10.0)
    for number, prompt in turns.items():
        assert run(core, 100 + number, [*prompt, 1, 2], max_tokens=2) == 16


def tiers_of(core: CoreUnderTest) -> Tiers:
    connector = core.executor.connector
    assert isinstance(connector, SimulatedTieredConnector)
    return connector._tiers


@in_both_ways
def test_several_outputs_and_beams_behind_what_was_brought(is_async: bool) -> None:
    tiers = tiers_over(None)
    run(core_of(tiers, is_async=is_async), 1, prompt_of(1))
    found = core_of(tiers, is_async=is_async)
    alone = CoreUnderTest(block_size=BLOCK_SIZE, is_async=is_async)
    for core in (found, alone):
        core.add(1, prompt_of(1), n=3, temperature=1.0, max_tokens=4, seed=5)
        core.beam(2, [*prompt_of(1), 4], 3, max_tokens=5)
        core.run()
    assert found.tokens == alone.tokens
    assert found.cached[1 << 10] == 12
    found.assert_empty()


@in_both_ways
def test_with_drafts(is_async: bool) -> None:
    tiers = tiers_over(None)
    options = {"drafts": SimulatedDrafts(acceptance=0.7, shortfall=0.1, has_cache=True), "num_drafts": 3}
    run(core_of(tiers, is_async=is_async, **options), 1, prompt_of(1))
    assert run(core_of(tiers, is_async=is_async, **options), 1, prompt_of(1)) == 12


@in_both_ways
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_who_gives_way_and_comes_back(mode: str, is_async: bool) -> None:
    core = core_of(
        tiers_over(None), num_blocks=14, max_model_len=40, num_host_blocks=40, preemption_mode=mode, budget=10,
        is_async=is_async,
    )  # fmt: skip
    prompts = {number: prompt_of(number, 9 + number) for number in range(6)}
    for repeat in (0, 10):
        for number, prompt in prompts.items():
            core.add(repeat + number, prompt, max_tokens=9)
        finish(core, {repeat + number: prompt for number, prompt in prompts.items()})
    statistics = core.core.statistics()
    assert statistics[f"num_preemptions_by_{mode}_total"] > 0
    assert statistics["fetched_tokens_total"] > 0


class Withheld(Constraint):
    """Nothing for row 0 before row 1 has computed so many tokens."""

    def __init__(self, until: int) -> None:
        self._until = until
        self._is_over = False

    def most(self, rows: Rows, row: IntArray, num_tokens: IntArray) -> IntArray:
        self._is_over |= bool(rows.num_computed[1] >= self._until)
        return num_tokens if self._is_over else np.where(row == 0, 0, num_tokens)


@in_both_ways
@pytest.mark.parametrize("until", range(12, 18))
def test_what_is_not_there_yet_does_not_go_to_swap_space(until: int, is_async: bool) -> None:
    """Who gives way in the step that was to bring its prefix: after one of these lengths of the other, it does."""
    tiers = tiers_over(None)
    drafts = {"drafts": SimulatedDrafts(acceptance=0.5, shortfall=0.1, has_cache=True), "num_drafts": 1}
    prompts = {1: prompt_of(1), 2: prompt_of(2, 9)}
    run(core_of(tiers, **drafts), 1, prompts[1])
    core = core_of(
        tiers, num_blocks=8, max_model_len=32, num_host_blocks=16, preemption_mode="swap", policy="priority",
        constraints=[Withheld(until)], is_async=is_async, **drafts,
    )  # fmt: skip
    core.add(1, prompts[1], max_tokens=NUM_TOKENS, request={"priority": 2})
    core.step()
    core.add(2, prompts[2], max_tokens=20, request={"priority": 1})
    finish(core, prompts)
    assert core.core.statistics()["num_preemptions_total"] == 1


# ---- waiting


class Gate:
    """Holds up whoever asks the store, until it is opened."""

    def __init__(self, shelf: Shelf) -> None:
        self._is_open = threading.Event()
        self._arrivals = threading.Semaphore(0)
        shelf.before_each = self._pass

    def open(self) -> None:
        self._is_open.set()

    def wait_for_reader(self) -> None:
        """Until one more thread has come to it that reads."""
        assert self._arrivals.acquire(timeout=60)

    def _pass(self) -> None:
        # those that put something there come, too
        if threading.current_thread().name.startswith("quire-kv-reader"):
            self._arrivals.release()
        self._is_open.wait()


@pytest.fixture
def shut() -> Iterator[Callable[[Shelf], Gate]]:
    """Gates that open at the end, whatever a test has found: a process with a thread that hangs does not end."""
    gates: list[Gate] = []

    def shut_one(shelf: Shelf) -> Gate:
        gates.append(Gate(shelf))
        return gates[-1]

    yield shut_one
    for gate in gates:
        gate.open()


def stored_prompt(shelf: Shelf, number: int = 1) -> list[int]:
    tiers = tiers_over(shelf)
    prompt = prompt_of(number)
    run(core_of(tiers), number, prompt)
    assert tiers.flush(10.0)
    return prompt


@in_both_ways
def test_who_waits_for_blocks_holds_up_nobody(shut: Callable[[Shelf], Gate], is_async: bool) -> None:
    shelf = Shelf()
    prompt = stored_prompt(shelf)
    gate = shut(shelf)
    core = core_of(tiers_over(shelf), is_async=is_async, max_num_seqs=1)
    core.add(1, prompt, max_tokens=NUM_TOKENS)
    core.add(2, [3, 4], max_tokens=NUM_TOKENS)
    while 2 << 10 not in core.ends:
        core.step()
    assert 1 << 10 not in core.ends
    observed = core.core.control("observe_blocks", {})
    assert observed["waiting_for"]["blocks"] == 1
    gate.open()
    finish(core, {1: prompt})
    assert core.cached[1 << 10] == 12


def test_what_comes_too_late_is_computed(shut: Callable[[Shelf], Gate]) -> None:
    shelf = Shelf()
    prompt = stored_prompt(shelf)
    shut(shelf)
    core = core_of(tiers_over(shelf, max_wait=0.02))
    assert run(core, 1, prompt) == 0
    assert core.core.statistics()["kv_tiers_late_total"] == 1


def test_a_store_in_which_threads_hang_is_not_waited_for(shut: Callable[[Shelf], Gate]) -> None:
    shelf = Shelf()
    prompts = [stored_prompt(shelf, number) for number in range(6)]
    gate = shut(shelf)
    core = core_of(tiers_over(shelf))
    now = 0.0
    core.scheduler._transfers._blocks._questions._clock = lambda: now
    for number, prompt in enumerate(prompts[:4]):
        core.add(number, prompt, max_tokens=NUM_TOKENS)
        core.step()
        gate.wait_for_reader()
        now += 100
        finish(core, {number: prompt})
        assert core.cached[number << 10] == 0
    for number, prompt in enumerate(prompts[4:], 4):
        assert run(core, number, prompt) == 0
    assert core.core.statistics()["kv_tiers_late_total"] == 4


def test_who_waits_may_be_aborted(shut: Callable[[Shelf], Gate]) -> None:
    shelf = Shelf()
    prompt = stored_prompt(shelf)
    gate = shut(shelf)
    core = core_of(tiers_over(shelf))
    core.add(1, prompt, max_tokens=2)
    core.step()
    core.core.abort(AbortRequests(request_ids=[1]))
    core.run()
    assert core.ends[1 << 10].finish_reason == "abort"
    gate.open()
    assert run(core, 2, [1, 2, 3]) == 0
    assert not core.scheduler._transfers._asked


# ---- what is lost


@in_both_ways
@pytest.mark.parametrize("how", ["gone", "flipped", "of another block", "raises"])
def test_what_a_store_loses_is_computed(how: str, is_async: bool) -> None:
    shelf = Shelf()
    prompt = stored_prompt(shelf)
    names = list(shelf.values)
    if how == "gone":
        del shelf.values[names[1]]
    elif how == "flipped":
        shelf.values[names[1]] = shelf.values[names[1]][:-3] + b"\x01\x02\x03"
    elif how == "of another block":
        shelf.values[names[1]] = shelf.values[names[0]]
    else:

        def fail() -> None:
            raise OSError("the store is away")

        shelf.before_each = fail
    core = core_of(tiers_over(shelf), is_async=is_async)
    assert run(core, 1, prompt) == (0 if how == "raises" else 4)
    assert core.core.statistics()["kv_store_files_corrupt_total"] == (how in ("flipped", "of another block"))


def test_what_is_broken_is_written_anew() -> None:
    shelf = Shelf()
    prompt = stored_prompt(shelf)
    name = list(shelf.values)[1]
    whole = shelf.values[name]
    shelf.values[name] = whole[:-1] + bytes([whole[-1] ^ 1])
    tiers = tiers_over(shelf)
    run(core_of(tiers), 1, prompt)
    assert tiers.flush(10.0)
    assert shelf.values[name] == whole
    assert run(core_of(tiers_over(shelf)), 1, prompt) == 12


@in_both_ways
def test_what_a_failed_row_was_to_write_is_not_kept(is_async: bool) -> None:
    tiers = tiers_over(None)
    core = core_of(tiers, is_async=is_async)
    core.add(1, prompt_of(1), max_tokens=NUM_TOKENS)
    core.executor.failing_rows[0] = "a failure that was asked for"
    core.run()
    assert core.ends[1 << 10].finish_reason == "error"
    assert not len(tiers.host)
    assert run(core_of(tiers, is_async=is_async), 1, prompt_of(1)) == 0


def test_who_may_not_use_the_prefix_cache_is_brought_nothing() -> None:
    tiers = tiers_over(None)
    run(core_of(tiers), 1, prompt_of(1))
    core = core_of(tiers)
    core.add(1, prompt_of(1), max_tokens=2, prompt_logprobs=1)
    core.run()
    assert core.core.statistics()["fetched_tokens_total"] == 0


# ---- whose it is


def test_nobody_finds_what_another_tenant_has() -> None:
    tiers = tiers_over(None)
    one, other = (Tenancy(name=name, cache_scope=f"scope of {name}") for name in ("one", "other"))
    run(core_of(tiers), 1, prompt_of(1), request={"tenant": one})
    core = core_of(tiers)
    assert run(core, 1, prompt_of(1), request={"tenant": other}) == 0
    assert run(core, 2, prompt_of(1), request={"cache_salt": "salt"}) == 0
    assert run(core, 3, prompt_of(1)) == 0
    assert run(core_of(tiers), 4, prompt_of(1), request={"tenant": one}) == 12


@in_both_ways
def test_nobody_finds_what_other_weights_have_computed(is_async: bool) -> None:
    """Nor does who waits for it when they come."""
    shelf = Shelf()
    first = tiers_over(shelf)
    first.enter()
    run(core_of(first), 1, prompt_of(1))
    assert first.flush(10.0)
    gate = threading.Event()
    shelf.before_each = gate.wait
    tiers = tiers_over(shelf)
    core = core_of(tiers, is_async=is_async)
    core.add(1, prompt_of(1), max_tokens=NUM_TOKENS)
    core.step()
    core.core.scheduler.forget_computed(b"other weights")
    gate.set()
    finish(core, {1: prompt_of(1)})
    assert core.cached[1 << 10] == 0
    assert core.core.statistics()["fetched_tokens_total"] == 0
    assert run(core, 2, prompt_of(1)) == 12, "what they have computed themselves"
    core.core.scheduler.reset_prefix_cache()
    assert run(core, 3, prompt_of(1)) == 12, "from memory"
    assert run(core_of(tiers, is_async=is_async), 4, prompt_of(1)) == 12, "what the weights of the checkpoint computed"
    first.leave()


# ---- a prompt computed here, the output there (4.4.4)


@in_both_ways
@pytest.mark.parametrize("length", [1, 3, 4, 5, 14, 16])
def test_only_the_token_that_came_along_is_computed(length: int, is_async: bool) -> None:
    tiers = tiers_over(None)
    prompt = prompt_of(1, length)
    first, second = (core_of(tiers, is_async=is_async) for _ in range(2))
    run(first, 1, prompt, max_tokens=1, request={"transfer": KVTransfer(store="any")})
    sent = [*prompt, *expected_tokens(prompt, 1, vocab_size=50)]
    transfer = KVTransfer(fetch="any", num_fetch_tokens=length, num_output_tokens=1)
    second.add(1, sent, max_tokens=NUM_TOKENS, request={"transfer": transfer})
    finish(second, {1: sent})
    assert second.cached[1 << 10] == length
    assert second.executor.work.num_tokens == NUM_TOKENS - 1
    assert second.core.statistics()["fetched_blocks_total"] == -(-length // BLOCK_SIZE)


WINDOW = KVGroup(("window",), sliding_window=6)
CHUNK = KVGroup(("chunk",), sliding_window=8, is_chunked=True)
ALL = KVGroup(("all",))


@in_both_ways
@pytest.mark.parametrize("length", [1, 4, 13, 16, 27])
@pytest.mark.parametrize("groups", [(ALL, WINDOW), (WINDOW,), (WINDOW, CHUNK, ALL)])
def test_what_windows_keep_is_handed_over(groups: tuple[KVGroup, ...], length: int, is_async: bool) -> None:
    tiers = tiers_over(None)
    prompt = prompt_of(1, length)
    first, second = (core_of(tiers, is_async=is_async, groups=groups) for _ in range(2))
    run(first, 1, prompt, max_tokens=1, request={"transfer": KVTransfer(store="any")})
    sent = [*prompt, *expected_tokens(prompt, 1, vocab_size=50)]
    transfer = KVTransfer(fetch="any", num_fetch_tokens=length, num_output_tokens=1)
    second.add(1, sent, max_tokens=NUM_TOKENS, request={"transfer": transfer})
    finish(second, {1: sent})
    assert second.executor.work.num_tokens == NUM_TOKENS - 1
    size = BLOCK_SIZE
    needed = [-(-length // size) - min(group.first_needed_block(length, size), length // size) for group in groups]
    assert second.core.statistics()["fetched_blocks_total"] == sum(needed)


@in_both_ways
def test_of_windows_a_shorter_prefix_is_found_as_well(is_async: bool) -> None:
    tiers = tiers_over(None)
    run(core_of(tiers, is_async=is_async, groups=(ALL, WINDOW)), 1, prompt_of(1, 30))
    second = core_of(tiers, is_async=is_async, groups=(ALL, WINDOW))
    assert run(second, 1, [*prompt_of(1, 30)[:22], 40, 41]) == 20
    assert second.core.statistics()["fetched_blocks_total"] == 5 + 2


def test_what_is_still_being_computed_elsewhere_is_waited_for() -> None:
    shelf = Shelf()
    prompt = prompt_of(1)
    second = core_of(tiers_over(shelf))
    sent = [*prompt, *expected_tokens(prompt, 1, vocab_size=50)]
    transfer = KVTransfer(fetch="any", num_fetch_tokens=14, num_output_tokens=1)
    second.add(1, sent, max_tokens=NUM_TOKENS, request={"transfer": transfer})
    for _ in range(3):
        second.step()
    assert not second.cached
    first = core_of(tiers_over(shelf))
    run(first, 1, prompt, max_tokens=1, request={"transfer": KVTransfer(store="any")})
    finish(second, {1: sent})
    assert second.cached[1 << 10] == 14
