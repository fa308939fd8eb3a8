"""Memory of the cache that nobody uses goes back to the system, and no block that somebody has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.engine_core import idle_memory
from quire.engine_core.executor.executor import GIVE_BACK, RESIDENT_MEMORY
from quire.engine_core.idle_memory import IdleMemory
from quire.engine_core.kv_cache_manager.block_pool import BlockPool
from quire.messages import int_array
from quire.testing.core import CoreUnderTest
from quire.testing.greedy import generate_greedy, real_core
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker import kv_cache

CHUNK = 4
MEMORY = {"kv_cache_bytes": 1000, "kv_cache_resident_bytes": 300, "resident_bytes": 700}


class Workers:
    def __init__(self) -> None:
        self.given_back: list[tuple[int, int]] = []

    def control(self, name: str, args: dict[str, Any]) -> Any:
        if name == RESIDENT_MEMORY:
            return MEMORY
        assert name == GIVE_BACK
        self.given_back.append((args["first"], args["end"]))
        return None


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(18)


def calls_until_rest(tend: Callable[[float], float | None], now: float = 0.0) -> tuple[float, int]:
    """(when there is nothing to do any more, how often it was called)."""
    for count in range(1000):
        wait = tend(now)
        if wait is None:
            return now, count
        assert wait > 0
        now += wait
    raise AssertionError("it never rests")


def test_an_engine_that_has_done_nothing_sleeps(pool: BlockPool) -> None:
    assert IdleMemory(pool, Workers().control, CHUNK).tend(0.0) is None


def test_what_was_used_goes_back_after_a_while_a_chunk_at_a_time(pool: BlockPool) -> None:
    workers = Workers()
    memory = IdleMemory(pool, workers.control, CHUNK)
    pool.release(int_array(pool.allocate(6)))
    for now in range(30):
        wait = memory.tend(float(now))
        assert wait is not None
        assert wait <= 5
        assert not workers.given_back
    memory.tend(30.0)
    assert workers.given_back == [(0, 4)]
    # not before a step could have run
    memory.tend(30.001)
    assert len(workers.given_back) == 1
    calls_until_rest(memory.tend, 30.1)
    # the last chunk is short
    assert workers.given_back == [(0, 4), (4, 8), (8, 12), (12, 16), (16, 18)]
    assert memory.statistics() == {**MEMORY, "num_blocks_given_back_total": 18, "most_resident_bytes": 0}
    # and once is enough
    assert memory.tend(1e6) is None
    pool.release(int_array(pool.allocate(1)))
    assert memory.tend(2e6) is not None


def test_what_the_next_step_takes_to_swap_space_stays_until_then() -> None:
    core = CoreUnderTest(num_host_blocks=64, preemption_mode="swap")
    workers = Workers()
    core.core._memory = IdleMemory(core.pool, workers.control, CHUNK)
    core.add(1, [7] * 30, max_tokens=8)
    for _ in range(3):
        core.step()
    core.scheduler.admission_control.preempt(core.scheduler.lifecycle.requests[1], "somebody needed its blocks")
    core.core.control("reset_prefix_cache", {})
    assert core.core.tend(1e6) is None
    assert not workers.given_back
    core.run()
    core.core.control("reset_prefix_cache", {})
    calls_until_rest(core.core.tend)
    assert workers.given_back[-1] == (60, 64)


def test_blocks_that_are_held_or_cached_stay(pool: BlockPool) -> None:
    workers = Workers()
    memory = IdleMemory(pool, workers.control, CHUNK)
    blocks = pool.allocate(18)
    pool.register(blocks[5], (0, b"x"))
    held = [blocks[9]]
    pool.release(int_array([block for block in blocks if block not in held]))
    calls_until_rest(memory.tend)
    assert workers.given_back == [(0, 4), (12, 16), (16, 18)]
    pool.release(int_array(held))
    pool.discard(blocks[5])
    calls_until_rest(memory.tend, 1000.0)
    assert {(4, 8), (8, 12)} <= set(workers.given_back)


def test_a_chunk_that_is_taken_meanwhile_stays(pool: BlockPool) -> None:
    workers = Workers()
    memory = IdleMemory(pool, workers.control, CHUNK)
    pool.release(int_array(pool.allocate(18)))
    now = 0.0
    while not workers.given_back:
        now += memory.tend(now) or 0.0
    held = pool.allocate(12)
    calls_until_rest(memory.tend, now)
    assert not set(held) & {block for first, end in workers.given_back[1:] for block in range(first, end)}


def test_under_steady_work_what_a_burst_has_used_goes_back(pool: BlockPool) -> None:
    workers = Workers()
    memory = IdleMemory(pool, workers.control, CHUNK)
    pool.release(int_array(pool.allocate(18)))
    now = 0.0
    for _ in range(4000):
        blocks = pool.allocate(2)
        memory.tend(now)
        pool.release(int_array(blocks))
        now += 0.01
    # the blocks that went back last are taken first
    given_back = {block for first, end in workers.given_back for block in range(first, end)}
    assert len(given_back) >= 18 - CHUNK
    assert not given_back & set(blocks)


def test_the_start_says_what_the_engine_will_take(pool: BlockPool) -> None:
    memory = IdleMemory(pool, Workers().control, CHUNK)
    memory.foresee(100)
    assert memory.statistics()["most_resident_bytes"] == 700 - 300 + 1000 + 100
    assert memory.report[0].startswith("memory: at most 0 MiB: ")


def test_a_cache_goes_back_and_says_the_same_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "_COMMIT_AHEAD_BYTES", 0)
    # 16 blocks of a page in each of three layers
    monkeypatch.setattr(idle_memory, "_CHUNK_BYTES", 1 << 16)
    path = make_checkpoint(tmp_path / "llama", "llama")
    core = real_core(path, num_gpu_blocks_override=96, max_model_len=256, max_num_seqs=4)
    try:
        prompts = [[(7 * number + step) % 90 + 5 for step in range(100)] for number in range(4)]
        before = core.statistics()["kv_cache_resident_bytes"]
        expected = generate_greedy(core, prompts, 100)
        used = core.statistics()["kv_cache_resident_bytes"]
        num_cached = core.statistics()["num_blocks_cached"]
        assert used - before > 40 * 3 * 4096
        calls_until_rest(core.tend)
        assert core.statistics()["num_blocks_cached"] == num_cached
        assert core.statistics()["kv_cache_resident_bytes"] >= num_cached * 3 * 4096
        core.control("reset_prefix_cache", {})
        calls_until_rest(core.tend, 1000.0)
        left = core.statistics()
        assert left["kv_cache_resident_bytes"] == 0
        assert left["num_blocks_given_back_total"] >= 96
        assert left["kv_cache_bytes"] == 96 * 3 * 4096
        assert generate_greedy(core, prompts, 100) == expected
    finally:
        core.shutdown()
