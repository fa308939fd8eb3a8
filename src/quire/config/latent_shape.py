"""Latent attention in numbers: what a token keeps, and what its matrices have, from config.json alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Others that have a kv_lora_rank run through Transformers, which keeps the keys and values of every head.
LATENT_MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")


@dataclass(frozen=True)
class LatentShape:
    """The numbers of one layer, by the names that config.json has for them."""

    kv_lora_rank: int
    q_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> LatentShape | None:
        """None where every head keeps keys and values."""
        if config.get("model_type") not in LATENT_MODEL_TYPES:
            return None
        return cls(
            kv_lora_rank=config.get("kv_lora_rank") or 512,
            # null: queries come from the hidden state at once
            q_lora_rank=config.get("q_lora_rank", 1536) or 0,
            qk_nope_head_dim=config.get("qk_nope_head_dim") or 128,
            qk_rope_head_dim=config.get("qk_rope_head_dim") or 64,
            v_head_dim=config.get("v_head_dim") or 128,
        )

    @property
    def kept_values(self) -> int:
        """Of a token: its latent vector, and the rotary part that the keys of all heads share."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def num_linear_parameters(self, hidden_size: int, num_heads: int) -> int:
        """Of a layer's attention, without what turns queries and values."""
        queries = num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        query = self.q_lora_rank * (hidden_size + queries) if self.q_lora_rank else hidden_size * queries
        return query + hidden_size * self.kept_values + num_heads * self.v_head_dim * hidden_size

    def num_key_parameters(self, num_heads: int) -> int:
        """Of `kv_b_proj`, what turns queries."""
        return self.kv_lora_rank * num_heads * self.qk_nope_head_dim

    def num_value_parameters(self, num_heads: int) -> int:
        """Of `kv_b_proj`, what makes values."""
        return self.kv_lora_rank * num_heads * self.v_head_dim
