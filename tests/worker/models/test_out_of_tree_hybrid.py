"""docs/adding-a-model.md, followed for a model with experts and recurrent layers: one that exists nowhere else.

Layers take turns: a short convolution and the gated delta rule, attention, and a recurrence of the page's own.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from quire import LLM, SamplingParams
from quire.errors import ModelError
from quire.modeling import CausalConv, RecurrentLayer
from quire.testing.model_contract import check_cuts_and_mixtures
from quire.testing.model_harness import ModelHarness, worker_config
from quire.testing.tiny_checkpoints import write_tokenizer
from quire.worker.model_loader import load_model
from quire.worker.state_cache import recurrent_layers

PAGE = Path(__file__).parents[3] / "docs" / "adding-a-model.md"
# The layer of the page itself, so that the page stays true.
FADING = PAGE.read_text(encoding="utf-8").split("## Recurrent layers")[1].split("```python\n")[1].split("```")[0]
SOURCE = (
    FADING
    + """
from torch import nn

from quire.modeling import (
    MERGED, Attention, CausalConv, CausalLM, CheckpointMap, Experts, GatedDeltaRule, QKVParallelLinear,
    ReplicatedLinear, RMSNorm, RotaryEmbedding, Routing, RowParallelLinear, VocabEmbedding, head_of,
)


class DeltaMixer(nn.Module):
    def __init__(self, config, name, rotary):
        super().__init__()
        self.heads, self.head_dim = config.num_delta_heads, config.delta_head_dim
        inner = self.heads * self.head_dim
        self.in_proj = ReplicatedLinear(config.hidden_size, 3 * inner, bias=False)
        self.ab = ReplicatedLinear(config.hidden_size, 2 * self.heads, bias=False)
        self.conv = CausalConv(3 * inner, config.conv_width, name=f"{name}.conv", bias=True, activation="silu")
        self.rule = GatedDeltaRule(self.heads, self.head_dim, self.head_dim, name=f"{name}.rule")
        self.out = ReplicatedLinear(inner, config.hidden_size, bias=False)

    def forward(self, positions, hidden):
        query, key, value = self.conv(self.in_proj(hidden)).unflatten(-1, (3, self.heads, self.head_dim)).unbind(1)
        a, b = self.ab(hidden).chunk(2, dim=-1)
        return self.out(self.rule(query, key, value, a, b).flatten(1))


class AttentionMixer(nn.Module):
    def __init__(self, config, name, rotary):
        super().__init__()
        size, heads = config.hidden_size, config.num_attention_heads
        self.head_dim = size // heads
        self.rotary = rotary
        self.qkv = QKVParallelLinear(size, self.head_dim, heads, heads, bias=False)
        self.attn = Attention(
            self.qkv.num_heads, self.qkv.num_kv_heads, self.head_dim, self.head_dim**-0.5, name=f"{name}.attn"
        )
        self.out = RowParallelLinear(size, size, bias=False)

    def forward(self, positions, hidden):
        query, key, value = self.qkv(hidden)
        self.rotary(positions, query, key, self.head_dim)
        return self.out(self.attn(query, key, value))


class FadingMixer(nn.Module):
    def __init__(self, config, name, rotary):
        super().__init__()
        self.fading = Fading(config.hidden_size, name=f"{name}.fading")
        self.out = ReplicatedLinear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, positions, hidden):
        return self.out(self.fading(hidden))


MIXERS = {"delta": DeltaMixer, "attention": AttentionMixer, "fading": FadingMixer}


class WovenLayer(nn.Module):
    def __init__(self, config, index, rotary):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, 1e-5)
        self.mixer = MIXERS[config.mixers[index]](config, f"layers.{index}.mixer", rotary)
        self.moe_norm = RMSNorm(config.hidden_size, 1e-5)
        self.moe = Experts(
            config.hidden_size, config.expert_size, config.num_experts, Routing(config.experts_per_token), "silu"
        )

    def forward(self, positions, hidden):
        hidden = hidden + self.mixer(positions, self.norm(hidden))
        return hidden + self.moe(self.moe_norm(hidden))


class WovenBackbone(nn.Module):
    def __init__(self, config, max_model_len):
        super().__init__()
        self.tokens = VocabEmbedding(config.vocab_size, config.hidden_size)
        rotary = RotaryEmbedding.from_config(config, max_model_len)
        self.layers = nn.ModuleList(WovenLayer(config, i, rotary) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, 1e-5)

    def forward(self, input_ids, positions, input_embeds):
        hidden = self.tokens(input_ids) if input_embeds is None else input_embeds
        for layer in self.layers:
            hidden = layer(positions, hidden)
        return self.norm(hidden)


