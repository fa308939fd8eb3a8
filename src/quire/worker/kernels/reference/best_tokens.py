"""The greatest logit of each row."""

from __future__ import annotations

import torch
from torch import Tensor


def best_tokens(logits_NV: Tensor, rows_n: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(token, logit): the lowest id among equals. A row with a NaN gets the place of the first NaN."""
    logits_nV = logits_NV if rows_n is None else logits_NV[rows_n]
    if logits_nV.is_cpu:
        # numpy's argmax uses vector instructions, torch's does not: 15 against 130 us for 150,000 logits
        tokens_n = torch.from_numpy(logits_nV.float().numpy().argmax(axis=1))
    else:
        tokens_n = logits_nV.argmax(dim=1)
    return tokens_n, logits_nV.gather(1, tokens_n[:, None])[:, 0].float()
