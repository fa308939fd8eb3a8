"""Whisper's encoder: half a minute of sound at once, whose moments see each other."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from quire.worker.layers import activation
from quire.worker.layers.vision_tower import attended

# columns of features that become one token
STRIDE = 2


class EncoderAttention(nn.Module):
    """Each moment sees all moments."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.value, self.o_proj = nn.Linear(size, size), nn.Linear(size, size), nn.Linear(size, size)
        self.key = nn.Linear(size, size, bias=False)

    def forward(self, hidden_SE: Tensor) -> Tensor:
        query_SE, key_SE, value_SE = (project(hidden_SE) for project in (self.query, self.key, self.value))
        return self.o_proj(attended(query_SE, key_SE, value_SE, self.num_heads))


class EncoderLayer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.d_model
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.self_attn = EncoderAttention(size, config.encoder_attention_heads)
        self.fc1 = nn.Linear(size, config.encoder_ffn_dim)
        self.act = activation(config.activation_function)
        self.fc2 = nn.Linear(config.encoder_ffn_dim, size)

    def forward(self, hidden_SE: Tensor) -> Tensor:
        hidden_SE = hidden_SE + self.self_attn(self.self_attn_layer_norm(hidden_SE))
        return hidden_SE + self.fc2(self.act(self.fc1(self.final_layer_norm(hidden_SE))))


class Encoder(nn.Module):
    """From the features of one window, [mels, columns], to a hidden state for every second column."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.d_model
        self.conv1 = nn.Conv1d(config.num_mel_bins, size, 3, padding=1)
        self.conv2 = nn.Conv1d(size, size, 3, stride=STRIDE, padding=1)
        self.embed_positions = nn.Embedding(config.max_source_positions, size)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.layer_norm = nn.LayerNorm(size)

    def forward(self, features_MF: Tensor) -> Tensor:
        features_MF = features_MF.to(self.conv1.weight.dtype)
        hidden_SE = F.gelu(self.conv2(F.gelu(self.conv1(features_MF[None]))))[0].transpose(0, 1)
        hidden_SE = hidden_SE + self.embed_positions.weight
        for layer in self.layers:
            hidden_SE = layer(hidden_SE)
        return self.layer_norm(hidden_SE)