class WovenForCausalLM(CausalLM):
    architectures = ("WovenForCausalLM",)
    checkpoint_map = CheckpointMap(
        merged={**MERGED, "query": ("qkv", "q"), "key": ("qkv", "k"), "value": ("qkv", "v")}
    )
    config_defaults = {"tie_word_embeddings": True}

    def __init__(self, config, max_model_len):
        backbone = WovenBackbone(config, max_model_len)
        super().__init__(backbone, head_of(config, backbone.tokens))
"""
)
SIZE, VOCAB, HEADS, DELTA_HEADS, DELTA_DIM, WIDTH, EXPERTS, TOP, EXPERT_SIZE = 32, 320, 4, 2, 16, 4, 4, 2, 24
MIXERS = ["delta", "attention", "fading", "attention"]
CONFIG = {
    "model_type": "woven",
    "architectures": ["WovenForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "num_attention_heads": HEADS,
    "num_hidden_layers": len(MIXERS),
    "max_position_embeddings": 256,
    "rope_theta": 10_000.0,
    "mixers": MIXERS,
    "num_delta_heads": DELTA_HEADS,
    "delta_head_dim": DELTA_DIM,
    "conv_width": WIDTH,
    "num_experts": EXPERTS,
    "experts_per_token": TOP,
    "expert_size": EXPERT_SIZE,
}


def shapes():
    inner = DELTA_HEADS * DELTA_DIM
    kinds = {
        "delta": {
            "in_proj.weight": (3 * inner, SIZE),
            "ab.weight": (2 * DELTA_HEADS, SIZE),
            "conv.weight": (3 * inner, 1, WIDTH),
            "conv.bias": (3 * inner,),
            "rule.A_log": (DELTA_HEADS,),
            "rule.dt_bias": (DELTA_HEADS,),
            "out.weight": (SIZE, inner),
        },
        "attention": {f"{name}.weight": (SIZE, SIZE) for name in ("query", "key", "value", "out")},
        "fading": {"fading.decay": (SIZE,), "out.weight": (SIZE, SIZE)},
    }
    result = {"model.tokens.weight": (VOCAB, SIZE), "model.norm.weight": (SIZE,)}
    for index, kind in enumerate(MIXERS):
        layer = f"model.layers.{index}."
        result |= {layer + "norm.weight": (SIZE,), layer + "moe_norm.weight": (SIZE,)}
        result |= {f"{layer}mixer.{name}": shape for name, shape in kinds[kind].items()}
        result[layer + "moe.gate.weight"] = (EXPERTS, SIZE)
        for expert in range(EXPERTS):
            prefix = f"{layer}moe.experts.{expert}."
            result |= {prefix + f"{name}.weight": (EXPERT_SIZE, SIZE) for name in ("gate_proj", "up_proj")}
            result[prefix + "down_proj.weight"] = (SIZE, EXPERT_SIZE)
    return result


@pytest.fixture(scope="module")
def woven(tmp_path_factory):
    """The package as `pip install woven-models` would leave it behind, and (path, weights) of a checkpoint."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("woven")
    (folder / "woven_models.py").write_text(SOURCE)
    info = folder / "woven_models-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: woven-models\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[quire.models]\nwoven = woven_models:WovenForCausalLM\n")
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) * 0.3 + (1.0 if name.endswith("norm.weight") else 0.0)
        for name, shape in shapes().items()
    }
    path = folder / "checkpoint"
    path.mkdir()
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield path, weights
    sys.modules.pop("woven_models", None)


def rms_norm(x, weight):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def delta(layer, x):
    mixed = F.pad(x @ layer["mixer.in_proj.weight"].T, (0, 0, WIDTH - 1, 0))
    mixed = F.conv1d(mixed.T, layer["mixer.conv.weight"], layer["mixer.conv.bias"], groups=mixed.shape[1]).T
    query, key, value = F.silu(mixed).view(len(x), 3, DELTA_HEADS, DELTA_DIM).unbind(1)
    query, key = (vector * torch.rsqrt((vector**2).sum(-1, keepdim=True) + 1e-6) for vector in (query, key))
    a, b = (x @ layer["mixer.ab.weight"].T).chunk(2, dim=-1)
    decay = torch.exp(-layer["mixer.rule.A_log"].exp() * F.softplus(a + layer["mixer.rule.dt_bias"]))
    memory, out = torch.zeros(DELTA_HEADS, DELTA_DIM, DELTA_DIM), []
    for t in range(len(x)):
        memory = memory * decay[t, :, None, None]
        change = b[t].sigmoid()[:, None] * (value[t] - torch.einsum("hke,hk->he", memory, key[t]))
        memory = memory + torch.einsum("hk,he->hke", key[t], change)
        out.append(torch.einsum("hke,hk->he", memory, query[t]) * DELTA_DIM**-0.5)
    return torch.stack(out).flatten(1) @ layer["mixer.out.weight"].T


