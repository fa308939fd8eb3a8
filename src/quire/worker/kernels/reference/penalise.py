"""Penalties on what was said already.

    repetition   tokens of prompt and output: a positive logit is divided by it, a negative one multiplied
    frequency    tokens of the output: minus the penalty for each time
    presence     tokens of the output: minus the penalty once

In this order. Only repetition looks at the prompt, and only the tokens that a row contains are touched.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.worker.staging import to_device


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
    """In place. Row i of the logits is that of the first lengths[i] tokens of row rows[i]. Ids beyond the vocabulary
    are left out."""
    columns = said_tokens(
        logits_nV.shape[1], tokens_RL, rows_n, num_prompt_n, lengths_n, repetition_n, frequency_n, presence_n
    )
    place, token, count, repetition, frequency, presence = to_device(columns, logits_nV.device)
    logits = logits_nV[place, token]
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits -= frequency * count
    logits -= presence * (count > 0)
    logits_nV[place, token] = logits


def said_tokens(
    vocab_size: int,
    tokens_RL: Tensor,
    rows_n: Tensor,
    num_prompt_n: Tensor,
    lengths_n: Tensor,
    repetition_n: Tensor,
    frequency_n: Tensor,
    presence_n: Tensor,
) -> list[npt.NDArray[Any]]:
    """Row of the logits, token, how often it is output, and the three strengths, for each token that is touched."""
    tokens = tokens_RL.numpy()
    said, times = [], []
    for row, num_prompt, length, repetition in zip(
        rows_n.tolist(), num_prompt_n.tolist(), lengths_n.tolist(), repetition_n.tolist(), strict=True
    ):
        start = 0 if repetition != 1.0 else min(num_prompt, length)
        ids, place = np.unique(tokens[row, start:length], return_inverse=True)
        counts = np.bincount(place[max(0, num_prompt - start) :], minlength=len(ids))
        said.append(ids[ids < vocab_size].astype(np.int64))
        times.append(counts[ids < vocab_size].astype(np.float32))
    sizes = [len(ids) for ids in said]
    strengths = [np.repeat(column.numpy(), sizes) for column in (repetition_n, frequency_n, presence_n)]
    places = np.repeat(np.arange(len(sizes)), sizes)
    return [places, np.concatenate(said), np.concatenate(times), *strengths]
