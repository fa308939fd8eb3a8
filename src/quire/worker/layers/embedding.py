"""Token embedding and language-model head, whole on every rank: tensor parallelism shares the linear layers alone."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from quire.worker.layers.packing import PackedWeight, multiply, pack
from quire.worker.layers.parameter import make_parameter


class VocabEmbedding(nn.Module):
    """One row a token. Also learned positions: a row a position."""

    def __init__(self, num_rows: int, size: int) -> None:
        super().__init__()
        self.weight = make_parameter(num_rows, size)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class LMHead(nn.Module):
    """Hidden states to logits. Tied to an embedding it has no weight of its own in the checkpoint.

    A tied head packs a copy and leaves the embedding readable, which costs its size once more: 297 MiB for 151,936 x
    1,024 in bfloat16. It is worth it: the head is a third of the bytes that a decode step of such a small model reads,
    and the copy takes it from 28.5 to 17.5 ms (1 row; 4 rows: 31 to 15, 16 rows: 47 to 29; CPU time of 1 thread).
    Large models, where memory is short, have small shares of vocabulary and mostly untied heads.
    """

    def __init__(
        self, vocab_size: int, size: int, *, tied_to: VocabEmbedding | None = None, bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = make_parameter(vocab_size, size) if tied_to is None else tied_to.weight
        self.bias = make_parameter(vocab_size) if bias else None
        self.packed: PackedWeight | None = None

    def pack_weights(self) -> None:
        """After loading, once."""
        if self.packed is None and (packed := pack(self.weight.data)) is not None:
            self.packed = packed
            # The parameter of a tied head belongs to the embedding; here only the reference goes.
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def forward(self, hidden_NE: Tensor) -> Tensor:
        return multiply(hidden_NE, self.weight, self.packed, self.bias)
