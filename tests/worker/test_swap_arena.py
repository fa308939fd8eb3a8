"""Swap space: what comes back is what left, bit by bit, whatever kind of memory the blocks stayed in."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.errors import CapacityError, OptionError
from quire.worker import host_memory as host_memory_module
from quire.worker.host_memory import FileMemory, OrdinaryMemory, PinnedMemory, host_memory
from quire.worker.swap_arena import SwapArena

NO_PAIRS = np.empty((2, 0), dtype=np.int64)
SHAPES = [
    [((2, 4, 8), torch.float32)] * 4,
    [((2, 1, 5), torch.bfloat16), ((2, 1, 3), torch.bfloat16)] * 3,
    [((3, 16, 80), torch.float16), ((1, 16, 64), torch.float32)],
]


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def device_tensors(shapes, num_blocks=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(num_blocks, *shape, generator=generator).to(dtype) for shape, dtype in shapes]
    tensors[0][3].fill_(torch.nan)
    return tensors


@pytest.fixture(params=["memory", "file"])
def memory(request, tmp_path):
    return OrdinaryMemory() if request.param == "memory" else FileMemory(str(tmp_path))


@pytest.mark.parametrize("shapes", SHAPES, ids=["float32", "odd", "mixed"])
def test_out_and_back_to_other_blocks(memory, shapes):
    tensors = device_tensors(shapes)
    before = [tensor.clone() for tensor in tensors]
    arena = SwapArena(tensors, 5, memory)
    arena.swap_out(np.array([[3, 8, 0], [4, 0, 2]]))
    for tensor in tensors:
        tensor.fill_(-1.0)
    arena.swap_in(np.array([[2, 4], [7, 1]]))
    arena.swap_in(np.array([[0], [3]]))

    for old, new in zip(before, tensors, strict=True):
        for left, returned in ((0, 7), (3, 1), (8, 3)):
            assert torch.equal(bits(new[returned]), bits(old[left]))
        assert (new[[0, 2, 4, 5, 6, 8]] == -1.0).all()


def test_many_random_moves(memory):
    """Against two dictionaries."""
    chance = random.Random(3)
    tensors = device_tensors(SHAPES[1], num_blocks=20)
    arena = SwapArena(tensors, 12, memory)
    device = {block: [tensor[block].clone() for tensor in tensors] for block in range(20)}
    host = {}
    for _ in range(200):
        count = chance.randrange(1, 7)
        blocks = chance.sample(range(20), count)
        if chance.random() < 0.5 or len(host) < count:
            places = chance.sample(range(12), count)
            arena.swap_out(np.array([blocks, places]))
            host |= {place: device[block] for block, place in zip(blocks, places, strict=True)}
        else:
            places = chance.sample(sorted(host), count)
            arena.swap_in(np.array([places, blocks]))
            device |= {block: host[place] for block, place in zip(blocks, places, strict=True)}
    for block, parts in device.items():
        for tensor, part in zip(tensors, parts, strict=True):
            assert torch.equal(bits(tensor[block]), bits(part))


def test_a_block_lies_in_one_piece():
    arena = SwapArena(device_tensors(SHAPES[2]), 5, OrdinaryMemory())
    starts = [part[2].data_ptr() - arena.tensors[0][2].data_ptr() for part in arena.tensors]

    assert starts == [0, 3 * 16 * 80 * 2]
    assert arena.block_bytes == 3 * 16 * 80 * 2 + 16 * 64 * 4
    assert arena.num_bytes == 5 * arena.block_bytes
    assert arena.tensors[1][3].data_ptr() - arena.tensors[1][2].data_ptr() == arena.block_bytes


def test_nothing_of_everything(memory):
    for tensors, num_blocks in (([], 0), ([], 7), (device_tensors(SHAPES[0]), 0), ([torch.empty(0, 2, 4, 8)], 0)):
        arena = SwapArena(tensors, num_blocks, memory)
        arena.swap_out(NO_PAIRS)
        arena.swap_in(NO_PAIRS)

        assert arena.num_bytes == 0
        assert arena.measure(lambda: None) == 0.0


def test_room_on_the_host_without_blocks_on_the_device(memory):
    assert SwapArena([torch.empty(0, 2, 4, 8)], 3, memory).measure(lambda: None) == 0.0


@pytest.mark.parametrize("num_blocks", [1, 4, 100])
def test_measuring_changes_nothing(memory, num_blocks):
    tensors = device_tensors(SHAPES[2])
    before = [tensor.clone() for tensor in tensors]
    arena = SwapArena(tensors, num_blocks, memory)
    arena.swap_out(np.array([[3], [0]]))
    waits = []
    seconds = arena.measure(lambda: waits.append(1))
    arena.swap_in(np.array([[0], [5]]))

    assert 0.0 < seconds < 0.05
    assert waits
    for old, new in zip(before, tensors, strict=True):
        assert torch.equal(bits(new[[0, 1, 2, 3, 4, 6, 7, 8]]), bits(old[[0, 1, 2, 3, 4, 6, 7, 8]]))
        assert torch.equal(bits(new[5]), bits(old[3]))


def test_measuring_moves_little_of_a_large_model():
    """Blocks of 20 MiB: one is enough."""
    arena = SwapArena([torch.zeros(3, 1, 1, 5 << 20)], 3, OrdinaryMemory())
    assert arena._num_measured() == 1


# ---------------------------------------------------------------------------------------------- homes


def test_a_folder_comes_before_memory(tmp_path):
    assert isinstance(host_memory("cpu", None), OrdinaryMemory)
    assert isinstance(host_memory("cuda", None), PinnedMemory)
    assert isinstance(host_memory("cuda", str(tmp_path)), FileMemory)


def test_a_quarter_of_the_free_memory_may_be_taken(monkeypatch):
    report = type("Report", (), {"free_bytes": 1000})()
    monkeypatch.setattr(host_memory_module, "process_memory", lambda: report)

    assert OrdinaryMemory().free_bytes() == PinnedMemory().free_bytes() == 250


def test_the_file_has_no_name_and_is_reserved_in_full(tmp_path, monkeypatch):
    reserved, reserve = [], os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda file, *range_: (reserved.append(range_), reserve(file, *range_)))
    tensor = FileMemory(str(tmp_path)).allocate(5_000_000)
    tensor.fill_(1)

    assert list(tmp_path.iterdir()) == []
    assert reserved == [(0, 5_000_000)]
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    del tensor
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_folder_without_room_is_refused(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1 << 20})()
    monkeypatch.setattr(host_memory_module.shutil, "disk_usage", lambda path: usage)
    memory = FileMemory(str(tmp_path))

    assert memory.free_bytes() == 1 << 20
    with pytest.raises(CapacityError, match=r"needs 0\.50 GiB there, 1\.00 MiB is free\. Lower swap_space"):
        memory.allocate(1 << 29)


def test_a_disk_that_turns_out_full_is_refused(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(host_memory_module.os, "posix_fallocate", full)
    with pytest.raises(CapacityError, match="Lower swap_space"):
        FileMemory(str(tmp_path)).allocate(1000)


def test_a_missing_folder_is_refused(tmp_path):
    memory = FileMemory(str(tmp_path / "missing"))
    for use in (memory.free_bytes, lambda: memory.allocate(1000)):
        with pytest.raises(OptionError, match=r"must be a folder that this program may write into.*No such file"):
            use()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    def refused(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(host_memory_module.tempfile, "TemporaryFile", refused)
    with pytest.raises(OptionError, match="Permission denied"):
        FileMemory(str(tmp_path)).allocate(1000)


def test_memory_that_cannot_be_had_is_refused():
    with pytest.raises(CapacityError, match=r"swap space: .* GiB of host memory could not be allocated"):
        OrdinaryMemory().allocate(1 << 60)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_out_and_back_on_a_gpu():
    tensors = [tensor.cuda() for tensor in device_tensors(SHAPES[2])]
    before = [tensor.cpu() for tensor in tensors]
    arena = SwapArena(tensors, 5, PinnedMemory())
    assert all(part.is_pinned() for part in arena.tensors)
    arena.swap_out(np.array([[3, 8, 0], [4, 0, 2]]))
    for tensor in tensors:
        tensor.zero_()
    arena.swap_in(np.array([[2, 4, 0], [7, 1, 3]]))

    for old, new in zip(before, tensors, strict=True):
        for left, returned in ((0, 7), (3, 1), (8, 3)):
            assert torch.equal(bits(new[returned].cpu()), bits(old[left]))
    assert 0.0 < arena.measure(torch.cuda.synchronize) < 0.05
