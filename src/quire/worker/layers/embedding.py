"""Token embedding and language-model head, whole on every rank: tensor parallelism shares the linear layers alone."""

from __future__ import annotations

from torch import Tensor, nn

from quire.worker import kernels
from quire.worker.layers.packing import multiply, pack, pack_quantized
from quire.worker.layers.parameter import make_parameter, take_quantized


class VocabEmbedding(nn.Module):
    """One row a token. Also learned positions: a row a position.

    Where a head is tied to it and packs the weight, the rows are read from there: nothing is kept twice.
    """

    def __init__(self, num_rows: int, size: int) -> None:
        super().__init__()
        self.num_rows, self.size = num_rows, size
        self.weight = make_parameter(num_rows, size)
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
        if self.packed is None:
            return kernels.look_up(self.weight, ids)
        return kernels.packed_rows(self.packed, ids, self.weight.dtype, self.size)


class LMHead(nn.Module):
    """Hidden states to logits. Tied to an embedding it has no weight of its own in the checkpoint.

    A row of a packed weight lies scattered over as many cache lines as it has words, so an embedding costs some
    microseconds a token more than from rows in their order. A second copy would cost 297 MiB for 151,936 x 1,024 in
    bfloat16.
    """

    def __init__(
        self, vocab_size: int, size: int, *, tied_to: VocabEmbedding | None = None, bias: bool = False
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.weight = make_parameter(vocab_size, size) if tied_to is None else tied_to.weight
        self.bias = make_parameter(vocab_size) if bias else None
        self.packed: Tensor | None
        self.register_buffer("packed", None, persistent=False)
        self._tied_to = (tied_to,)  # in a tuple, because it is no part of this module

    def pack_weights(self) -> None:
        """After loading, once."""
        if self.packed is None and (packed := pack(self.weight)) is not None:
            self.packed = packed
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)
            (embedding,) = self._tied_to
            if embedding is not None:
                embedding.replace_by(packed)

    def forward(self, hidden_NE: Tensor) -> Tensor:
        return multiply(hidden_NE, self.weight, self.packed, self.bias, self.vocab_size)
