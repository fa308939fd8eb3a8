"""Prompts computed by one engine and output by another, of models whose layers keep other things than all tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.token_engine import TokenEngine

from quire import SamplingParams
from quire.messages import KVTransfer
from quire.testing.tiny_checkpoints import make_checkpoint

BLOCK_SIZE = 4
LENGTHS = (61, 1, 4, 32, 17, 90)
PROMPTS = [[(7 * length + 3 * place * place) % 250 + 5 for place in range(length)] for length in LENGTHS]
COMMON: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
SAMPLINGS = [
    SamplingParams(temperature=0.0, **COMMON),
    SamplingParams(temperature=1.0, top_p=0.9, **COMMON),
    SamplingParams(temperature=0.0, presence_penalty=1.0, **COMMON),
] * 2
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": 600,
    "max_model_len": 160,
    "max_num_batched_tokens": 16,
    "check_invariants": True,
}
WINDOWS = ("mistral", "gemma3", "gpt_oss", "qwen2_window")
STATES = ("qwen3_next", "granitemoehybrid", "mamba2", "lfm2")
KINDS = [
    pytest.param(kind, marks=() if kind in ("gemma3", "qwen3_next") else pytest.mark.nightly)
    for kind in (*WINDOWS, *STATES)
]


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gemma3"), "gemma3")


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def open_engine() -> Iterator[Callable[..., TokenEngine]]:
    opened: list[TokenEngine] = []

    def open_one(path: Path, store: Path | None = None, **options: Any) -> TokenEngine:
        values = OPTIONS | options
        if store is not None:
            args = {"rule": "always", "max_wait": 30.0, "stores": [f"file://{store}"]}
            values |= {"kv_connector": {"name": "tiered", **args}}
        opened.append(TokenEngine(model=str(path), **values))
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()


def one_token(sampling: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(sampling, max_tokens=1)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("num_here", [0, 16])
def test_another_engine_goes_on(
    path: Path, tmp_path: Path, open_engine: Callable[..., TokenEngine], async_scheduling: bool, num_here: int
) -> None:
    options = {"async_scheduling": async_scheduling}
    expected = open_engine(path, **options).run(PROMPTS, SAMPLINGS)
    first, second = open_engine(path, tmp_path, **options), open_engine(path, tmp_path, **options)
    if num_here:
        second.run([[*prompt[:num_here], 3] for prompt in PROMPTS], list(map(one_token, SAMPLINGS)))
    begun = first.run(PROMPTS, list(map(one_token, SAMPLINGS)), [KVTransfer(store="any") for _ in PROMPTS])
    transfers = [KVTransfer(fetch="any", num_fetch_tokens=len(prompt), num_output_tokens=1) for prompt in PROMPTS]
    sent = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, begun, strict=True)]
    before = second.number("num_prefix_hit_tokens_total")
    rest = second.run(sent, SAMPLINGS, transfers)
    assert [[*tokens, *more] for tokens, more in zip(begun, rest, strict=True)] == expected
    here = second.number("num_prefix_hit_tokens_total") - before
    assert second.number("fetched_tokens_total") == sum(LENGTHS) - here
    assert (here > 0) == (num_here > 0)


def test_windows_are_found_after_a_restart(
    gemma3: Path, tmp_path: Path, open_engine: Callable[..., TokenEngine]
) -> None:
    """Whole blocks, of which those are moved that no window has passed."""
    expected = open_engine(gemma3).run(PROMPTS, SAMPLINGS)
    first = open_engine(gemma3, tmp_path)
    first.run(PROMPTS, list(map(one_token, SAMPLINGS)))
    num_stored = first.number("stored_blocks_total")
    first.close()
    second = open_engine(gemma3, tmp_path)
    assert second.run(PROMPTS, SAMPLINGS) == expected
    num_blocks = sum((length - 1) // BLOCK_SIZE for length in LENGTHS)
    assert second.number("fetched_tokens_total") == num_blocks * BLOCK_SIZE
    # of two blocks that are full at the end of their prompt the last token is computed again
    num_groups, rest = divmod(num_stored, sum(length // BLOCK_SIZE for length in LENGTHS))
    assert (num_groups > 1, rest) == (True, 0)
    assert num_blocks <= second.number("fetched_blocks_total") < num_blocks * num_groups
