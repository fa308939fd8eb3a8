"""Every other causal language model of the Transformers library, with Quire's attention underneath.

Owns: the bridge between the attention interface of Transformers and `Attention`. Must never: use Transformers' cache.
The tokens of a step go through as a batch of one, with their positions; sequences meet only in attention, and there
the forward context tells them apart. What cannot work this way is refused (`transformers_probe`).

Longer than most: it stands for all families without a file here, so attention, packed weights, images and the head are
each replaced or handed through without knowing the family's code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.config import ModelFacts, WorkerConfig
from quire.errors import ModelError, one_line
from quire.worker.attention import Attention
from quire.worker.layers.packing import multiplies_codes, multiply, pack, pack_quantized
from quire.worker.layers.quantization import QuantizedWeight, Role, Scheme, apply, find_scheme
from quire.worker.models.transformers_checkpoint import IMAGE_MODEL_TYPES, load_hf_model
from quire.worker.models.transformers_experts import PackedExperts, packed_experts
from quire.worker.models.transformers_probe import PROBE, AttentionCall, probe, refusal, register_probe

IMPLEMENTATION = "quire"
_FAILED = "a forward pass with position_ids and without a cache fails"


def load_through_transformers(
    config: WorkerConfig, facts: ModelFacts, dtype: torch.dtype, device: torch.device, *, is_tower: bool
) -> TransformersModel:
    """Load, probe and wrap; ModelError says why a model cannot be served this way. `is_tower`: a part of the checkpoint
    (`text_tower.py`)."""
    _register()
    hf_model = load_hf_model(config, facts, dtype, device, is_tower=is_tower)
    try:
        model = TransformersModel(hf_model, facts.vocab_size)
        calls = probe(model.forward, model.compute_logits, device)
    except ModelError as error:
        raise ModelError(f"model_type={facts.model_type}: {error}") from error
    except Exception as error:
        # A model that fails in a plain forward pass of three tokens needs something that we do not give.
        raise ModelError(
            f"model_type={facts.model_type}: {refusal(_FAILED)} ({type(error).__name__}: {one_line(error)})"
        ) from error
    model.attach(calls, dtype)
    model.scheme = None if config.quantization is None else find_scheme(config.quantization)
    return model


class TransformersModel(nn.Module):
    """A causal language model of Transformers behind the two calls of the model runner."""

    def __init__(self, hf_model: Any, vocab_size: int) -> None:
        super().__init__()
        backbone = getattr(hf_model, hf_model.base_model_prefix, None)
        if not isinstance(backbone, nn.Module):
            raise refusal("its backbone cannot be told from its head")
        self.backbone = backbone
        # Asked for while the model is whole; by its number, because it is a part of `head` already.
        self._output_layer = id(hf_model.get_output_embeddings())
        # an encoder of images; positions have three dimensions then
        self.takes_images = hf_model.config.model_type in IMAGE_MODEL_TYPES
        self.has_grid_positions = self.takes_images
        self.takes_vectors = True
        # What the model does between hidden states and logits (head, scale, cap) stays its own code: the whole model
        # runs with a backbone that hands through what it is given.
        setattr(hf_model, hf_model.base_model_prefix, _HandThrough())
        self.head = hf_model
        self.vocab_size = vocab_size
        # by which linear layers are quantised when they are packed
        self.scheme: Scheme | None = None

    def attach(self, calls: list[AttentionCall], dtype: torch.dtype) -> None:
        """Give each module that asked for attention a layer of Quire's, and switch over."""
        names = {id(module): name for name, module in self.backbone.named_modules()}
        for call in calls:
            layer = Attention(
                call.num_heads,
                call.num_kv_heads,
                call.key_dim,
                call.scale,
                name=f"model.{names[id(call.module)]}.attn",
                sliding_window=call.sliding_window,
                soft_cap=call.soft_cap,
                sinks=call.sinks,
                value_dim=call.value_dim,
            )
            layer.dtype = dtype
            call.module.quire_attention = layer
        _use(self.backbone, IMPLEMENTATION)

    def pack_weights(self) -> None:
        """Replace plain linear layers and experts by packed ones, one at a time."""
        for parent in list(self.modules()):
            for name, child in list(parent.named_children()):
                experts = packed_experts(child, lambda matrix: self._packed(matrix, "linear", "experts"))
                if experts is not None:
                    setattr(parent, name, experts)
                    continue
                if type(child) is not nn.Linear:
                    continue
                packed = self._packed(child.weight.data, "head" if id(child) == self._output_layer else "linear", name)
                if packed is not None:
                    setattr(parent, name, PackedLinear(child, packed))

    def share_not_quantized(self) -> float:
        """Of the elements of all matrices but embeddings."""
        in_tables = {id(module.weight) for module in self.modules() if isinstance(module, nn.Embedding)}
        matrices = [weight for weight in self.parameters() if weight.dim() > 1 and id(weight) not in in_tables]
        packed = [module for module in self.modules() if isinstance(module, PackedLinear)]
        num_left = sum(weight.numel() for weight in matrices)
        num_packed = sum(module.in_features * module.out_features for module in packed)
        num_packed += sum(module.num_weights for module in self.modules() if isinstance(module, PackedExperts))
        return num_left / max(1, num_left + num_packed)

    def _packed(self, weight: Tensor, role: Role, name: str) -> Tensor | None:
        if self.scheme is not None and multiplies_codes(weight.device):
            quantized = apply(self.scheme, weight, role, name)
            if isinstance(quantized, QuantizedWeight):
                return pack_quantized(quantized)
        return pack(weight)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        input_embeds: Tensor | None = None,
        intermediate_tensors: Any = None,
    ) -> Tensor:
        """Hidden states of all tokens of the step, [T, hidden_size]."""
        if intermediate_tensors is not None:
            raise ModelError("intermediate_tensors: pipeline parallelism is not built, every stage is in this worker.")
        tokens = {"input_ids": input_ids[None]} if input_embeds is None else {"inputs_embeds": input_embeds[None]}
        output = self.backbone(**tokens, position_ids=positions.unsqueeze(-2), use_cache=False)
        return output.last_hidden_state[0]

    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        embeds: Tensor = self.backbone.get_input_embeddings()(input_ids)
        return embeds

    def encode_image(self, pixels: Tensor, grid: list[int]) -> Tensor:
        """What stands for the tokens of one image, [tokens, hidden_size]."""
        grids = torch.tensor([grid], device=pixels.device)
        features: Tensor = self.backbone.get_image_features(pixels, grids).pooler_output[0]
        return features

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits of the rows of `hidden`, [N, vocab_size]."""
        return self.head(inputs_embeds=hidden[None], use_cache=False).logits[0, :, : self.vocab_size]


class PackedLinear(nn.Module):
    """nn.Linear with its weight in the processor's layout; `weight` stays as an empty tensor that tells the type."""

    def __init__(self, linear: nn.Linear, packed: Tensor) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)
        self.bias = linear.bias
        self.packed: Tensor
        self.register_buffer("packed", packed, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight, self.packed, self.bias, self.out_features)


