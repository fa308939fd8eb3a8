"""What every model must show: the logits of Transformers, and the same ones however its tokens are cut and mixed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quire.testing.model_harness import ModelHarness, worker_config
from quire.worker.model_loader import load_model

ATOL = 1e-4


def check_against_transformers(
    path: Path, prompt: Sequence[int], atol: float = ATOL, *, reference: str = "eager", **options: Any
) -> nn.Module:
    """Load the checkpoint in float32, compare its logits, and return the model. `options` are those of a worker,
    `reference` is the attention of Transformers."""
    expected = transformers_logits(path, prompt, reference)
    assert expected.std() > 0.05, "the reference says nothing: all logits are alike"
    model = load_model(worker_config(path, **options))
    torch.testing.assert_close(ModelHarness(model).run(0, prompt), expected, atol=atol, rtol=0)
    check_cuts_and_mixtures(model, prompt, expected, atol)
    return model


def check_cuts_and_mixtures(model: nn.Module, prompt: Sequence[int], expected: Tensor, atol: float = ATOL) -> None:
    """The logits of a prompt of some 60 tokens do not depend on chunks, block size or who else is in a step, nor on
    drafts that were thrown away or on a token that is computed once more."""
    chunked = ModelHarness(model, block_size=8, seed=1).run(0, prompt, chunk_size=7)
    torch.testing.assert_close(chunked, expected, atol=atol, rtol=0)
    # One step with a whole prompt, one token of a long sequence, and a piece of another.
    harness = ModelHarness(model, seed=2)
    harness.run(1, prompt[:-1])
    harness.run(2, prompt[:20])
    mixed = harness.step({0: prompt, 1: prompt[-1:], 2: prompt[20:40]})
    torch.testing.assert_close(mixed[0], expected, atol=atol, rtol=0)
    torch.testing.assert_close(mixed[1], expected[-1:], atol=atol, rtol=0)
    torch.testing.assert_close(mixed[2], expected[20:40], atol=atol, rtol=0)
    # Four drafts behind 30 tokens; the last of these alone once more; and again, with the rest.
    harness = ModelHarness(model, seed=3)
    drafted = harness.step({0: prompt[:34]}, num_drafts={0: 4})
    torch.testing.assert_close(drafted[0], expected[:34], atol=atol, rtol=0)
    for end in (30, len(prompt)):
        harness.step_back(0)
        torch.testing.assert_close(harness.step({0: prompt[29:end]})[0], expected[29:end], atol=atol, rtol=0)


def transformers_logits(path: Path, prompt: Sequence[int], reference: str = "eager") -> Tensor:
    """The reference: the whole prompt at once, without a cache, with the plainest attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=reference).eval()
    with torch.no_grad():
        return model(torch.tensor([list(prompt)]), use_cache=False).logits[0]
