"""What the simulated model says: functions of the prefix alone, so that a test can foretell every token.

A prefix is known by the hash of all its tokens. The next token, and the whole distribution that a beam search sees,
follow from that hash. Nothing here has state; hashes are unsigned 64-bit numbers, as Python ints or as columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from quire.messages import IntArray

Hashes: TypeAlias = npt.NDArray[np.uint64]
Floats: TypeAlias = npt.NDArray[np.float64]

# The hash of no tokens at all.
EMPTY_PREFIX = 0x51_7C_C1_B7_27_22_0A_95
# A token that comes out on top more often than chance has it: a workload takes it as end of text.
END_TOKEN = 1

_PRIME = 0x100000001B3
_ODD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
# the same for columns: made once, not with every call
_PRIMES, _ODDS, _SHIFT = np.uint64(_PRIME), np.uint64(_ODD), np.uint64(29)
# How far apart the logits of a prefix lie: from nearly equal to one token that stands out.
_SPREADS = np.array([0.02, 0.2, 1.0, 1.0, 3.0, 6.0, 12.0, 40.0])
# one prefix in so many has the end token near the top: where in the spread of the logits
_END_IS_LIKELY, _END_LEVEL = 5, 0.93


def prefix_hashes(token_ids: Iterable[int], parent: int = EMPTY_PREFIX) -> list[int]:
    """The hash after each token, on top of the prefix whose hash is `parent`."""
    hashes = []
    for token in token_ids:
        parent = (parent ^ (token + 1)) * _PRIME & _MASK
        parent ^= parent >> 29
        hashes.append(parent)
    return hashes


def next_token(prefix_hash: int, seed: int, is_greedy: bool, vocab_size: int) -> int:
    """What the model says after a prefix; a sampled token also depends on the seed."""
    mixed = prefix_hash if is_greedy else (prefix_hash ^ (seed * _ODD & _MASK)) * _PRIME & _MASK
    return (mixed >> 7) % vocab_size


def expected_tokens(
    prompt: list[int], count: int, *, vocab_size: int, seed: int = 0, is_greedy: bool = True
) -> list[int]:
    """What a sampled request must produce, whatever the scheduler does."""
    tokens: list[int] = []
    parent = prefix_hashes(prompt)[-1]
    for _ in range(count):
        tokens.append(next_token(parent, seed, is_greedy, vocab_size))
        (parent,) = prefix_hashes(tokens[-1:], parent)
    return tokens


# ---------------------------------------------------------------------------------------------- the same, by columns


def extended(parents: Hashes, token_ids: IntArray) -> Hashes:
    """The hash of each prefix with one token more."""
    hashes = (parents ^ (token_ids + 1).astype(np.uint64)) * _PRIMES
    return hashes ^ (hashes >> _SHIFT)


def next_tokens(hashes: Hashes, seeds: Hashes, is_greedy: npt.NDArray[np.bool_], vocab_size: int) -> IntArray:
    """`next_token` for every row."""
    sampled = (hashes ^ (seeds * _ODDS)) * _PRIMES
    mixed = np.where(is_greedy, hashes, sampled)
    return ((mixed >> np.uint64(7)) % np.uint64(vocab_size)).astype(np.int64)


def pooling_vectors(hashes: Hashes) -> list[bytes]:
    """What each prefix becomes as a vector: two float32 numbers, of 24 bits each, which it holds exactly."""
    parts = np.stack([hashes >> np.uint64(40), hashes & np.uint64(0xFFFFFF)], axis=1).astype(np.float32)
    return [part.tobytes() for part in parts]


def expected_vector(prompt: list[int]) -> bytes:
    """What a request that pools must bring, whatever the scheduler does."""
    [vector] = pooling_vectors(np.array(prefix_hashes(prompt)[-1:], dtype=np.uint64))
    return vector


def log_probabilities(hashes: Hashes, temperatures: Floats, vocab_size: int) -> Floats:
    """[row, token]: log_softmax(logits / temperature) after each prefix; a temperature of 0 counts as 1."""
    token_ids = np.arange(1, vocab_size + 1, dtype=np.uint64) * _ODDS
    noise = (hashes[:, None] ^ token_ids) * _PRIMES
    noise = (noise ^ (noise >> np.uint64(31))) * _ODDS
    logits = (noise >> np.uint64(11)).astype(np.float64) / 2.0**53
    is_end_likely = (hashes >> np.uint64(44)) % np.uint64(_END_IS_LIKELY) == 0
    if vocab_size > END_TOKEN:
        # a little of the noise stays, so that two prefixes never say the same
        logits[is_end_likely, END_TOKEN] = _END_LEVEL + 0.05 * logits[is_end_likely, END_TOKEN]
    logits *= _SPREADS[(hashes >> np.uint64(40)).astype(np.int64) % len(_SPREADS)][:, None]
    logits /= np.where(temperatures == 0, 1.0, temperatures)[:, None]
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logits
