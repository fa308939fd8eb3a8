"""A rank reads its own part of a weight, and leaves the rest of the file alone."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from quire.errors import ModelError
from quire.worker.layers import ColumnParallelLinear, LMHead, TensorParallelGroup, VocabEmbedding, tensor_parallel
from quire.worker.layers.packing import multiply
from quire.worker.layers.quantization import find_scheme
from quire.worker.weight_loading import load_weights

NUM_RANKS = 4
SHAPE = (2048, 4096)
# a fault brings some pages around it
SLACK = 1 << 20


class MappedWeight:
    """A checkpoint of one weight, which lies in a file."""

    def __init__(self, file):
        self.file = file
        self.weight = torch.from_file(str(file), shared=True, size=SHAPE[0] * SHAPE[1]).view(SHAPE)
        self.num_bytes = self.weight.nbytes

    def tensors(self):
        yield "layer.weight", self.weight

    @property
    def num_resident_bytes(self):
        """Of the file, in this process's memory."""
        maps = Path("/proc/self/smaps").read_text()
        (found,) = re.findall(rf"{re.escape(str(self.file))}\n(?:.*\n)*?Rss: +(\d+) kB", maps)
        return int(found) * 1024


@pytest.fixture
def file(tmp_path):
    torch.randn(SHAPE).numpy().tofile(tmp_path / "weight")
    return tmp_path / "weight"


def load(checkpoint, scheme=None, rank=1):
    model = nn.Module()
    with tensor_parallel(TensorParallelGroup(rank, NUM_RANKS)):
        model.layer = ColumnParallelLinear(SHAPE[1], SHAPE[0], bias=False)
    load_weights(model, checkpoint, scheme)
    return model


@pytest.mark.parametrize("scheme", [None, "int8"])
def test_a_rank_touches_its_own_rows_of_the_file(file, scheme):
    """Of its own columns this cannot be seen: a page is mapped together with those around it."""
    checkpoint = MappedWeight(file)
    load(checkpoint, scheme and find_scheme(scheme))
    assert 0 < checkpoint.num_resident_bytes <= checkpoint.num_bytes // NUM_RANKS + SLACK


def test_a_broken_number_is_found_by_the_rank_that_has_it(file):
    checkpoint = MappedWeight(file)
    checkpoint.weight[SHAPE[0] // 2, 7] = float("nan")
    load(checkpoint, rank=1)
    with pytest.raises(ModelError, match=r"layer\.weight: holds infinities or NaN"):
        load(checkpoint, rank=2)


class _Weights:
    num_bytes = 0

    def __init__(self, **weights):
        self.weights = weights

    def tensors(self):
        return ((f"{name}.weight", weight) for name, weight in self.weights.items())


@pytest.mark.parametrize("scheme", [None, "int8"])
@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_looks_at_its_own_rows_of_a_head_that_is_said_to_be_tied(rank, scheme):
    """The one that has no other rows keeps one weight. With codes both have two: an embedding stays as it is then, and
    must not depend on the number of ranks."""
    embedding = torch.randn(512, 64)
    head = embedding.clone()
    head[300] += 1.0
    model = nn.Module()
    with tensor_parallel(TensorParallelGroup(rank, 2)):
        model.embedding = VocabEmbedding(512, 64)
        model.head = LMHead(512, 64, tied_to=model.embedding)
    load_weights(model, _Weights(head=head, embedding=embedding), scheme and find_scheme(scheme))
    assert model.head.is_tied is (rank == 0 and scheme is None)
    own = slice(256 * rank, 256 * rank + 256)
    x = torch.randn(3, 64)
    found = multiply(x, model.head.weight, model.head.packed, None, 256)
    torch.testing.assert_close(found, x @ head[own].T, atol=0.4 if scheme else 1e-4, rtol=0)
    assert torch.equal(model.embedding._rows(torch.arange(256)), embedding[own])