class _HandThrough(nn.Module):
    """A backbone that returns its input as hidden states."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Output:
        return _Output(inputs_embeds)

    @property
    def decoder(self) -> _HandThrough:
        """The head of OPT reaches for the inner part of its backbone."""
        return self


class _Output:
    """What a head may ask of a backbone's output: the hidden states, and None for all the rest."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
) -> tuple[Tensor, None]:
    """Transformers' [1, heads, T, dim] to Quire's [T, heads * dim] and back."""
    layer: Attention = module.quire_attention
    rows = [tensor[0].transpose(0, 1).flatten(1).to(layer.dtype) for tensor in (query, key, value)]
    out_TF = layer(*rows)
    return out_TF.view(1, -1, layer.num_heads, layer.value_dim).to(query.dtype), None


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, _attention)
    register_probe()


def _use(backbone: Any, implementation: str) -> None:
    """Switch every configuration inside; the setter of Transformers would also look for packages."""
    for module in backbone.modules():
        config = getattr(module, "config", None)
        if config is not None and getattr(config, "_attn_implementation", None) == PROBE:
            config._attn_implementation = implementation
    # Last, as a setter reaches into the configurations within. An encoder of images sees whole images and no cache.
    for module in getattr(backbone, "visual", nn.Module()).modules():
        config = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = "sdpa"