def attention(layer, x):
    query, key, value = (
        (x @ layer[f"mixer.{name}.weight"].T).view(-1, HEADS, SIZE // HEADS).transpose(0, 1)
        for name in ("query", "key", "value")
    )
    half = SIZE // HEADS // 2
    angles = torch.arange(len(x))[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    cos, sin = (torch.cat([part, part], dim=-1) for part in (angles.cos(), angles.sin()))
    query, key = (y * cos + torch.cat([-y[..., half:], y[..., :half]], dim=-1) * sin for y in (query, key))
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return mixed.transpose(0, 1).flatten(1) @ layer["mixer.out.weight"].T


def fading(layer, x):
    keep = layer["mixer.fading.decay"].sigmoid()
    memory, out = torch.zeros(SIZE), []
    for row in x:
        memory = keep * memory + (1 - keep) * row
        out.append(memory)
    return torch.stack(out) @ layer["mixer.out.weight"].T


def experts(layer, x):
    scores, chosen = (x @ layer["moe.gate.weight"].T).softmax(-1).topk(TOP)
    out = torch.zeros_like(x)
    for t, (weights, ids) in enumerate(zip(scores / scores.sum(-1, keepdim=True), chosen.tolist(), strict=True)):
        for weight, expert in zip(weights, ids, strict=True):
            gate, up, down = (
                layer[f"moe.experts.{expert}.{name}.weight"] for name in ("gate_proj", "up_proj", "down_proj")
            )
            out[t] += weight * (down @ (F.silu(gate @ x[t]) * (up @ x[t])))
    return out


def plain_logits(weights, tokens):
    """The same model in plain PyTorch, the whole prompt at once."""
    hidden = weights["model.tokens.weight"][tokens]
    mixers = {"delta": delta, "attention": attention, "fading": fading}
    for index, kind in enumerate(MIXERS):
        prefix = f"model.layers.{index}."
        layer = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        hidden = hidden + mixers[kind](layer, rms_norm(hidden, layer["norm.weight"]))
        hidden = hidden + experts(layer, rms_norm(hidden, layer["moe_norm.weight"]))
    return rms_norm(hidden, weights["model.norm.weight"]) @ weights["model.tokens.weight"].T


def greedy(weights, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(plain_logits(weights, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def tokens_of_seed(seed, count):
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_logits_are_those_of_plain_pytorch_in_every_cut(woven):
    path, weights = woven
    model = load_model(worker_config(path, max_model_len=128))
    prompt = tokens_of_seed(1, 60)
    expected = plain_logits(weights, prompt)
    torch.testing.assert_close(ModelHarness(model).run(0, prompt), expected, atol=1e-4, rtol=0)
    check_cuts_and_mixtures(model, prompt, expected)


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "drafts"), [(8, None), (256, None), (256, {"method": "ngram"})], ids=str
)
def test_an_engine_generates_the_tokens_of_plain_pytorch(max_num_batched_tokens, drafts, woven):
    """In small grants, whole and with drafts; behind a prefix that is cached; and two completions of one prompt."""
    path, weights = woven
    prefix = tokens_of_seed(2, 70)
    first, second = prefix + tokens_of_seed(3, 11), prefix + tokens_of_seed(4, 7)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(
        str(path),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=16,
        state_checkpoint_interval=16,
        kv_cache_memory_bytes="4MiB",
        speculative_config=drafts,
    ) as llm:
        [output] = llm.generate([first], params, use_tqdm=False)
        assert output.outputs[0].token_ids == greedy(weights, first, 12)
        assert output.num_cached_tokens == 0
        [output] = llm.generate([second], params, use_tqdm=False)
        assert output.outputs[0].token_ids == greedy(weights, second, 12)
        assert output.num_cached_tokens == 64
        pair = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, n=2)
        [output] = llm.generate([tokens_of_seed(5, 37)], pair, use_tqdm=False)
        expected = greedy(weights, tokens_of_seed(5, 37), 12)
        assert [completion.token_ids for completion in output.outputs] == [expected, expected]


def test_a_layer_without_compute_and_a_name_given_twice_are_named():
    class Unfinished(RecurrentLayer):
        pass

    with pytest.raises(TypeError, match="compute"):
        Unfinished("layers.0.mixer", {})
    convolutions = torch.nn.ModuleList(CausalConv(4, 2, name="layers.0.conv", bias=False) for _ in range(2))
    with pytest.raises(ModelError, match=r"layers\.0\.conv: two recurrent layers have this name"):
        recurrent_layers(convolutions)
