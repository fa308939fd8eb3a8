"""What every home of the operations on logits must do; see `kernel_contracts.py`, which has those on the KV cache.

Draws are held against the definition in float64: the interval of the token that was drawn must hold the uniform number,
up to what float32 weights leave open. What is exact is compared exactly: best tokens, ranks, orders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Weights of float32, added up in float32 within a chunk of 256.
TOLERANCE = 5e-6
# An exponent is a difference and a product, each rounded, and its weight is rounded once more: for two tokens that is
# so much of one and of their exponent at most, if exp is computed in the usual two steps of float32. Weights of
# exponents no farther apart may be equal there, or the other way round.
CLOSE = 4e-7
NO_LIMIT = 2**62
VOCAB_SIZES = (1, 50, 2048, 5001, 16_385, 20_011)


@dataclass(frozen=True)
class Limits:
    """How all rows of a case draw."""

    temperature: float = 1.0
    top_k: int = NO_LIMIT
    top_p: float = 1.0
    min_p: float = 0.0

    def settings(self, uniform: npt.NDArray[np.float64]) -> dict[str, Tensor]:
        count = len(uniform)
        return {
            "temperature_n": torch.full((count,), self.temperature),
            "top_k_n": torch.full((count,), self.top_k),
            "top_p_n": torch.full((count,), self.top_p, dtype=torch.float64),
            "min_p_n": torch.full((count,), self.min_p),
            "uniform_n": torch.from_numpy(uniform),
        }


LIMITS = (
    Limits(),
    Limits(temperature=0.3),
    Limits(temperature=8.0),
    Limits(min_p=0.02),
    Limits(top_k=1),
    Limits(top_k=40),
    Limits(top_k=900, temperature=3.0),
    Limits(top_k=6000, temperature=3.0),
    Limits(top_p=0.5),
    Limits(top_p=0.95, temperature=2.0),
    Limits(top_p=0.999, temperature=0.7),
    Limits(top_p=0.9, min_p=0.1),
    Limits(top_k=20, top_p=0.6, min_p=0.01),
)


def logits_of(num_rows: int, vocab_size: int, dtype: torch.dtype, *, seed: int = 0, spread: float = 2.0) -> Tensor:
    """Some clear favourites and many equals; some tokens are excluded. Rows of a wider tensor."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size + 8, generator=generator) * spread
    logits[:, :: max(1, vocab_size // 5)] += 4.0
    logits[:, vocab_size // 2 : vocab_size // 2 + 3] = -torch.inf
    logits[:, -9] = 1.0
    return logits.to(dtype)[:, :vocab_size]


def check_best_tokens(kernels: Any, dtype: torch.dtype, vocab_size: int, device: str = "cpu") -> None:
    """Equals, both zeros, infinities and NaN of either sign anywhere; also for some rows alone."""
    logits = logits_of(9, vocab_size, dtype)
    last = vocab_size - 1
    logits[1, [0, last]] = 40.0
    logits[2] = torch.where(torch.arange(vocab_size) % 3 == 1, 0.0, -0.0)
    logits[3] = -torch.inf
    logits[4, last // 2] = torch.inf
    logits[5, last] = torch.nan
    # of a negative NaN all bits are ones; a conversion would drop the sign
    logits.view(torch.int32 if dtype == torch.float32 else torch.int16)[6, last // 3] = -1
    logits[7] = -3.0
    logits[8] = torch.nan
    logits = logits.to(device)
    for rows in (None, torch.tensor([5, 1, 1, 6], device=device), torch.tensor([], dtype=torch.int64, device=device)):
        meant = logits if rows is None else logits[rows]
        tokens, top = kernels.best_tokens(logits, rows)
        wanted = torch.from_numpy(meant.float().cpu().numpy().argmax(axis=1))
        assert tokens.cpu().tolist() == wanted.tolist()
        assert top.dtype == torch.float32
        torch.testing.assert_close(top.cpu(), meant.float().cpu()[torch.arange(len(wanted)), wanted], equal_nan=True)


def check_choose_tokens(kernels: Any, dtype: torch.dtype, vocab_size: int, limits: Limits, device: str = "cpu") -> None:
    """Numbers from one end to the other, and the ends."""
    count = 12
    uniform = np.append((np.arange(count - 2) + 0.5) / (count - 2), [0.0, 1 - 2**-48])
    logits = logits_of(count, vocab_size, dtype, seed=3)
    logits[: count // 2] = logits[0].clone()
    tokens, top = (t.cpu() for t in kernels.choose_tokens(logits.to(device), None, **limits.settings(uniform)))
    assert torch.equal(top, logits.float().max(dim=1).values)
    for row, (token, number) in enumerate(zip(tokens.tolist(), uniform.tolist(), strict=True)):
        start, end, mass = interval_of(token, logits[row].double().numpy(), limits)
        slack = TOLERANCE * mass
        assert start - slack <= number * mass <= end + slack, f"row {row}: {token} holds {start / mass} to {end / mass}"
        assert end > start or number * mass > mass - slack


def interval_of(token: int, logits: npt.NDArray[np.float64], limits: Limits) -> tuple[float, float, float]:
    """Where the running sum of weights enters and leaves the token, and the sum of all that are kept. In the order of
    weights a token may change places with another logit whose weight float32 does not tell from its own."""
    exponents = (logits - logits.max()) / float(np.float32(limits.temperature))
    weights = np.exp(exponents)
    weights[weights < float(np.float32(limits.min_p))] = 0.0
    has_limit = limits.top_k < len(logits) or limits.top_p < 1.0
    order = np.argsort(-weights, kind="stable") if has_limit else np.arange(len(logits))
    sums = weights[order].cumsum()
    last = min(limits.top_k, len(logits)) - 1
    if limits.top_p < 1.0:
        last = min(last, int((sums < limits.top_p * sums[last]).sum()))
    place = int(np.flatnonzero(order == token)[0])
    start = sums[place] - weights[token]
    end = sums[place]
    if has_limit:
        is_close = np.abs(exponents - exponents[token]) <= CLOSE * (1.0 - exponents[token])
        is_close &= logits != logits[token]
        before = order[:place]
        behind = order[place + 1 :]
        start -= weights[before][is_close[before]].sum()
        end += weights[behind][is_close[behind]].sum()
    mass = float(sums[last])
    return min(float(start), mass), min(float(end), mass), mass


def check_mixed_rows(kernels: Any, dtype: torch.dtype) -> None:
    """Every row draws in its own way; alone, and picked out of others, it draws the same."""
    count, vocab_size = 40, 20_000
    random = np.random.default_rng(4)
    columns = {
        "temperature_n": random.choice([0.0, 0.5, 1.0, 3.0], count).astype(np.float32),
        "top_k_n": random.choice([1, 40, 5000, NO_LIMIT, NO_LIMIT], count),
        "top_p_n": random.choice([0.3, 0.99, 1.0, 1.0], count),
        "min_p_n": random.choice([0.0, 0.0, 0.02], count).astype(np.float32),
        "uniform_n": random.random(count),
    }
    settings = {name: torch.from_numpy(column) for name, column in columns.items()}
    logits = logits_of(count, vocab_size, dtype, seed=5)
    together, top = kernels.choose_tokens(logits, None, **settings)
    for row in range(count):
        own = {name: column[row : row + 1] for name, column in settings.items()}
        alone = kernels.choose_tokens(logits[row : row + 1], None, **own)
        picked = kernels.choose_tokens(logits, torch.tensor([row]), **own)
        assert (int(alone[0]), float(alone[1])) == (int(picked[0]), float(picked[1]))
        assert (int(together[row]), float(top[row])) == (int(alone[0]), float(alone[1]))
    is_greedy = settings["temperature_n"] == 0
    assert torch.equal(together[is_greedy], kernels.best_tokens(logits)[0][is_greedy])


def check_token_logprobs(kernels: Any, dtype: torch.dtype, vocab_size: int, most: int, device: str = "cpu") -> None:
    """Against float64; ranks and the best tokens exactly."""
    logits = logits_of(8, vocab_size, dtype, seed=6).to(device)
    logits[1] = 0.5
    logits[2] = torch.where(torch.arange(vocab_size, device=device) % 3 == 1, 0.0, -0.0)
    most = min(most, vocab_size)
    rows = torch.tensor([7, 0, 1, 2, 2, 4, 6], device=device)
    tokens = torch.tensor([0, vocab_size - 1, vocab_size // 2, 0, vocab_size - 1, vocab_size // 3, 1 % vocab_size])
    values, ranks, ids, best = (t.cpu() for t in kernels.token_logprobs(logits, rows, tokens.to(device), most))
    expected = logits[rows].double().log_softmax(-1).cpu()
    torch.testing.assert_close(values.double(), expected[torch.arange(len(rows)), tokens], atol=2e-6, rtol=3e-7)
    for i, row in enumerate(logits[rows].float().cpu().numpy()):
        order = np.argsort(-row, kind="stable")
        assert ids[i].tolist() == order[:most].tolist()
        assert int(ranks[i]) == int(np.flatnonzero(order == int(tokens[i]))[0]) + 1
        torch.testing.assert_close(best[i].double(), expected[i][ids[i]], atol=2e-6, rtol=3e-7)


def check_gather_logits(kernels: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    logits, rows = logits_of(6, 1001, dtype).to(device), torch.tensor([5, 0, 5], device=device)
    out = torch.full((3, 1001), torch.nan, device=device)
    kernels.gather_logits(logits, rows, out)
    assert torch.equal(out, logits[rows].float())


def check_apply_bitmask(kernels: Any, vocab_size: int, device: str = "cpu") -> None:
    """Rows of a batch in any order, masks as wide as the logits, wider and narrower; the other rows stay."""
    generator = np.random.default_rng(vocab_size)
    rows = [5, 0, 3]
    for num_words in {-(-vocab_size // 32), vocab_size // 32, vocab_size // 32 + 3}:
        mask = generator.integers(-(2**31), 2**31, size=(3, num_words)).astype(np.int32)
        mask[0], mask[1, : num_words // 2] = 0, -1
        bits = np.unpackbits(mask.view(np.uint8).reshape(3, -1), axis=1, bitorder="little")
        is_allowed = np.zeros((3, vocab_size), dtype=bool)
        width = min(vocab_size, 32 * num_words)
        is_allowed[:, :width] = bits[:, :width]
        # beside other columns, so that a row is longer than what is meant
        logits = torch.from_numpy(generator.normal(size=(6, vocab_size + 5)).astype(np.float32)).to(device)[:, 2:-3]
        expected = logits.cpu().numpy().copy()
        expected[rows] = np.where(is_allowed, expected[rows], -np.inf)
        kernels.apply_bitmask(logits, torch.tensor(rows, device=device), torch.from_numpy(mask).to(device))
        np.testing.assert_array_equal(logits.cpu().numpy(), expected)


def check_penalise(kernels: Any, device: str = "cpu") -> None:
    """Bit for bit: every token by itself, in the order of the definition. Ids may lie beyond the vocabulary."""
    random, vocab_size = np.random.default_rng(7), 300
    tokens = torch.from_numpy(random.integers(0, 330, (5, 200)).astype(np.int32))
    columns: dict[str, Any] = {
        "rows_n": np.array([3, 0, 0, 4, 1, 2]),
        "num_prompt_n": np.array([20, 0, 0, 30, 200, 7]),
        "lengths_n": np.array([120, 60, 61, 200, 200, 7]),
        "repetition_n": np.array([1.3, 1.0, 1.0, 1.0, 0.8, 1.1], dtype=np.float32),
        "frequency_n": np.array([0.1, 0.7, 0.7, 0.0, 0.3, 0.2], dtype=np.float32),
        "presence_n": np.array([0.0, -0.4, -0.4, 0.0, 0.3, 0.2], dtype=np.float32),
    }
    logits = logits_of(6, vocab_size, torch.float32)
    expected = logits.clone()
    for i, (row, num_prompt, length, *strengths) in enumerate(zip(*columns.values(), strict=True)):
        repetition, frequency, presence = strengths
        output = tokens[row, num_prompt:length].tolist()
        for token in {*output, *(tokens[row, :length].tolist() if repetition != 1.0 else [])}:
            if token >= vocab_size:
                continue
            logit, count = np.float32(float(expected[i, token])), output.count(token)
            logit = logit / repetition if logit > 0 else logit * repetition
            logit -= frequency * np.float32(count)
            expected[i, token] = float(logit - presence if count else logit)
    mine = logits.to(device).contiguous()
    kernels.penalise(mine, tokens, **{name: torch.from_numpy(column) for name, column in columns.items()})
    assert torch.equal(mine.cpu(), expected)
