"""Arrays to a device and back. The path of other devices is taken here through torch's own CPU tensors."""

import numpy as np
import torch

from quire.worker.lazy_memory import lazy_zeros
from quire.worker.staging import to_device, to_host


def test_on_a_cpu_memory_is_shared():
    array = np.arange(6).reshape(2, 3)
    (tensor,) = to_device([array], torch.device("cpu"))
    tensor[0, 0] = 9

    assert array[0, 0] == 9
    assert to_host([tensor])[0][0, 0] == 9


def test_results_of_all_types_travel_as_one_vector(monkeypatch):
    class Elsewhere:
        type = "cuda"

    tensors = [
        torch.tensor([2**52, -1]),
        torch.tensor([[1.1, float("nan")], [float("-inf"), 0.0]]),
        torch.empty(0, dtype=torch.int32),
        torch.tensor([True, False]),
    ]
    monkeypatch.setattr(torch.Tensor, "device", Elsewhere())
    arrays = to_host(tensors)
    monkeypatch.undo()

    for tensor, array in zip(tensors, arrays, strict=True):
        assert array.dtype == tensor.numpy().dtype
        np.testing.assert_array_equal(array, tensor.numpy())


def test_lazy_memory_is_zero_and_writable():
    for shape in ((0,), (3, 0), (5, 7), (1 << 21,)):
        array = lazy_zeros(shape, np.int32, use_huge_pages=True)
        assert array.shape == shape
        assert not array.any()
        array[...] = 1
        assert array.all()
