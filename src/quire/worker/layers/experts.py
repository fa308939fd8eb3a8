"""A feed-forward layer of many experts, of which each token asks a few.

    x [T, H] --- gate ---> logits [T, X] --- route ---> weights, ids [T, K]
      |                                                       |
      +-- gate_up of its K experts --> act --> down --> weighted sum --- + ---> [T, H]
      |                                                                  |
      +-- shared expert, for every token (may be absent; may be weighed by a gate of its own)

An expert is two linear layers with the names that checkpoints use, so that loading, quantising and packing treat it as
any other. Owns the order of the operations; which rows meet which weight is a kernel's business (`grouped_linear`).

Ranks share each expert as they share any layer, or with expert parallelism keep some experts whole. Either way each
rank knows all tokens, because attention has summed them up for all, and outputs are summed once. To send tokens to the
ranks of their experts and back (all-to-all) would be two exchanges instead of one; it pays where ranks have tokens of
their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker import kernels
from quire.worker.forward_context import padding_of_step
from quire.worker.layers.activation import GatedActivation
from quire.worker.layers.activation import activation as activation_of
from quire.worker.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from quire.worker.layers.ranks import current_group, tensor_parallel
from quire.worker.layers.tensor_parallel import TensorParallelGroup

# of a layer; a larger number comes from a config.json that is broken
MOST_EXPERTS = 4096
# each is a line of /metrics
MOST_STATISTICS = 1024


@dataclass(frozen=True)
class Routing:
    """Who computes a token (`kernels/reference/route_tokens.py` says what each field means)."""

    top_k: int
    is_sigmoid: bool = False
    is_normalised: bool = True
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0

    def fits(self, num_experts: int) -> bool:
        """Whether a kernel can choose so; it refuses a step otherwise, and with it all requests."""
        if not 1 <= self.top_groups <= self.num_groups or num_experts % self.num_groups:
            return False
        return num_experts // self.num_groups * self.top_groups >= self.top_k


class Gate(ReplicatedLinear):
    """Scores of experts. Its weight is never quantised: it is small, and an error sends a token elsewhere."""

    is_kept_as_float = True


class Router(Gate):
    """A score for each expert."""

    def __init__(self, hidden_size: int, num_experts: int, *, bias: bool = False, has_correction: bool = False) -> None:
        """`has_correction`: a bias of the choice alone, in float32, which checkpoints call e_score_correction_bias."""
        super().__init__(hidden_size, num_experts, bias=bias)
        self.e_score_correction_bias: nn.Parameter | None = None
        if has_correction:
            self.e_score_correction_bias = nn.Parameter(
                torch.empty(num_experts, dtype=torch.float32), requires_grad=False
            )


class Expert(nn.Module):
    """One feed-forward layer. Computed by `Experts`, never by itself."""

    def __init__(self, hidden_size: int, inner_size: int, *, bias: bool, has_gate: bool = True) -> None:
        super().__init__()
        if has_gate:
            self.gate_up_proj = MergedColumnParallelLinear(hidden_size, [inner_size, inner_size], bias=bias)
        else:
            self.up_proj = ColumnParallelLinear(hidden_size, inner_size, bias=bias)
        self.down_proj = RowParallelLinear(inner_size, hidden_size, bias=bias)
        self.has_gate = has_gate
        self.first.is_grouped = True
        self.down_proj.is_grouped = True

    @property
    def first(self) -> ReplicatedLinear:
        """What its input meets."""
        return self.gate_up_proj if self.has_gate else self.up_proj


class Experts(nn.Module):
    """The layer: `gate` and `experts`, as in checkpoints; beside them `shared_expert`, if there is one."""

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        num_experts: int,
        routing: Routing,
        activation: str | nn.Module,
        *,
        bias: bool = False,
        has_correction: bool = False,
        shared: nn.Module | None = None,
        has_shared_gate: bool = False,
        has_gate: bool = True,
        expert_width: int | None = None,
    ) -> None:
        """`activation`: the name of that of the gate, or a module from [gate | up] to their product. `bias`: of the
        router and of all experts. `shared`: a feed-forward layer that computes every token, weighed by the sigmoid of a
        score of its own if `has_shared_gate`. Experts without a gate have two matrices each, and their `activation` is
        that between them. `expert_width`: of their inputs and outputs, where these are not hidden states."""
        super().__init__()
        if not 1 <= routing.top_k <= num_experts <= MOST_EXPERTS:
            raise ModelError(
                f"config.json: {routing.top_k} of {num_experts} experts for a token: must be 1 to all, and all "
                f"at most {MOST_EXPERTS:,}. Take the config.json that belongs to the weights."
            )
        if not routing.fits(num_experts):
            raise ModelError(
                f"config.json: {routing.top_k} experts for a token from {routing.top_groups} of {routing.num_groups} "
                f"groups of {num_experts} experts: groups must have one size, and those that are chosen at least so "
                "many experts. Take the config.json that belongs to the weights."
            )
        self.group = current_group()
        self.num_experts = num_experts
        # of this rank
        self.own = _own_experts(self.group, num_experts)
        # of other ranks, by the names that they would have
        self.absent_modules = frozenset(f"experts.{number}" for number in range(num_experts) if number not in self.own)
        self.routing = routing
        self.gate = Router(hidden_size, num_experts, bias=bias, has_correction=has_correction)
        with tensor_parallel(TensorParallelGroup() if self.group.has_whole_experts else self.group):
            # a dictionary, because a list would begin with number 0
            self.experts = nn.ModuleDict(
                {
                    str(number): Expert(expert_width or hidden_size, inner_size, bias=bias, has_gate=has_gate)
                    for number in self.own
                }
            )
        self.act: Callable[[Tensor], Tensor]
        if isinstance(activation, nn.Module):
            self.act = activation
        else:
            self.act = GatedActivation(activation) if has_gate else activation_of(activation)
        # Tokens that each expert has computed, on whatever rank. No buffer: it belongs to a run, and to no file.
        self.num_tokens_X = torch.zeros(num_experts, dtype=torch.int64)
        self.shared_expert = shared
        self.shared_expert_gate = Gate(hidden_size, 1, bias=False) if has_shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        out = self._routed(x)
        if self.shared_expert is None:
            return out
        shared: Tensor = self.shared_expert(x)
        if self.shared_expert_gate is not None:
            # a choice of one among one, not normalised: its weight is the sigmoid
            weights, _ = kernels.route_tokens(
                self.shared_expert_gate(x), None, top_k=1, is_sigmoid=True, is_normalised=False
            )
            shared = kernels.weigh_experts(shared.unsqueeze(1), weights)
        return out + shared

    def _routed(self, x: Tensor) -> Tensor:
        weights, ids = self._route(x)
        out = kernels.weigh_experts(self._outputs(x, ids), weights)
        return out if self.group.size == 1 else self.group.all_reduce(out)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(weights, ids) of each token's experts."""
        routing = self.routing
        weights, ids = kernels.route_tokens(
            self.gate(x),
            self.gate.e_score_correction_bias,
            top_k=routing.top_k,
            is_sigmoid=routing.is_sigmoid,
            is_normalised=routing.is_normalised,
            num_groups=routing.num_groups,
            top_groups=routing.top_groups,
            scale=routing.scale,
        )
        is_padding_T = padding_of_step()
        # a token that is nobody's meets no expert, and is counted by none
        return weights, ids if is_padding_T is None else ids.masked_fill(is_padding_T[:, None], -1)

    def _outputs(self, x: Tensor, ids: Tensor) -> Tensor:
        """[T, K, H]: what each of a token's experts makes of it."""
        experts = list(self.experts.values())
        first = [expert.first for expert in experts]
        inner = self.act(_products(x, ids, first, self.own.start, counts_X=self.num_tokens_X))
        # what all ranks sum gets its bias from one of them
        has_bias = self.group.has_whole_experts or self.group.rank == 0
        return _products(inner, ids, [expert.down_proj for expert in experts], self.own.start, has_bias=has_bias)

    def extra_repr(self) -> str:
        return f"{len(self.own)} of {self.num_experts} experts, {self.routing.top_k} for a token"


