"""What the KV cache manager costs, against the length of the context: a decoding step, a fork, free, a hit, a swap.

    python benchmarks/memory_manager.py [--quick]

Real scheduler, manager and messages; the executor answers at once. CPU time of this thread in microseconds: the median
over repetitions, with the lowest and the highest. A decoding step and what waits beside it must not grow with the
context; a fork may grow by what copying a block table takes, and is put beside the copy of one block of Qwen3-0.6B's
shape; freeing, finding and swapping touch each block once. Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from instant_executor import InstantExecutor

from quire.engine_core.request import Request, Sequence
from quire.engine_core.scheduler.lifecycle import WorkerChanges
from quire.messages import EngineRequest, SchedulerOutput
from quire.sampling_params import SamplingParams
from quire.testing.core import CoreUnderTest
from quire.worker.kernels import copy_blocks

BLOCK_SIZE = 16
# room for the steps that are measured
SPARE = 512
# Qwen3-0.6B: keys and values of 28 layers, heads, size of a head
CACHES, KV_HEADS, HEAD_DIM = 2 * 28, 8, 128
LENGTHS = (1_000, 10_000, 100_000)
VERBS = (
    "fork",
    "  the manager's part of a fork",
    "first write after it",
    "free of a fork",
    "prefix look-up, a hit",
    "prefix look-up, hashes known",
    "free of the last holder",
)
Times = list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to 10,000 tokens, fewer repetitions")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    lengths, repeats = (LENGTHS[:2], 5) if quick else (LENGTHS, 25)
    rows: dict[str, dict[int, Times]] = {}

    def add(length: int, times: dict[str, Times]) -> None:
        for name, values in times.items():
            rows.setdefault(name, {})[length] = values

    for length in lengths:
        for count in (1, 64):
            add(length, step_times(length, count, num_steps=4 * repeats * BLOCK_SIZE // 5))
        add(length, waiting_times(length, num_steps=2 * BLOCK_SIZE))
        add(length, verb_times(length, repeats))
        add(length, swap_times(length, repeats))
    copy = block_copy_times(repeats)
    print(table(rows, lengths))
    print(f"{'copy of one block, 1.8 MB, by the kernel':<44}{cell(copy)}")
    figures = {name: {length: summary(values) for length, values in row.items()} for name, row in rows.items()}
    print(json.dumps({"memory_manager_us": figures, "block_copy_us": summary(copy), "quick": quick}))


def table(rows: dict[str, dict[int, Times]], lengths: tuple[int, ...]) -> str:
    lines = [f"{'tokens of context':<44}" + "".join(f"{length:>28,}" for length in lengths)]
    for name, row in rows.items():
        lines.append(f"{name:<44}" + "".join(cell(row[length]) for length in lengths))
    return "\n".join(lines)


def cell(times: Times) -> str:
    text = f"{statistics.median(times):,.1f} ({min(times):,.1f}-{max(times):,.1f})"
    return f"{text:>28}"


def summary(times: Times) -> dict[str, float]:
    figures = {"median": statistics.median(times), "lowest": min(times), "highest": max(times)}
    return {name: round(value, 2) for name, value in figures.items()}


def microseconds(action: Callable[[], Any]) -> float:
    start = time.thread_time_ns()
    action()
    return (time.thread_time_ns() - start) / 1e3


# ---------------------------------------------------------------------------------------------- a core to measure


def started_core(lengths: list[int], num_blocks: int = 0, **options: Any) -> CoreUnderTest:
    """Requests with prompts of these lengths, which have had their first token."""
    core = CoreUnderTest(
        num_blocks=num_blocks or sum(map(blocks_of, lengths)),
        block_size=BLOCK_SIZE,
        budget=sum(lengths) + len(lengths),
        max_num_seqs=len(lengths) + 2,
        max_model_len=max(lengths) + SPARE,
        check_invariants=False,
        **options,
    )
    core.core.executor = InstantExecutor(len(lengths) + 2)
    for number, length in enumerate(lengths):
        core.core.add(request_of(number, length))
    core.core.step()
    assert len(core.scheduler.running.requests) == len(lengths)
    return core


def request_of(number: int, length: int, content: int | None = None) -> EngineRequest:
    prompt = random.Random(number if content is None else content).choices(range(50), k=length)
    sampling = SamplingParams(max_tokens=SPARE, ignore_eos=True, temperature=0.0)
    return EngineRequest(request_id=number, prompt_token_ids=prompt, sampling=sampling)


def blocks_of(length: int) -> int:
    return (length + SPARE) // BLOCK_SIZE + 2


def only_sequence(request: Request) -> Sequence:
    (sequence,) = request.sequences.values()
    return sequence


# ---------------------------------------------------------------------------------------------- per step


def step_times(length: int, count: int, num_steps: int) -> dict[str, Times]:
    """Means over 16 steps, in which each sequence takes a new block once: the whole step, and the manager's part."""
    # Lengths differ, so that blocks fill up in different steps.
    core = started_core([length + number % BLOCK_SIZE for number in range(count)])
    spent = watch_manager(core)
    steps, parts = [], []
    for _ in range(num_steps // BLOCK_SIZE):
        before = spent[0]
        steps.append(sum(microseconds(core.core.step) for _ in range(BLOCK_SIZE)) / BLOCK_SIZE)
        parts.append((spent[0] - before) / BLOCK_SIZE)
    name = "1 sequence" if count == 1 else f"{count} sequences"
    return {f"a decoding step, {name}": steps, f"  the manager's part, {name}": parts}


def watch_manager(core: CoreUnderTest) -> list[float]:
    """Microseconds that the scheduler has spent in calls of the manager, from now on."""
    spent = [0.0]

    def watched(action: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            start = time.thread_time_ns()
            result = action(*args, **options)
            spent[0] += (time.thread_time_ns() - start) / 1e3
            return result

        return call

    for name in ("allocate_slots", "name_granted", "get_computed_blocks", "take_moves_into"):
        setattr(core.manager, name, watched(getattr(core.manager, name)))
    core.manager.estimates.blocks_to_come = watched(core.manager.estimates.blocks_to_come)  # type: ignore[method-assign]
    return spent


def waiting_times(length: int, num_steps: int) -> dict[str, Times]:
    """A decoding step of one sequence, while a long one waits for room: a new one, or one that gave way."""
    times = {}
    for content, name in ((1, "unknown"), (0, "cached")):
        # It needs a few blocks more than are free, even if all of its prompt is at hand.
        new = started_core([length], num_blocks=blocks_of(length) + (0 if content == 0 else length // BLOCK_SIZE))
        hold_back(new, num_steps)
        new.core.add(request_of(1, length + SPARE // 2, content))
        times[f"a step while a new, {name} prompt waits"] = steps_of(new, num_steps)
    for mode, name in (("recompute", "one to compute again"), ("swap", "a swapped one")):
        core = started_core([100, length], num_host_blocks=blocks_of(length), preemption_mode=mode)
        core.scheduler._preempt(core.scheduler.running.requests[1], "to measure it")
        # half of its blocks can still be found
        hold_back(core, length // 2)
        times[f"a step while {name} waits"] = steps_of(core, num_steps)
    return times


def hold_back(core: CoreUnderTest, num_tokens: int) -> None:
    """Leaves blocks for so many tokens."""
    core.pool.allocate(core.pool.num_available - num_tokens // BLOCK_SIZE - 4)


def steps_of(core: CoreUnderTest, num_steps: int) -> Times:
    core.core.step()
    times = [microseconds(core.core.step) for _ in range(num_steps)]
    assert len(core.scheduler.running.requests) == 1, "the long one was to wait"
    return times


# ---------------------------------------------------------------------------------------------- verbs and look-ups


def verb_times(length: int, repeats: int) -> dict[str, Times]:
    core = started_core([length], num_blocks=2 * blocks_of(length))
    lifecycle, manager = core.scheduler.lifecycle, core.manager
    request = core.scheduler.running.requests[0]
    parent = only_sequence(request)
    # A block that is partly filled, so that a fork has one to copy.
    while parent.num_computed_tokens % BLOCK_SIZE != BLOCK_SIZE // 2:
        core.core.step()
    times: dict[str, Times] = {name: [] for name in VERBS}
    for repeat in range(repeats):
        request.num_reserved_rows = core.scheduler.running.num_reserved_rows = 1
        inside = watched_fork(core)
        times["fork"].append(microseconds(lambda: lifecycle.fork(parent, 1, *numbers_of(parent))))
        times["  the manager's part of a fork"].append(inside[0])
        del manager.fork
        child = request.sequences[1]
        times["first write after it"].append(microseconds(lambda child=child: manager.allocate_slots(child, 1)))
        manager.take_moves_into(SchedulerOutput(step=1))
        times["free of a fork"].append(microseconds(lambda child=child: manager.free(child)))
        lifecycle._remove(child)
        lifecycle.changes = WorkerChanges()
        manager.take_moves_into(SchedulerOutput(step=1))
        hit = new_sequence(core, request_of(1000 + repeat, length, content=0))
        times["prefix look-up, a hit"].append(microseconds(lambda hit=hit: manager.get_computed_blocks(hit)))
        times["prefix look-up, hashes known"].append(microseconds(lambda hit=hit: manager.get_computed_blocks(hit)))
        times["free of the last holder"].append(microseconds(lambda: manager.free(parent)))
        begin_again(core, parent)
    return times


def numbers_of(parent: Sequence) -> tuple[int, int]:
    return parent.num_total_tokens, parent.num_computed_tokens


def watched_fork(core: CoreUnderTest) -> list[float]:
    inside = [0.0]
    fork = core.manager.fork

    def call(parent: Sequence, child: Sequence) -> None:
        inside[0] = microseconds(lambda: fork(parent, child))

    core.manager.fork = call  # type: ignore[method-assign]
    return inside


def new_sequence(core: CoreUnderTest, message: EngineRequest) -> Sequence:
    """One that waits; nothing of it has been looked up."""
    core.core.add(message)
    request = core.scheduler.lifecycle.requests[message.request_id]
    sequence = only_sequence(request)
    core.scheduler.abort([message.request_id])
    sequence.block_hashes = []
    return sequence


def begin_again(core: CoreUnderTest, sequence: Sequence) -> None:
    """It takes up its blocks from the cache."""
    num_computed = sequence.num_computed_tokens
    computed = core.manager.get_computed_blocks(sequence)
    assert core.manager.allocate_slots(sequence, num_computed - computed.num_tokens, computed)
    core.manager.take_moves_into(SchedulerOutput(step=1))


# ---------------------------------------------------------------------------------------------- swapping


def swap_times(length: int, repeats: int) -> dict[str, Times]:
    """What is decided and written down; the worker's part is in swap_and_recompute.py."""
    core = started_core([length], num_host_blocks=blocks_of(length))
    manager, request = core.manager, core.scheduler.running.requests[0]
    times: dict[str, Times] = {"swap or recompute?": [], "swap out": [], "swap in": [], "listing the moves": []}
    for _ in range(repeats):
        times["swap or recompute?"].append(microseconds(lambda: manager.estimates.what_would_be_lost(request)))
        times["swap out"].append(microseconds(lambda: manager.swap_out(request)))
        manager.take_moves_into(SchedulerOutput(step=1))
        manager.reset_prefix_cache()  # else nothing would have to move
        times["swap in"].append(microseconds(lambda: manager.swap_in(request)))
        times["listing the moves"].append(microseconds(partial(manager.take_moves_into, SchedulerOutput(step=1))))
        sequence = only_sequence(request)
        manager.name_granted(sequence, sequence.num_computed_tokens)
    return times


def block_copy_times(repeats: int) -> Times:
    """The worker's kernel on blocks that are in no cache of the processor."""
    num_blocks = 128
    caches = [torch.ones(num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=torch.bfloat16) for _ in range(CACHES)]
    order = iter(torch.randperm(num_blocks).view(-1, 1, 2).tolist())
    pairs = [torch.tensor(next(order)) for _ in range(repeats + 1)]
    copy_blocks(caches, pairs[0])
    return [microseconds(lambda pair=pair: copy_blocks(caches, pair)) for pair in pairs[1:]]


if __name__ == "__main__":
    main()
