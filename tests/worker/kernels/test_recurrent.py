"""Recurrences: C++ as the reference says, and the same bits however a sequence is cut into steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.testing.kernel_contracts import assert_close
from quire.worker import kernels
from quire.worker.kernels import cpu, reference
from quire.worker.kernels.cpu.build import HERE
from quire.worker.kernels.sequence_states import SequenceStates, bytes_of, floats_of

CHANNELS, WIDTH = 70, 4
HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 6, 17, 24
GROUPS, STATE_SIZE = 2, 19
PLACES, FIRST_CHUNK, CHUNK_BYTES = 3, 2, 200
# a function of (home, inputs of some tokens, states as the home takes them) that fills `out`
Run = Callable[[Any, list[Tensor], Sequence[Any], Tensor], None]


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def conv(home: Any, inputs: list[Tensor], states: Sequence[Any], out: Tensor) -> None:
    weight, bias = randn(WIDTH, CHANNELS, seed=1), randn(CHANNELS, seed=2)
    home.causal_conv(*inputs, weight, bias, *states, out, has_silu=True)


def rule(home: Any, inputs: list[Tensor], states: Sequence[Any], out: Tensor) -> None:
    home.gated_delta_rule(*inputs, randn(VALUE_HEADS, seed=3), randn(VALUE_HEADS, seed=4), *states, out)


def scan(home: Any, inputs: list[Tensor], states: Sequence[Any], out: Tensor) -> None:
    x, dt, b, c = inputs
    dt_bias, a_log, skip = (randn(VALUE_HEADS, seed=seed) for seed in (2, 3, 4))
    home.ssd_scan(x, dt, dt_bias, a_log, b, c, skip, *states, out, least_dt=0.01, most_dt=2.0)


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
    "conv": (conv, conv_inputs, (WIDTH, CHANNELS)),
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


class Pool:
    """States of some sequences in the blocks of a cache, whose other bytes belong to somebody else."""

    def __init__(self, kind: str, count: int) -> None:
        self.shape = KINDS[kind][2]
        self.positions = [0] * count
        num_chunks = FIRST_CHUNK - (-bytes_of(*self.shape) // CHUNK_BYTES)
        num_blocks = -(-num_chunks // PLACES)
        order = torch.randperm(count * num_blocks + 3, generator=torch.Generator().manual_seed(9))
        self.tables = order[: count * num_blocks].view(count, num_blocks)
        # 0xFF: what was never written must not be read, and what is not theirs must stay so
        self.places = [torch.full((len(order), CHUNK_BYTES), 0xFF, dtype=torch.uint8) for _ in range(PLACES)]

    def of_step(self, counts: Sequence[int], kept: Sequence[int], read: Sequence[int]) -> SequenceStates:
        starts = [position - back for position, back in zip(self.positions, read, strict=True)]
        self.positions = [start + absorbed for start, absorbed in zip(starts, kept, strict=True)]
        query_starts = torch.tensor([0, *counts]).cumsum(0).int()
        return SequenceStates(
            self.places, FIRST_CHUNK, self.tables, torch.tensor(starts), query_starts, torch.tensor(kept)
        )

    def values(self) -> Tensor:
        now = SequenceStates(
            self.places, FIRST_CHUNK, self.tables, torch.tensor(self.positions), torch.zeros(0), torch.zeros(0)
        )
        buffer, num_read = now.gather(bytes_of(*self.shape))
        assert not num_read.any(), "states say how many tokens they have absorbed"
        return floats_of(buffer, *self.shape).clone()

    def check_others(self) -> None:
        """Chunks before and behind the states, and blocks of nobody."""
        num_chunks = -(-bytes_of(*self.shape) // CHUNK_BYTES)
        for number in range(self.tables.shape[1] * PLACES):
            if not FIRST_CHUNK <= number < FIRST_CHUNK + num_chunks:
                entry, place = divmod(number, PLACES)
                assert bool((self.places[place][self.tables[:, entry]] == 0xFF).all())
        nobody = sorted(set(range(len(self.places[0]))) - set(self.tables.flatten().tolist()))
        assert all(bool((place[nobody] == 0xFF).all()) for place in self.places)


@contextmanager
def isa_for_a_while(name: str | None) -> Iterator[None]:
    if not cpu.load():
        pytest.skip("the C++ kernels were not built")
    before = cpu.statistics()["isa"]
    if name is not None and not cpu.select_isa(name):
        pytest.skip(f"this processor has no {name}")
    yield
    cpu.select_isa(before)


def step(
    kind: str, home: Any, pool: Pool, pieces: Sequence[list[Tensor]], kept: Sequence[int], read: Sequence[int]
) -> list[Tensor]:
    """One step over these pieces of sequences; their outputs."""
    run, _, _ = KINDS[kind]
    counts = [len(piece[0]) for piece in pieces]
    inputs = [torch.cat(columns) for columns in zip(*pieces, strict=True)]
    out = torch.full_like(inputs[2 if kind == "rule" else 0], torch.nan)
    states = pool.of_step(counts, kept, read)
    run(home, inputs, states.arguments() if home is reference else [states], out)
    pool.check_others()
    return list(out.split(counts))


def piece(inputs: list[Tensor], start: int, end: int) -> list[Tensor]:
    return [tensor[start:end] for tensor in inputs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("isa", [isa for isa in HERE.isas if isa not in HERE.only])
def test_cpu_is_as_the_reference(kind: str, isa: str, dtype: torch.dtype) -> None:
    inputs = [tensor.to(dtype) for tensor in KINDS[kind][1](40)]
    pieces = [piece(inputs, 0, 1), piece(inputs, 1, 30), piece(inputs, 30, 40)]
    results = []
    for name, home in HOMES.items():
        with isa_for_a_while(isa if name == "cpu" else None):
            pool = Pool(kind, 3)
            outs = step(kind, home, pool, pieces, [1, 29, 7], [0, 0, 0])
            results.append((torch.cat(outs), pool.values()))
    assert_close(*(out for out, _ in results))
    torch.testing.assert_close(*(states for _, states in results), atol=1e-5, rtol=1e-4)


def test_inputs_may_be_views(kind: str) -> None:
    """What a projection gives is cut into pieces that are not copied."""
    inputs = KINDS[kind][1](9)
    wide = [torch.cat([tensor, torch.full_like(tensor, torch.nan)], dim=-1) for tensor in inputs]
    views = [tensor[..., : plain.shape[-1]] for tensor, plain in zip(wide, inputs, strict=True)]
    run, _, _ = KINDS[kind]
    outs = []
    for own in (inputs, views):
        out = torch.empty(inputs[2 if kind == "rule" else 0].shape)
        run(kernels, own, [Pool(kind, 1).of_step([9], [9], [0])], out)
        outs.append(out)
    assert torch.equal(*outs)


@pytest.mark.parametrize("cuts", [[30], [1] * 30, [7, 16, 7], [29, 1]])
def test_bits_do_not_depend_on_cuts_and_neighbours(kind: str, home: Any, cuts: list[int]) -> None:
    inputs = KINDS[kind][1](30)
    whole = Pool(kind, 1)
    [expected] = step(kind, home, whole, [inputs], [30], [0])
    pool = Pool(kind, 2)
    outs, done = [], 0
    for count in cuts:
        other = piece(inputs, 3, 8)
        outs.append(step(kind, home, pool, [other, piece(inputs, done, done + count)], [5, count], [0, 0])[1])
        done += count
    assert torch.equal(torch.cat(outs), expected)
    assert torch.equal(pool.values()[1], whole.values()[0])


def test_what_is_not_kept_leaves_the_state(kind: str, home: Any) -> None:
    inputs = KINDS[kind][1](12)
    plain, drafted = Pool(kind, 1), Pool(kind, 1)
    [expected] = step(kind, home, plain, [inputs], [12], [0])
    [first] = step(kind, home, drafted, [piece(inputs, 0, 9)], [5], [0])
    [rest] = step(kind, home, drafted, [piece(inputs, 5, 12)], [7], [0])
    assert torch.equal(first, expected[:9])
    assert torch.equal(rest, expected[5:])
    assert torch.equal(drafted.values(), plain.values())


def test_the_last_token_can_be_read_again(kind: str, home: Any) -> None:
    inputs = KINDS[kind][1](12)
    plain, read = Pool(kind, 1), Pool(kind, 1)
    [expected] = step(kind, home, plain, [inputs], [12], [0])
    step(kind, home, read, [piece(inputs, 0, 8)], [8], [0])
    [again] = step(kind, home, read, [piece(inputs, 7, 8)], [1], [1])
    [rest] = step(kind, home, read, [piece(inputs, 7, 12)], [5], [1])
    assert torch.equal(again, expected[7:8])
    assert torch.equal(rest, expected[7:])
    assert torch.equal(read.values(), plain.values())
