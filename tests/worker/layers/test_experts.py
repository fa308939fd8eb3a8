"""The layer of experts against those of Transformers."""

import pytest
import torch
from torch import nn

from quire.worker.layers import (
    Experts,
    GatedActivation,
    MergedColumnParallelLinear,
    Routing,
    RowParallelLinear,
    TensorParallelGroup,
    tensor_parallel,
)
from quire.worker.layers.stored_weight import StoredWeight
from quire.worker.model_loader import building
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap
from quire.worker.weight_loading import load_weights, pack_weights

WIDTH, INNER, NUM_EXPERTS = 64, 32, 8


class SharedMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(WIDTH, [2 * INNER, 2 * INNER], bias=False)
        self.act = GatedActivation("silu")
        self.down_proj = RowParallelLinear(2 * INNER, WIDTH, bias=False)

    def forward(self, x):
        return self.down_proj(self.act(self.gate_up_proj(x)))


def take(layer, theirs):
    """The weights of a layer of Transformers, packed."""
    with torch.no_grad():
        for number, expert in enumerate(layer.experts.values()):
            expert.gate_up_proj.weight.copy_(theirs.experts.gate_up_proj[number])
            expert.down_proj.weight.copy_(theirs.experts.down_proj[number])
        layer.gate.weight.copy_(theirs.gate.weight)
        shared = getattr(theirs, "shared_experts", None) or theirs.shared_expert
        layer.shared_expert.gate_up_proj.weight.copy_(torch.cat([shared.gate_proj.weight, shared.up_proj.weight]))
        layer.shared_expert.down_proj.weight.copy_(shared.down_proj.weight)
        if layer.shared_expert_gate is not None:
            layer.shared_expert_gate.weight.copy_(theirs.shared_expert_gate.weight)
        if layer.gate.e_score_correction_bias is not None:
            layer.gate.e_score_correction_bias.copy_(theirs.gate.e_score_correction_bias)
    for module in layer.modules():
        if hasattr(module, "pack_weights"):
            module.pack_weights()


def randomise(module):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / 8)


def deepseek():
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    theirs = DeepseekV3MoE(
        DeepseekV3Config(
            hidden_size=WIDTH, moe_intermediate_size=INNER, n_routed_experts=NUM_EXPERTS, num_experts_per_tok=3,
            n_group=4, topk_group=2, n_shared_experts=2, routed_scaling_factor=2.5,
        )
    )  # fmt: skip
    routing = Routing(3, is_sigmoid=True, num_groups=4, top_groups=2, scale=2.5)
    return theirs, routing, {"has_correction": True}


def qwen2_moe():
    from transformers import Qwen2MoeConfig
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    theirs = Qwen2MoeSparseMoeBlock(
        Qwen2MoeConfig(
            hidden_size=WIDTH, moe_intermediate_size=INNER, num_experts=NUM_EXPERTS, num_experts_per_tok=3,
            shared_expert_intermediate_size=2 * INNER,
        )
    )  # fmt: skip
    return theirs, Routing(3, is_normalised=False), {"has_shared_gate": True}


@pytest.mark.parametrize("make", [deepseek, qwen2_moe])
def test_a_shared_expert_computes_every_token(make):
    theirs, routing, options = make()
    randomise(theirs)
    layer = Experts(WIDTH, INNER, NUM_EXPERTS, routing, "silu", shared=SharedMLP(), **options)
    take(layer, theirs)
    x = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(x[None])[0]
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(layer(x[7:8])[0], layer(x)[7]), "others change the bits of a token"
        without = expected - theirs.experts(x, *reversed(theirs.gate(x)[1:]))
        assert without.abs().mean() > 0.01, "the shared expert says nothing here"


class FloatCheckpoint:
    """Weights by name; tells which matrices were read."""

    num_bytes = 0

    def __init__(self, weights):
        self.weights = weights
        self.read = []

    def tensors(self):
        for name, weight in self.weights.items():
            yield name, weight if weight.ndim == 1 else self._stored(name, weight)

    def _stored(self, name, weight):
        def read_part(rows, columns):
            self.read.append(name)
            return weight[rows, columns]

        return StoredWeight.of(weight.shape, weight.nbytes, read_part)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_whole_experts_add_up_to_one(dtype, size):
    def layer():
        with building(dtype, torch.device("cpu")):
            return Experts(WIDTH, INNER, NUM_EXPERTS, Routing(3), "silu", bias=True)

    alone = layer()
    randomise(alone)
    weights = {}
    for name, weight in alone.state_dict().items():
        parts = weight.clone().chunk(2) if "gate_up_proj" in name else [weight.clone()]
        weights |= {name.replace("gate_up", kind): part for kind, part in zip(("gate", "up"), parts, strict=False)}
    pack_weights(alone)
    x = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    parts, read = [], []
    for rank in range(size):
        with tensor_parallel(
            TensorParallelGroup(rank, size, lambda part: parts.append(part) or part, has_whole_experts=True)
        ):
            own = layer()
        own.checkpoint_map = CheckpointMap(merged=MERGED)
        checkpoint = FloatCheckpoint(weights)
        load_weights(own, checkpoint)
        own(x)
        read += [name for name in checkpoint.read if name.startswith("experts.")]
    # each expert is read by one rank
    assert sorted(read) == sorted(name for name in weights if name.startswith("experts.") and "weight" in name)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(sum(part.float() for part in parts), alone(x).float(), rtol=bound, atol=bound)
    assert own.num_tokens_X.tolist() == alone.num_tokens_X.tolist()
