"""Numbers of the host come to a device copied, or stay where they are until it has read them."""

import numpy as np
import pytest
import torch

from quire.worker.arrival import Copied, ReadInPlace, arrival_for_one_kernel


class Device:
    """Does what it was asked for when it is told to; a mark is passed when all before it is done."""

    def __init__(self):
        self.num_marks = 0
        self.num_done = 0

    def mark(self):
        self.num_marks += 1
        return Mark(self, self.num_marks)


class Mark:
    def __init__(self, device, number):
        self.device, self.number = device, number

    def is_passed(self):
        return self.number <= self.device.num_done


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return Device()


ARRAYS = [np.arange(6).reshape(2, 3), np.arange(4, dtype=np.int32)]


def test_both_ways_bring_the_same_numbers(device):
    for way in (Copied(torch.device("cpu")), ReadInPlace(device.mark)):
        for tensor, array in zip(way.bring(ARRAYS), ARRAYS, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array)
            assert tensor.numpy().dtype == array.dtype
        way.end()


def test_memory_is_kept_until_the_device_has_read_it(device):
    way = ReadInPlace(device.mark)
    for _ in range(3):
        way.bring(ARRAYS)
        way.end()
    assert way.num_kept == 6, "nothing was read"
    device.num_done = 2
    way.bring(ARRAYS[:1])
    assert way.num_kept == 3, "the last of the three, and what was brought now"
    way.end()
    device.num_done = 4
    way.bring([])
    assert way.num_kept == 0


def test_a_step_without_numbers_leaves_no_mark(device):
    ReadInPlace(device.mark).end()
    assert device.num_marks == 0


def test_who_reads_in_place():
    assert isinstance(arrival_for_one_kernel(torch.device("cuda", 0)), ReadInPlace)
    assert isinstance(arrival_for_one_kernel(torch.device("cpu")), Copied)
