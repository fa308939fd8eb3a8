"""What is run with several workers and held against one: prompts, and ways in which they are scheduled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.support.eagle_checkpoints import make_eagle3_head, make_eagle_head

from quire.testing.tiny_checkpoints import VOCAB_SIZE, make_checkpoint

LENGTHS = (1, 17, 40, 40)
NUM_TOKENS = 24


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    made = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]
    made[3][:32] = made[2][:32]  # a prefix that is found
    return made


def ways(num_blocks: int) -> dict[str, dict[str, Any]]:
    """Options by way. With so many blocks of a rank somebody has to give way."""
    scarce = {"num_gpu_blocks_override": num_blocks, "block_size": 4, "max_model_len": 96}
    return {
        "chunks": {"max_num_batched_tokens": 24, "block_size": 4},
        "preempted": {**scarce, "preemption_mode": "recompute"},
        "swapped": {**scarce, "preemption_mode": "swap"},
        "ahead": {"async_scheduling": True},
        "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    }


def make_draft(path: Path, kind: str, target: Path) -> dict[str, Any]:
    """What drafts for a checkpoint, as the option speculative_config."""
    heads: dict[str, Callable[[Path, Path], Path]] = {"eagle": make_eagle_head, "eagle3": make_eagle3_head}
    model = target
    if kind in heads:
        model = heads[kind](path, target)
    elif kind == "small":
        model = make_checkpoint(path, "qwen3", seed=5, num_hidden_layers=1, hidden_size=32)
    elif kind == "windowed":
        model = make_checkpoint(path, "qwen2_window", seed=5)
    method = "eagle" if kind in heads else "draft_model"
    return {"method": method, "model": str(model), "num_speculative_tokens": 3}
