"""Whisper: an encoder that listens to half a minute, and a decoder that looks at what it heard."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ModelError
from quire.messages import TEXT, Media
from quire.worker.layers import (
    ColumnParallelLinear,
    Embedding,
    LayerNorm,
    RowParallelLinear,
    VocabEmbedding,
    activation,
)
from quire.worker.layers.cross_attention import CrossAttention
from quire.worker.layers.plain_attention import PlainAttention
from quire.worker.models.causal_lm import head_of
from quire.worker.models.checkpoint_map import QKV, CheckpointMap
from quire.worker.models.encoder_decoder import EncoderDecoder
from quire.worker.models.whisper_encoder import STRIDE, Encoder


class DecoderLayer(nn.Module):
    def __init__(self, config: Any, name: str) -> None:
        super().__init__()
        size = config.d_model
        num_heads = config.decoder_attention_heads
        self.self_attn = PlainAttention(size, num_heads, num_heads, name=f"{name}.self_attn", part=TEXT)
        self.self_attn_layer_norm = LayerNorm(size)
        self.encoder_attn = CrossAttention(
            size,
            num_heads,
            size // num_heads,
            (size // num_heads) ** -0.5,
            name=f"{name}.encoder_attn",
            bias=True,
            heads_option="decoder_attention_heads",
        )
        self.encoder_attn_layer_norm = LayerNorm(size)
        self.fc1 = ColumnParallelLinear(size, config.decoder_ffn_dim)
        self.act = activation(config.activation_function)
        self.fc2 = RowParallelLinear(config.decoder_ffn_dim, size)
        self.final_layer_norm = LayerNorm(size)

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(positions, self.self_attn_layer_norm(hidden))
        hidden = hidden + self.encoder_attn(self.encoder_attn_layer_norm(hidden))
        return hidden + self.fc2(self.act(self.fc1(self.final_layer_norm(hidden))))


class TextPositions(Embedding):
    """Those of the text, counted from behind the sound: the rows before are never looked at."""

    def __init__(self, num_sources: int, num_positions: int, size: int) -> None:
        nn.Module.__init__(self)
        self.num_rows, self.size = num_sources + num_positions, size
        self._create(self.num_rows, lambda whole, tensor, part: (whole[num_sources:], tensor))
        self.weight.data[:num_sources].zero_()


class Decoder(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.d_model
        self.embed_tokens = VocabEmbedding(config.vocab_size, size)
        self.embed_positions = TextPositions(config.max_source_positions, config.max_target_positions, size)
        self.scale = math.sqrt(size) if config.scale_embedding else 1.0
        self.layers = nn.ModuleList(
            DecoderLayer(config, f"model.layers.{index}") for index in range(config.decoder_layers)
        )
        self.layer_norm = LayerNorm(size)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden = self.embed_tokens(input_ids)
        if self.scale != 1.0:
            hidden = hidden * self.scale
        hidden = hidden + self.embed_positions(positions)
        for layer in self.layers:
            hidden = layer(positions, hidden)
        return self.layer_norm(hidden)


def _convert(name: str, weight: Any) -> list[tuple[str, Any]]:
    """Only the text's attention to itself has one projection. Its keys have no bias, which others of the three have."""
    if not name.startswith("model.") or ".encoder_attn." in name:
        for theirs, ours in ((".q_proj.", ".query."), (".k_proj.", ".key."), (".v_proj.", ".value.")):
            name = name.replace(theirs, ours)
    elif name.endswith(".k_proj.weight"):
        return [(name, weight), (f"{name.removesuffix('weight')}bias", weight.new_zeros(weight.shape[0]))]
    return [(name, weight)]


class WhisperForConditionalGeneration(EncoderDecoder):
    architectures = ("WhisperForConditionalGeneration",)
    checkpoint_map = CheckpointMap(
        merged=QKV,
        modules={"out_proj": "o_proj"},
        prefixes={"model.decoder.": "model.", "model.encoder.": "encoder.", "proj_out.": "lm_head."},
        convert=_convert,
    )
    config_defaults = {
        "vocab_size": 51_865,
        "d_model": 384,
        "encoder_layers": 4,
        "encoder_attention_heads": 6,
        "encoder_ffn_dim": 1536,
        "decoder_layers": 4,
        "decoder_attention_heads": 6,
        "decoder_ffn_dim": 1536,
        "num_mel_bins": 80,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "activation_function": "gelu",
        "scale_embedding": False,
        "tie_word_embeddings": True,
    }

    @staticmethod
    def complete_config(config: Any) -> None:
        config.hidden_size = config.d_model

    def __init__(self, config: Any, max_model_len: int) -> None:
        model = Decoder(config)
        super().__init__(model, head_of(config, model.embed_tokens))
        self.encoder = Encoder(config)
        # tokens of a window of sound, and its features
        self.num_sources: int = config.max_source_positions
        self.sound_shape = (config.num_mel_bins, STRIDE * config.max_source_positions)

    def source_of(self, media: Media) -> Tensor:
        if media.length != self.num_sources:
            raise ModelError(f"media: a prompt must begin with one sound, which has {self.num_sources} tokens.")
        if tuple(media.shape) != self.sound_shape or len(media.pixels) != 4 * math.prod(media.shape):
            raise ModelError(f"media: a sound of {media.shape} numbers; it must have {self.sound_shape}.")
        return torch.frombuffer(bytearray(media.pixels), dtype=torch.float32).reshape(self.sound_shape)

    def largest_source(self) -> Tensor:
        return torch.zeros(self.sound_shape)

    def encode(self, source: Tensor) -> Tensor:
        encoded_SE: Tensor = self.encoder(source)
        return encoded_SE


MODEL = WhisperForConditionalGeneration
