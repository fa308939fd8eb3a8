"""The small networks of Eagle: a decoder layer or a few on the target's hidden states (arXiv 2401.15077, 2503.01840).

At position i the first generation takes the embedding of token i + 1 and the target's last hidden state at i, and
yields what the target's hidden state at i + 1 may be; the target's own head makes logits of it. The third takes the
states after three layers of the target instead and has a norm, a head and often a smaller vocabulary of its own. From
the second pass on either takes what it has yielded itself.

Published checkpoints leave out of config.json much of what their weights say, so it is read from the names of the
weights. What a checkpoint does not bring is the target's. Owns no state. Called by `eagle.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from quire.messages import DRAFT_PREFIX
from quire.worker.attention import Attention, attention_layers
from quire.worker.layers import LMHead, QKVParallelLinear, ReplicatedLinear, RMSNorm, RotaryEmbedding, VocabEmbedding
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap
from quire.worker.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP, make_mlp
from quire.worker.models.multi_token import MultiTokenHead

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
# In checkpoints of the third generation: draft token + this = token of the target; and a mask that says the same.
TO_TARGET = "d2t"
_IS_IN_DRAFT = "t2d"
# layers of the target whose inputs the third generation takes
NUM_TAPS = 3


class EagleHead(nn.Module):
    """The first generation (and the second, which differs in how a tree of proposals grows, not in the network)."""

    config_defaults = LlamaForCausalLM.config_defaults
    complete_config = LlamaForCausalLM.complete_config

    def __init__(self, config: Any, max_model_len: int, names: Collection[str]) -> None:
        super().__init__()
        self.checkpoint_map = _checkpoint_map(names)
        rotary = RotaryEmbedding.from_config(config, max_model_len)
        # of the target's states that come with a token
        self.target_width = config.hidden_size
        self.fc = ReplicatedLinear(2 * config.hidden_size, config.hidden_size, bias="fc.bias" in names)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, _attention(config, index, rotary, names), make_mlp(config, index))
            for index in range(config.num_hidden_layers)
        )
        if "layers.0.input_layernorm.weight" not in names:
            self.layers[0].input_layernorm = nn.Identity()
        self.embed_tokens = _own_embedding(config, names)
        self.lm_head = LMHead(config.vocab_size, config.hidden_size) if HEAD in names else None

    def forward(self, embedded_TE: Tensor, positions_T: Tensor, hidden_TE: Tensor) -> Tensor:
        hidden = self.fc(torch.cat((embedded_TE, hidden_TE), dim=-1))
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions_T, hidden, residual)
        return hidden + residual

    def normed(self, hidden_NE: Tensor) -> Tensor:
        """As the head of the target takes it: what the network predicts is behind the last norm."""
        return hidden_NE


class Eagle3Head(nn.Module):
    """The third generation."""

    config_defaults = {**LlamaForCausalLM.config_defaults, "draft_vocab_size": None, "target_hidden_size": None}
    complete_config = LlamaForCausalLM.complete_config

    def __init__(self, config: Any, max_model_len: int, names: Collection[str]) -> None:
        super().__init__()
        self.checkpoint_map = _checkpoint_map(names)
        rotary = RotaryEmbedding.from_config(config, max_model_len)
        self.target_width = NUM_TAPS * (config.target_hidden_size or config.hidden_size)
        self.fc = ReplicatedLinear(self.target_width, config.hidden_size, bias="fc.bias" in names)
        self.layers = nn.ModuleList(
            _Eagle3Layer(config, _attention(config, index, rotary, names)) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.embed_tokens = _own_embedding(config, names)
        draft_vocab_size = config.draft_vocab_size or config.vocab_size
        self.lm_head = LMHead(draft_vocab_size, config.hidden_size) if HEAD in names else None

    def forward(self, embedded_TE: Tensor, positions_T: Tensor, hidden_TE: Tensor) -> Tensor:
        if hidden_TE.shape[-1] == self.target_width:
            hidden_TE = self.fc(hidden_TE)
        for layer in self.layers:
            hidden_TE = layer(positions_T, embedded_TE, hidden_TE)
        return hidden_TE

    def normed(self, hidden_NE: Tensor) -> Tensor:
        normed: Tensor = self.norm(hidden_NE)
        return normed


class _Eagle3Layer(nn.Module):
    """Attention over embedding and state side by side; the residual is the state's alone."""

    def __init__(self, config: Any, attention: LlamaAttention) -> None:
        super().__init__()
        attention.qkv_proj = QKVParallelLinear(
            2 * config.hidden_size,
            attention.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=attention.qkv_proj.bias is not None,
        )
        self.self_attn = attention
        self.mlp = LlamaMLP(config, bias=getattr(config, "mlp_bias", False))
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, positions_T: Tensor, embedded_TE: Tensor, hidden_TE: Tensor) -> Tensor:
        both = torch.cat((self.input_layernorm(embedded_TE), self.hidden_norm(hidden_TE)), dim=-1)
        attended = self.self_attn(positions_T, both)
        normed, residual = self.post_attention_layernorm(attended, hidden_TE)
        return self.mlp(normed) + residual


