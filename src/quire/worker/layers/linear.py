"""Linear layers, and all the parallelism that a model has (4.3.1): drop-in for nn.Linear, each rank owns a piece.

ReplicatedLinear              every rank holds the whole weight
ColumnParallelLinear          rows of the weight are shared out: each rank computes a part of the output
MergedColumnParallelLinear    several of them side by side in one multiplication (gate and up)
QKVParallelLinear             the same for query, key and value, shared out by heads
RowParallelLinear             columns of the weight are shared out: each rank has a part of the input; a sum follows

Weights are [out, in] as in the checkpoint until `pack_weights` replaces them by a packed copy (`packing.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.worker.layers.adapters import NO_ADAPTERS, Adds
from quire.worker.layers.packing import multiply, pack
from quire.worker.layers.parameter import Part, make_parameter
from quire.worker.layers.ranks import current_group


class ReplicatedLinear(nn.Module):
    """y = x @ weight.T + bias, whole on every rank."""

    # what some rows get added (LoRA); a layer that takes adapters has slots of its own here
    adapters: Adds = NO_ADAPTERS
    # whether its weight meets a batch together with others (`grouped_linear`), never by itself
    is_grouped = False

    @property
    def part_sizes(self) -> list[int]:
        """Outputs of this rank, of each layer that this one is merged of."""
        return [self.out_features]

    @property
    def whole_part_sizes(self) -> list[int]:
        """The same of all ranks together."""
        return self.part_sizes

    @property
    def whole_in_features(self) -> int:
        return self.in_features

    def outputs_of(self, tensor: Tensor, index: int = 0) -> Tensor:
        """This rank's rows of a tensor that has one for each output of part `index`."""
        return tensor

    def inputs_of(self, tensor: Tensor) -> Tensor:
        """This rank's columns of a tensor that has one for each input."""
        return tensor

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True) -> None:
        super().__init__()
        self.group = current_group()
        self.in_features = in_features
        self.out_features = out_features
        self._create(out_features, in_features, bias)

    def _create(self, num_rows: int, num_columns: int, bias: bool, parts: tuple[Part, ...] = (None,)) -> None:
        self.weight = make_parameter(num_rows, num_columns, pick=self._pick, parts=parts)
        self.bias = make_parameter(num_rows, pick=self._pick_bias, parts=parts) if bias else None
        self.packed: Tensor | None
        self.register_buffer("packed", None, persistent=False)

    def _pick(self, whole: Tensor, tensor: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        """Where a tensor of the checkpoint goes, and the piece of it that this rank keeps."""
        return whole, tensor

    def _pick_bias(self, whole: Tensor, tensor: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        return self._pick(whole, tensor, part)

    def pack_weights(self) -> None:
        """Replace the weight by its packed copy, where there are kernels for it. After loading, once."""
        if self.packed is None and (packed := pack(self.weight, is_grouped=self.is_grouped)) is not None:
            self.packed = packed
            # The original goes at once: the peak is one weight, not one model.
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.adapters.add(multiply(x, self.weight, self.packed, self.bias, self.out_features), x)

    def extra_repr(self) -> str:
        share = f"{self.group.rank + 1} of {self.group.size}"
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}, share {share}"


class ColumnParallelLinear(ReplicatedLinear):
    """Each rank computes its share of the output features."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True) -> None:
        nn.Module.__init__(self)
        self.group = current_group()
        self.in_features = in_features
        self.out_features = self.group.share_of(out_features, "out_features")
        self._create(self.out_features, in_features, bias)

    @property
    def whole_part_sizes(self) -> list[int]:
        return [size * self.group.size for size in self.part_sizes]

    def outputs_of(self, tensor: Tensor, index: int = 0) -> Tensor:
        return self.group.slice_of(tensor, 0)

    def _pick(self, whole: Tensor, tensor: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        return whole, self.outputs_of(tensor)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel layers with the same input as one; part i of the checkpoint is layer i."""

    def __init__(self, in_features: int, out_features: list[int], *, bias: bool = True) -> None:
        nn.Module.__init__(self)
        self.group = current_group()
        self.in_features = in_features
        self.sizes = [self.group.share_of(size, "out_features") for size in out_features]
        self.out_features = sum(self.sizes)
        self._create(self.out_features, in_features, bias, tuple(range(len(self.sizes))))

    @property
    def part_sizes(self) -> list[int]:
        return self.sizes

    def _pick(self, whole: Tensor, tensor: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        assert isinstance(part, int), "a merged weight is loaded part by part"
        return whole.narrow(0, sum(self.sizes[:part]), self.sizes[part]), self.outputs_of(tensor, part)


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value of one attention layer as one; parts "q", "k", "v". Ranks own whole heads.

    With more ranks than key/value heads, each such head is kept by several ranks.
    """

    def __init__(
        self,
        in_features: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        bias: bool = True,
        parts: tuple[Part, ...] = ("q", "k", "v"),
        value_dim: int | None = None,
    ) -> None:
        """`parts`: those that there are, where a layer takes keys or values from elsewhere. `value_dim`: of a head's
        values, where it is not that of its keys."""
        nn.Module.__init__(self)
        self.group = current_group()
        self.in_features = in_features
        self.head_dim = head_dim
        self.parts = parts
        # of this rank, from here on
        self.num_heads = self.group.share_of(num_heads, "num_attention_heads")
        kv_shares = min(self.group.size, num_kv_heads)
        self.num_kv_heads = num_kv_heads // kv_shares
        # pieces that the ranks cut each part into
        self._shares = [self.group.size if part == "q" else kv_shares for part in parts]
        widths = {"q": self.num_heads * head_dim, "k": self.num_kv_heads * head_dim}
        widths["v"] = self.num_kv_heads * (head_dim if value_dim is None else value_dim)
        self.sizes = [widths[str(part)] for part in parts]
        self.out_features = sum(self.sizes)
        self._create(self.out_features, in_features, bias, parts)

    @property
    def part_sizes(self) -> list[int]:
        return self.sizes

    @property
    def whole_part_sizes(self) -> list[int]:
        return [size * shares for size, shares in zip(self.sizes, self._shares, strict=True)]

    def outputs_of(self, tensor: Tensor, index: int = 0) -> Tensor:
        shares = self._shares[index]
        return self.group.slice_of(tensor, 0, self.group.rank * shares // self.group.size, shares)

    def _pick(self, whole: Tensor, tensor: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        assert part in self.parts, "a merged weight is loaded part by part"
        index = self.parts.index(part)
        return whole.narrow(0, sum(self.sizes[:index]), self.sizes[index]), self.outputs_of(tensor, index)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value, or those parts that there are, heads flattened."""
        return super().forward(x).split(self.sizes, dim=-1)


class RowParallelLinear(ReplicatedLinear):
    """Each rank multiplies its share of the input features; the results are summed over the ranks."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True) -> None:
        nn.Module.__init__(self)
        self.group = current_group()
        self.in_features = self.group.share_of(in_features, "in_features")
        self.out_features = out_features
        self._create(out_features, self.in_features, bias)

    @property
    def whole_in_features(self) -> int:
        return self.in_features * self.group.size

    def inputs_of(self, tensor: Tensor) -> Tensor:
        return self.group.slice_of(tensor, 1)

    def _pick(self, whole: Tensor, tensor: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        return whole, self.inputs_of(tensor)

    def _pick_bias(self, whole: Tensor, tensor: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        return whole, tensor

    def forward(self, x: Tensor) -> Tensor:
        group = self.group
        if group.size == 1:
            product = multiply(x, self.weight, self.packed, self.bias, self.out_features, group.num_slices)
            return self.adapters.add(product, x)
        # the bias once, not once a rank
        part = multiply(x, self.weight, self.packed, None, self.out_features, group.num_slices, torch.float32)
        # what adapters make of this rank's inputs is a part of the same sum
        return group.all_reduce(self.adapters.add(part, x), self.bias, x.dtype)
