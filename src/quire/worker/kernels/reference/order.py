"""The one order of tokens: value falling, then token id rising. Greedy, top_k and log-probabilities all follow it.

bfloat16 makes equal logits common, and `topk` may return any of them. So a value and its id become one whole number
that no other token of the row has: its upper half has the order of the value, its lower half falls with the id.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ID_BITS = 32


def order_keys(values_nV: Tensor) -> Tensor:
    """An int64 for each float32: the greater key comes first. Not for NaN."""
    # + 0.0 makes -0.0 and 0.0 the same bits, as they compare equal
    bits_nV = (values_nV + 0.0).view(torch.int32)
    # negative floats have the reverse order of their bits
    bits_nV.bitwise_xor_((bits_nV >> 31).bitwise_and_(0x7FFFFFFF))
    vocab_size = values_nV.shape[1]
    falling_V = torch.arange(vocab_size - 1, -1, -1, device=values_nV.device)
    return (bits_nV.long() << _ID_BITS).bitwise_or_(falling_V)


def ids_of(keys: Tensor, vocab_size: int) -> Tensor:
    """The token ids in these keys."""
    return vocab_size - 1 - (keys & ((1 << _ID_BITS) - 1))
