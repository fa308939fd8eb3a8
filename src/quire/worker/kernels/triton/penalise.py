"""Penalties on what was said already. Which tokens those are the host knows, and says so in one list."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.worker.kernels.reference.penalise import said_tokens
from quire.worker.kernels.triton.example_inputs import floats, given
from quire.worker.kernels.triton.launch import Example, launch
from quire.worker.staging import to_device

_BLOCK = 256


@triton.jit(do_not_specialize=["tokens", "repetitions", "frequencies", "presences", "num_entries"])
def _penalise(
    logits, places, tokens, counts, repetitions, frequencies, presences, stride, num_entries, block: tl.constexpr
):  # fmt: skip
    entry = tl.program_id(0) * block + tl.arange(0, block)
    is_entry = entry < num_entries
    place = tl.load(places + entry, is_entry, 0) * stride + tl.load(tokens + entry, is_entry, 0)
    count = tl.load(counts + entry, is_entry, 0.0)
    repetition = tl.load(repetitions + entry, is_entry, 1.0)
    logit = tl.load(logits + place, is_entry, 0.0)
    logit = tl.where(logit > 0, tl.math.div_rn(logit, repetition), logit * repetition)
    # in float64, where the product is exact, and rounded: fused with the difference it would be other bits
    product = tl.load(frequencies + entry, is_entry, 0.0).to(tl.float64) * count.to(tl.float64)
    logit = logit - product.to(tl.float32)
    logit = tl.where(count > 0, logit - tl.load(presences + entry, is_entry, 0.0), logit)
    tl.store(logits + place, logit, is_entry)


def penalise(
    logits_nV: Tensor,
    tokens_RL: Tensor,
    rows_n: Tensor,
    num_prompt_n: Tensor,
    lengths_n: Tensor,
    repetition_n: Tensor,
    frequency_n: Tensor,
    presence_n: Tensor,
) -> None:
    columns = said_tokens(
        logits_nV.shape[1], tokens_RL, rows_n, num_prompt_n, lengths_n, repetition_n, frequency_n, presence_n
    )
    penalise_entries(logits_nV, to_device(columns, logits_nV.device))


def penalise_entries(logits_nV: Tensor, entries: list[Tensor]) -> None:
    """Row, token, how often it was said, and the three strengths of each entry."""
    count = len(entries[0])
    launch(_penalise, (triton.cdiv(count, _BLOCK),), logits_nV, *entries, logits_nV.stride(0), count, block=_BLOCK)


def _example() -> None:
    logits = floats(256, 128256, dtype=torch.float32)
    entries = range(10_000)
    rows = given(entry % 256 for entry in entries)
    tokens = given(entry * 12 for entry in entries)
    ones = given((1.0 for _ in entries), torch.float32)
    penalise_entries(logits, [rows, tokens, ones, ones, ones, ones])


EXAMPLES = (Example("10,000 tokens of 8B", _example),)
