"""Swaps on a stream of their own: nothing waits for them but what needs their blocks, and that always does."""

import numpy as np
import pytest
from tests.support.recorded_lane import RecordedLane
from tests.support.worker_driver import WorkerDriver

from quire.engine_core.kv_cache_manager.groups import make_groups
from quire.state_layout import state_layout
from quire.testing.model_harness import worker_config
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker.copy_lane import CopiesUnderWay
from quire.worker.platforms.cpu import CpuPlatform
from quire.worker.worker import Worker

NUM_BLOCKS = 120
PROMPTS = {0: list(range(5, 25)), 1: list(range(60, 75)), 2: list(range(100, 130))}


@pytest.fixture(scope="module", params=["llama", "qwen3_next"])
def checkpoint(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / request.param, request.param)


def started(checkpoint, **options):
    worker = Worker(worker_config(checkpoint, **options))
    worker.load()
    capacity = worker.measure_capacity()
    groups, _ = make_groups(capacity.layers)
    names = [list(group.layer_names) for group in groups]
    states = state_layout(capacity.layers, names, 4)
    worker.initialize_cache(names, NUM_BLOCKS, NUM_BLOCKS)
    for tensor in worker._runner.cache.tensors:
        tensor.fill_(255)  # NaN: what is read too early is seen
    return WorkerDriver(
        worker,
        num_blocks=NUM_BLOCKS,
        num_host_blocks=NUM_BLOCKS,
        num_groups=len(groups),
        num_state_blocks=states.num_blocks if states else 0,
    )


def a_life(driver):
    """Two rows are swapped while others go on, one of them twice; the third takes the blocks that they leave."""
    for row in (0, 1):
        driver.admit(row, PROMPTS[row])
    driver.generate(3)
    driver.swap_out(0)
    driver.generate(2)
    driver.admit(2, PROMPTS[2])
    driver.generate(2)
    driver.swap_in(0)
    driver.swap_out(1)
    driver.generate(3)
    driver.swap_out(0)
    driver.swap_in(1)
    driver.generate(2)
    driver.swap_in(0)
    driver.fork(2, 5, len(driver.tokens[2]))
    driver.generate(3)
    return driver.tokens


def addresses(driver):
    cache = driver.worker._runner.cache
    return [tensor.data_ptr() for tensor in (*cache.tensors, *cache.swap_arena.tensors)]


def test_a_lane_that_is_as_late_as_can_be_changes_no_token(checkpoint, monkeypatch):
    expected = a_life(started(checkpoint))
    lane = RecordedLane()
    monkeypatch.setattr(CpuPlatform, "copy_lane", lambda platform: lane)
    driver = started(checkpoint)
    before = addresses(driver)
    assert a_life(driver) == expected
    assert addresses(driver) == before, "memory that copies know has moved"
    copies = driver.worker._runner.cache.copies
    waits = [number for event, number in lane.events if event == "wait"]
    # copies that nobody needed at once were computed beside, and each wait is for one that was asked for before it
    assert copies.num_beside > 0
    assert copies.num_waits == len(waits) > 0
    assert waits == sorted(set(waits))
    for number in waits:
        assert lane.events.index(("run", number)) < lane.events.index(("wait", number))


FORGOTTEN = {"that a step waits": "before_step", "what comes into tables": "came"}


@pytest.mark.parametrize("forgotten", FORGOTTEN)
def test_steps_that_do_not_wait_would_be_wrong(checkpoint, monkeypatch, forgotten):
    """The stand-in notices it."""
    expected = a_life(started(checkpoint))
    monkeypatch.setattr(CpuPlatform, "copy_lane", lambda platform: RecordedLane())
    monkeypatch.setattr(CopiesUnderWay, FORGOTTEN[forgotten], lambda *arguments: None)
    driver = started(checkpoint)
    try:
        found = a_life(driver)
    except Exception:  # what was never copied is NaN, which the sampler refuses
        return
    assert found != expected


def test_a_step_looks_at_no_table(checkpoint, monkeypatch):
    """What it costs to know whether to wait is what came into tables, whatever stands in them."""
    looked_up = []

    class Numbers(np.ndarray):
        def __getitem__(self, blocks):
            looked_up.append(np.size(blocks))
            return super().__getitem__(blocks).view(np.ndarray)

    monkeypatch.setattr(CpuPlatform, "copy_lane", lambda platform: RecordedLane())
    driver = started(checkpoint)
    copies = driver.worker._runner.cache.copies
    copies._copy_of_block = copies._copy_of_block.view(Numbers)
    num_written = []
    step = driver.worker._runner.step

    def counted(scheduled):
        num_written.append(scheduled.block_writes.shape[1] + scheduled.block_copies.size)
        return step(scheduled)

    monkeypatch.setattr(driver.worker._runner, "step", counted)
    a_life(driver)
    assert 0 < sum(looked_up) <= sum(num_written)


def three_copies():
    """Of blocks 1 and 2, 3, and 4."""
    copies = CopiesUnderWay(RecordedLane(), 10)
    done = []
    for number, blocks in enumerate(([1, 2], [3], [4])):
        copies.run(lambda number=number: done.append(number), np.array(blocks))
    return copies, done


def test_what_is_needed_is_waited_for_and_what_came_before_it():
    copies, done = three_copies()
    assert copies
    copies.before_use(np.array([7, 8, 9, 0]))
    assert done == []
    copies.before_use(np.array([7, 3, 9, 0]))
    assert done == [0, 1]
    copies.before_use(np.array([1, 2, 3]))
    assert done == [0, 1]
    copies.before_use(np.array([4]))
    assert done == [0, 1, 2]
    assert not copies
    assert (copies.num_beside, copies.num_waits) == (2, 2)


def test_rows_wait_for_the_last_copy_of_what_came_to_them():
    copies, done = three_copies()
    copies.came(np.array([0, 5, 5, 6]), np.array([7, 1, 8, 4]))
    copies.came(np.array([5]), np.array([9]))
    copies.forked(6, 2)
    copies.before_step(np.array([0, 1]))
    assert done == []
    copies.before_step(np.array([0, 5]))
    assert done == [0]
    copies.before_step(np.array([0, 5]))
    assert done == [0]
    copies.forked(0, 6)  # its row is another's by now
    copies.before_step(np.array([6]))
    assert done == [0]
    copies.before_step(np.array([2]))
    assert done == [0, 1, 2]
    assert (copies.num_beside, copies.num_waits) == (3, 2)


def test_without_a_lane_copies_are_made_at_once():
    copies = CopiesUnderWay()
    done = []
    copies.run(lambda: done.append(1), np.array([1]))
    assert done == [1]
    assert not copies
