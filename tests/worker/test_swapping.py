"""Steps that swap: the order in which memory changes, and what a worker says about its swap space."""

import numpy as np
import pytest
import torch

from quire.errors import CapacityError, EngineError, OptionError
from quire.messages import AdmittedSequence, SchedulerOutput, int_array
from quire.sampling_params import SamplingParams
from quire.testing.fake_model import FakeModel
from quire.testing.model_harness import worker_config
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker import kernels
from quire.worker.attention import attention_layers
from quire.worker.worker import Worker


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama")


def started(checkpoint, num_host_blocks=4, **options):
    worker = Worker(worker_config(checkpoint, **options))
    worker.load()
    layers = [layer.name for layer in worker.measure_capacity().layers]
    worker.initialize_cache([layers], 8, num_host_blocks)
    for tensor in worker._runner.cache.tensors:
        tensor.random_(100)  # bytes that are no NaN, whatever they are read as
    return worker


@pytest.fixture(params=["memory", "file"])
def worker(request, checkpoint, tmp_path):
    return started(checkpoint, swap_directory=None if request.param == "memory" else str(tmp_path))


def blocks(worker, block):
    return [tensor[block].clone() for tensor in worker._runner.cache.tensors]


def host_blocks(worker, block):
    return [tensor[block].clone() for tensor in worker._runner.cache.swap_arena.tensors]


def assert_equal(left, right):
    assert len(left) == len(right) > 0
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one, other)


def test_out_then_in_then_copy_then_write(worker):
    """All in one step, over one block: it leaves, another comes to its place, is copied, and the copy is written to."""
    worker.execute(SchedulerOutput(step=1, swapped_out=np.array([[6], [1]])))
    first, second = blocks(worker, 2), host_blocks(worker, 1)
    assert_equal(second, blocks(worker, 6))
    sequence = AdmittedSequence(
        row=0,
        sequence_id=0,
        token_ids=int_array([1, 2, 3, 4, 5, 6]),
        num_prompt_tokens=6,
        num_computed_tokens=5,
        sampling=SamplingParams(temperature=0.0),
        seed=0,
    )
    step = SchedulerOutput(
        step=2,
        admitted=[sequence],
        block_writes=np.array([(0, 0, 0, 7), (0, 0, 1, 3)]).T,
        swapped_out=np.array([[2], [0]]),
        swapped_in=np.array([[1], [2]]),
        block_copies=np.array([[2], [3]]),
        rows=int_array([0]),
        num_tokens=int_array([1]),
    )
    worker.execute(step)

    assert_equal(host_blocks(worker, 0), first)
    assert_equal(blocks(worker, 2), second)
    # Position 5 is place 1 of the copy. Block 2 still holds what was copied.
    for layer in attention_layers(worker._model).values():
        for cache in (layer.k_cache, layer.v_cache):
            assert torch.equal(cache[3][:, [0, 2, 3]], cache[2][:, [0, 2, 3]])
            assert not torch.equal(cache[3][:, 1], cache[2][:, 1])


def test_a_host_block_is_written_before_it_is_read(worker):
    """So one that is read in a step is free for the next step, not earlier."""
    before = blocks(worker, 5)
    worker.execute(SchedulerOutput(step=1, swapped_out=np.array([[5], [3]]), swapped_in=np.array([[3], [0]])))

    assert_equal(blocks(worker, 0), before)


def test_one_call_a_direction(worker, monkeypatch):
    calls = []
    move = kernels.move_blocks
    monkeypatch.setattr(kernels, "move_blocks", lambda *arguments: (calls.append(len(arguments[2])), move(*arguments)))
    worker.execute(SchedulerOutput(step=1))
    worker.execute(SchedulerOutput(step=2, swapped_out=np.array([[5, 1, 2], [3, 0, 1]])))
    worker.execute(SchedulerOutput(step=3, swapped_in=np.array([[3, 0], [7, 6]])))

    assert calls == [3, 2]


def test_a_host_block_that_does_not_exist_is_our_own_mistake(worker):
    with pytest.raises((RuntimeError, IndexError)):
        worker.execute(SchedulerOutput(step=1, swapped_out=np.array([[0], [4]])))


def test_swapping_is_measured_without_a_trace(worker):
    worker.execute(SchedulerOutput(step=1, swapped_out=np.array([[6], [1]])))
    device, host = [blocks(worker, i) for i in range(8)], [host_blocks(worker, i) for i in range(4)]

    assert 0.0 < worker.control("measure_swap", {}) < 0.05
    for i in range(8):
        assert_equal(blocks(worker, i), device[i])
    for i in range(4):
        assert_equal(host_blocks(worker, i), host[i])


def test_statistics_name_the_swap_space(worker, checkpoint):
    statistics = worker.statistics()

    assert statistics["swap_space_bytes"] == statistics["kv_cache_bytes"] / 2
    assert started(checkpoint, num_host_blocks=0).statistics()["swap_space_bytes"] == 0


def test_without_swap_space_nothing_is_measured(checkpoint):
    assert started(checkpoint, num_host_blocks=0).control("measure_swap", {}) == 0.0
    without_layers = Worker(worker_config("none"), model_loader=lambda config: FakeModel.random(8))
    without_layers.load()
    with pytest.raises(EngineError, match="initialize_cache"):
        without_layers.control("measure_swap", {})
    without_layers.initialize_cache([], 5, 5)
    assert without_layers.control("measure_swap", {}) == 0.0


def test_a_folder_that_is_missing_is_named_before_anything_is_allocated(checkpoint, tmp_path):
    with pytest.raises(OptionError, match=r"swap_directory=.*missing"):
        started(checkpoint, swap_directory=str(tmp_path / "missing"))


def test_a_folder_that_is_too_small_is_named(checkpoint, tmp_path):
    with pytest.raises(CapacityError, match=r"swap_directory=.* swap space needs"):
        started(checkpoint, num_host_blocks=10**12, swap_directory=str(tmp_path))


def test_the_file_goes_with_the_worker(checkpoint, tmp_path):
    worker = started(checkpoint, swap_directory=str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    with open("/proc/self/maps") as maps:
        assert str(tmp_path) in maps.read()
    worker.shutdown()
    with open("/proc/self/maps") as maps:
        assert str(tmp_path) not in maps.read()
