"""Recurrences: C++ as the reference says, and the same bits however a sequence is cut into steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.worker import kernels
from quire.worker.kernels import cpu, reference

CHANNELS, WIDTH = 70, 4
HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 6, 17, 24
GROUPS, STATE_SIZE = 2, 19
# a function of (inputs of some tokens, states, spans) that fills `out`
Run = Callable[[Any, list[Tensor], Tensor, tuple[Tensor, Tensor, Tensor], Tensor], None]


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def conv(home: Any, inputs: list[Tensor], state: Tensor, spans: tuple[Tensor, Tensor, Tensor], out: Tensor) -> None:
    weight, bias = randn(CHANNELS, WIDTH, seed=1), randn(CHANNELS, seed=2)
    home.causal_conv(*inputs, weight, bias, state, *spans, out, has_silu=True)


def rule(home: Any, inputs: list[Tensor], state: Tensor, spans: tuple[Tensor, Tensor, Tensor], out: Tensor) -> None:
    home.gated_delta_rule(*inputs, randn(VALUE_HEADS, seed=3), randn(VALUE_HEADS, seed=4), state, *spans, out)


def scan(home: Any, inputs: list[Tensor], state: Tensor, spans: tuple[Tensor, Tensor, Tensor], out: Tensor) -> None:
    x, dt, b, c = inputs
    dt_bias, a_log, skip = (randn(VALUE_HEADS, seed=seed) for seed in (2, 3, 4))
    home.ssd_scan(x, dt, dt_bias, a_log, b, c, skip, state, *spans, out, least_dt=0.01, most_dt=2.0)


def conv_inputs(tokens: int) -> list[Tensor]:
    return [randn(tokens, CHANNELS, seed=5)]


def rule_inputs(tokens: int) -> list[Tensor]:
    query, key = (randn(tokens, HEADS, KEY_DIM, seed=seed) for seed in (5, 6))
    value = randn(tokens, VALUE_HEADS, VALUE_DIM, seed=7)
    a, b = (randn(tokens, VALUE_HEADS, seed=seed) for seed in (8, 9))
    return [query, key, value, a, b]


def scan_inputs(tokens: int) -> list[Tensor]:
    b, c = (randn(tokens, GROUPS, STATE_SIZE, seed=seed) for seed in (6, 7))
    return [randn(tokens, VALUE_HEADS, VALUE_DIM, seed=5), randn(tokens, VALUE_HEADS, seed=8), b, c]


KINDS: dict[str, tuple[Run, Callable[[int], list[Tensor]], tuple[int, ...]]] = {
    "conv": (conv, conv_inputs, (CHANNELS, WIDTH)),
    "rule": (rule, rule_inputs, (VALUE_HEADS, KEY_DIM, VALUE_DIM)),
    "scan": (scan, scan_inputs, (VALUE_HEADS, VALUE_DIM, STATE_SIZE)),
}
HOMES = {"reference": reference, "cpu": kernels}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=HOMES)
def home(request: pytest.FixtureRequest) -> Any:
    if request.param == "cpu" and not cpu.load():
        pytest.skip("the C++ kernels were not built")
    return HOMES[request.param]


def step(
    kind: str, home: Any, states: Tensor, pieces: Sequence[list[Tensor]], kept: Sequence[int], read: Sequence[int]
) -> list[Tensor]:
    """One step over these pieces of sequences; their outputs."""
    run, _, _ = KINDS[kind]
    counts = [len(piece[0]) for piece in pieces]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    inputs = [torch.cat(columns) for columns in zip(*pieces, strict=True)]
    out = torch.full_like(inputs[2 if kind == "rule" else 0], torch.nan)
    run(home, inputs, states, (starts, torch.tensor(kept), torch.tensor(read)), out)
    return list(out.split(counts))


def zeros(kind: str, count: int) -> Tensor:
    """States with a stride between them that is not their size, as gathered ones have."""
    shape = KINDS[kind][2]
    size = torch.Size(shape).numel()
    return torch.zeros(count, size + 4)[:, :size].unflatten(1, shape)


def piece(inputs: list[Tensor], start: int, end: int) -> list[Tensor]:
    return [tensor[start:end] for tensor in inputs]


def test_cpu_is_as_the_reference(kind: str) -> None:
    if not cpu.load():
        pytest.skip("the C++ kernels were not built")
    inputs = KINDS[kind][1](40)
    pieces = [piece(inputs, 0, 1), piece(inputs, 1, 30), piece(inputs, 30, 40)]
    results = []
    for home in HOMES.values():
        states = zeros(kind, 3)
        outs = step(kind, home, states, pieces, [1, 29, 7], [0, 0, 0])
        results.append((torch.cat(outs), states.clone()))
    torch.testing.assert_close(*(out for out, _ in results), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(*(states for _, states in results), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("cuts", [[30], [1] * 30, [7, 16, 7], [29, 1]])
def test_bits_do_not_depend_on_cuts_and_neighbours(kind: str, home: Any, cuts: list[int]) -> None:
    inputs = KINDS[kind][1](30)
    whole = zeros(kind, 1)
    [expected] = step(kind, home, whole, [inputs], [30], [0])
    states = zeros(kind, 2)
    outs, done = [], 0
    for count in cuts:
        other = piece(inputs, 3, 8)
        outs.append(step(kind, home, states, [other, piece(inputs, done, done + count)], [5, count], [0, 0])[1])
        done += count
    assert torch.equal(torch.cat(outs), expected)
    assert torch.equal(states[1], whole[0])


def test_what_is_not_kept_leaves_the_state(kind: str, home: Any) -> None:
    inputs = KINDS[kind][1](12)
    plain, drafted = zeros(kind, 1), zeros(kind, 1)
    [expected] = step(kind, home, plain, [inputs], [12], [0])
    [first] = step(kind, home, drafted, [piece(inputs, 0, 9)], [5], [0])
    [rest] = step(kind, home, drafted, [piece(inputs, 5, 12)], [7], [0])
    assert torch.equal(first, expected[:9])
    assert torch.equal(rest, expected[5:])
    assert torch.equal(drafted, plain)


def test_the_last_token_can_be_read_again(kind: str, home: Any) -> None:
    inputs = KINDS[kind][1](12)
    plain, read = zeros(kind, 1), zeros(kind, 1)
    [expected] = step(kind, home, plain, [inputs], [12], [0])
    step(kind, home, read, [piece(inputs, 0, 8)], [8], [0])
    [again] = step(kind, home, read, [piece(inputs, 7, 8)], [1], [1])
    [rest] = step(kind, home, read, [piece(inputs, 7, 12)], [5], [1])
    assert torch.equal(again, expected[7:8])
    assert torch.equal(rest, expected[7:])
    assert torch.equal(read, plain)