def _own_experts(group: TensorParallelGroup, num_experts: int) -> range:
    if not group.has_whole_experts:
        return range(num_experts)
    if num_experts < group.size:
        raise ModelError(
            f"enable_expert_parallel: {group.size} workers cannot share {num_experts} experts. Take fewer workers, or "
            "leave it out."
        )
    return group.range_of(num_experts)


def expert_tokens(model: nn.Module) -> dict[str, int]:
    """Statistics `expert_LAYER_NUMBER_tokens_total`; where they would be too many, sums over layers (LAYER: `all`)."""
    layers = _by_number(model)
    if sum(layer.num_experts for layer in layers.values()) <= MOST_STATISTICS:
        counts = {str(number): layer.num_tokens_X.tolist() for number, layer in layers.items()}
    else:
        most = max(layer.num_experts for layer in layers.values())
        total = torch.zeros(most, dtype=torch.int64)
        for layer in layers.values():
            total[: layer.num_experts] += layer.num_tokens_X.cpu()
        counts = {"all": total.tolist()}
    return {
        f"expert_{layer}_{expert}_tokens_total": count
        for layer, of_layer in counts.items()
        for expert, count in enumerate(of_layer)
    }


def forget_expert_tokens(model: nn.Module) -> None:
    """What was computed to measure is nobody's token."""
    for layer in _by_number(model).values():
        layer.num_tokens_X.zero_()


def _by_number(model: nn.Module) -> dict[int, Experts]:
    """By the number of the layer that each is a part of, which stands in its name."""
    found: dict[int, Experts] = {}
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            number = next((int(part) for part in name.split(".") if part.isdigit()), len(found))
            found[number] = module
    return found


def _products(
    x: Tensor,
    ids_TK: Tensor,
    layers: list[ReplicatedLinear],
    first: int,
    *,
    has_bias: bool = True,
    counts_X: Tensor | None = None,
) -> Tensor:
    """[T, K, outputs] of the layers that each token asks, zeros where they are elsewhere; `first` and `counts` as in
    the kernel."""
    num_rows = layers[0].out_features
    biases = [layer.bias for layer in layers if has_bias and layer.bias is not None]
    packed = [layer.packed for layer in layers if layer.packed is not None]
    if len(packed) == len(layers):
        return kernels.grouped_linear(x, ids_TK, packed, biases, num_rows, counts_X, first)
    # weights as they were loaded: a device without kernels of Quire's
    num_tokens, top_k = ids_TK.shape
    rows = x.unsqueeze(1).expand(num_tokens, top_k, x.shape[-1]) if x.ndim == 2 else x
    out = x.new_zeros((num_tokens, top_k, num_rows))
    for expert in ids_TK.unique().tolist():
        of_expert = ids_TK == expert
        if counts_X is not None:
            counts_X[expert] += of_expert.sum()
        number = expert - first
        if 0 <= number < len(layers):
            out[of_expert] = F.linear(rows[of_expert], layers[number].weight, biases[number] if biases else None)
    return out