class EagleModel:
    """A head together with what it takes from the target: embedding, head, vocabulary."""

    def __init__(
        self,
        head: EagleHead | Eagle3Head | MultiTokenHead,
        embedding: VocabEmbedding,
        target_logits: Callable[[Tensor], Tensor],
        target_vocab_size: int,
        to_target: Tensor | None,
    ) -> None:
        self.head = head
        self.num_embeddings = embedding.num_rows
        self.layers: dict[str, Attention] = attention_layers(head)
        self._embedding = embedding
        self._target_logits = target_logits
        self._target_vocab_size = target_vocab_size
        self._to_target = to_target

    def forward_pass(self, input_ids_T: Tensor, positions_T: Tensor, hidden_TE: Tensor | None) -> Tensor:
        if hidden_TE is None:
            hidden_TE = self._embedding.weight.new_zeros((len(input_ids_T), self.head.target_width))
        hidden: Tensor = self.head(self._embedding(input_ids_T), positions_T, hidden_TE)
        return hidden

    def __call__(self, input_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """With no states of a target: to measure time and memory."""
        return self.forward_pass(input_ids_T, positions_T, None)

    def compute_logits(self, hidden_NE: Tensor) -> Tensor:
        normed = self.head.normed(hidden_NE)
        if self.head.lm_head is None:
            return self._target_logits(normed)
        logits: Tensor = self.head.lm_head(normed)
        return logits[:, : self._target_vocab_size]

    def target_tokens(self, chosen_N: Tensor) -> Tensor:
        return chosen_N if self._to_target is None else chosen_N + self._to_target[chosen_N]


def canonical_name(name: str) -> str:
    """One spelling of the names that published heads give their weights."""
    name = name.removeprefix("model.")
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def is_third_generation(names: Collection[str]) -> bool:
    return any(name.endswith(".hidden_norm.weight") for name in names)


def _checkpoint_map(names: Collection[str]) -> CheckpointMap:
    # An embedding that is the target's is shared, so the checkpoint's is left out.
    shared: tuple[str, ...] = () if EMBEDDING in names else (EMBEDDING,)
    return CheckpointMap(
        merged=MERGED,
        ignored=(".rotary_emb.inv_freq", TO_TARGET, _IS_IN_DRAFT, *shared),
        convert=lambda name, tensor: [(canonical_name(name), tensor)],
    )


def _attention(config: Any, index: int, rotary: RotaryEmbedding, names: Collection[str]) -> LlamaAttention:
    place = f"layers.{index}.self_attn"
    return LlamaAttention(
        config,
        f"{DRAFT_PREFIX}{place}",
        rotary,
        qkv_bias=f"{place}.q_proj.bias" in names,
        output_bias=f"{place}.o_proj.bias" in names,
    )


def _own_embedding(config: Any, names: Collection[str]) -> VocabEmbedding | None:
    return VocabEmbedding(config.vocab_size, config.hidden_size) if EMBEDDING in names else None
