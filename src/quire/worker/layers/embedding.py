"""Token embedding and language-model head: the vocabulary is shared out over the ranks, as evenly as it can be."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quire.worker import kernels
from quire.worker.layers.packing import multiply, pack, pack_quantized
from quire.worker.layers.parameter import Part, PickShard, make_parameter, take_quantized
from quire.worker.layers.ranks import current_group
from quire.worker.layers.tensor_parallel import TensorParallelGroup


class Embedding(nn.Module):
    """A row a number, whole on every rank: learned positions."""

    def __init__(self, num_rows: int, size: int) -> None:
        super().__init__()
        self.num_rows, self.size = num_rows, size
        self._create(num_rows, None)

    def _create(self, num_rows: int, pick: PickShard | None) -> None:
        self.weight = make_parameter(num_rows, self.size, pick=pick)
        self.packed: Tensor | None
        self.register_buffer("packed", None, persistent=False)

    def pack_weights(self) -> None:
        """Codes alone: rows of floats are read fastest as they are."""
        if (quantized := take_quantized(self.weight)) is not None:
            self.replace_by(pack_quantized(quantized))

    def replace_by(self, packed: Tensor) -> None:
        """Read from the packed weight from now on; the parameter stays as an empty tensor that tells the type."""
        self.packed = packed
        self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self._rows(ids)

    def _rows(self, ids: Tensor, first: int | None = None) -> Tensor:
        if self.packed is None:
            return kernels.look_up(self.weight, ids, first)
        return kernels.packed_rows(self.packed, ids, self.weight.dtype, self.size, first)


class VocabEmbedding(Embedding):
    """A row a token. Each rank keeps some of the rows; those of the others are zeros to it, and the sum has all.

    Where a head is tied to it and packs the weight, the rows are read from there: nothing is kept twice.
    """

    def __init__(self, num_rows: int, size: int) -> None:
        nn.Module.__init__(self)
        self.num_rows, self.size = num_rows, size
        self.group = current_group()
        self.own = self.group.range_of(num_rows)
        self._create(len(self.own), _rows_of(self.group, num_rows))

    def forward(self, ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return self._rows(ids)
        return self.group.all_reduce(self._rows(ids, self.own.start))


class LMHead(nn.Module):
    """Hidden states to logits. Tied to an embedding it has no weight of its own in the checkpoint.

    Each rank computes the logits of its part of the vocabulary, and gets those of the others.

    A row of a packed weight lies scattered over as many cache lines as it has words, so an embedding costs some
    microseconds a token more than from rows in their order. A second copy would cost 297 MiB for 151,936 x 1,024 in
    bfloat16.
    """

    def __init__(
        self, vocab_size: int, size: int, *, tied_to: VocabEmbedding | None = None, bias: bool = False
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.group = current_group()
        pick = _rows_of(self.group, vocab_size)
        self._num_own = len(self.group.range_of(vocab_size))
        self.weight = make_parameter(self._num_own, size, pick=pick) if tied_to is None else tied_to.weight
        self.bias = make_parameter(self._num_own, pick=pick) if bias else None
        self.packed: Tensor | None
        self.register_buffer("packed", None, persistent=False)
        self._tied_to = (tied_to,)  # in a tuple, because it is no part of this module

    @property
    def is_tied(self) -> bool:
        """Whether its numbers are the embedding's, which the checkpoint decides in the end: see `weight_loading`."""
        (embedding,) = self._tied_to
        if embedding is None:
            return False
        return self.weight is embedding.weight or _start_of(self) == _start_of(embedding) != 0

    def pack_weights(self) -> None:
        """After loading, once."""
        (embedding,) = self._tied_to
        is_tied = self.is_tied
        if self.packed is None and (packed := pack(self.weight)) is not None:
            self.packed = packed
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)
            if embedding is not None and is_tied:
                embedding.replace_by(packed)

    def forward(self, hidden_NE: Tensor) -> Tensor:
        own = multiply(hidden_NE, self.weight, self.packed, self.bias, self._num_own)
        return self.group.all_gather(own, self.vocab_size)


def _start_of(module: Embedding | LMHead) -> int:
    numbers: Tensor = module.weight if module.packed is None else module.packed
    return numbers.data_ptr()


def _rows_of(group: TensorParallelGroup, num_rows: int) -> PickShard:
    """This rank's rows of what the checkpoint has for so many. Others than so many stay whole, and are refused."""

    def pick(whole: Tensor, tensor: Any, part: Part) -> tuple[Tensor, Any]:
        own = group.range_of(num_rows)
        return whole, tensor.narrow(0, own.start, len(own)) if tensor.shape[0] == num_rows else tensor

    return pick
