"""Two engines of one process: one computes a prompt, the other goes on with its KV. The tokens are as of one engine."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.token_engine import TokenEngine

from quire.errors import OptionError
from quire.messages import KVTransfer
from quire.sampling_params import SamplingParams
from quire.testing.tiny_checkpoints import make_checkpoint

BLOCK_SIZE = 4
NUM_TOKENS = 20
LENGTHS = [30, 1, 4, 17, 48]
PROMPTS = [[(7 * length + 3 * place * place) % 250 + 5 for place in range(length)] for length in LENGTHS]
COMMON: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
SAMPLINGS = [
    SamplingParams(temperature=0.0, **COMMON),
    SamplingParams(temperature=1.0, top_p=0.9, **COMMON),
    # what counts as output must be the same on both sides
    SamplingParams(temperature=0.0, presence_penalty=1.0, frequency_penalty=0.7, **COMMON),
    SamplingParams(temperature=0.8, repetition_penalty=1.3, **COMMON),
    SamplingParams(temperature=0.0, min_tokens=9, max_tokens=NUM_TOKENS, stop_token_ids=list(range(0, 300, 3))),
]
# a step costs a second, a draft nothing: every row gets as many as it may have
FREE_DRAFTS = {
    "seconds_per_step": 1.0,
    **dict.fromkeys(
        ("seconds_per_token", "seconds_of_drafting", "seconds_per_draft_step", "seconds_per_draft_token"), 0.0
    ),
}
names = itertools.count()


class Engine(TokenEngine):
    """With the memory connector, if it has a store."""

    def __init__(self, path: Path, store: str | None, **options: Any) -> None:
        values: dict[str, Any] = {
            "dtype": "float32",
            "device": "cpu",
            "num_threads": 1,
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": 200,
            "max_model_len": 96,
            "max_num_batched_tokens": 16,
            "check_invariants": True,
        }
        if store is not None:
            values |= {"kv_connector": {"name": "memory", "store": store}}
        super().__init__(model=str(path), **(values | options))


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    opened: list[Engine] = []
    yield opened
    for engine in opened:
        engine.client.close()


def pair_of(path: Path, engines: list[Engine], **options: Any) -> tuple[Engine, Engine, Engine]:
    """One that computes prompts, one that goes on, and one that does all alone."""
    store = f"store {next(names)}"
    engines += [Engine(path, store, **options), Engine(path, store, **options), Engine(path, None, **options)]
    first, second, alone = engines
    return first, second, alone


def compute(first: Engine, prompts: list[list[int]], samplings: list[SamplingParams]) -> list[list[int]]:
    """The first token of each; the KV lies under "kv PLACE"."""
    one_token = [_with_one_token(sampling) for sampling in samplings]
    return first.run(prompts, one_token, [KVTransfer(store=f"kv {place}") for place in range(len(prompts))])


def _with_one_token(sampling: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(sampling, max_tokens=1, min_tokens=min(1, sampling.min_tokens))


def go_on(
    second: Engine, prompts: list[list[int]], samplings: list[SamplingParams], begun: list[list[int]]
) -> list[list[int]]:
    """All tokens of each, those of the first engine included."""
    transfers = [
        KVTransfer(fetch=f"kv {place}", num_fetch_tokens=len(prompt), num_output_tokens=1)
        for place, prompt in enumerate(prompts)
    ]
    sent = [[*prompt, *tokens] for prompt, tokens in zip(prompts, begun, strict=True)]
    rest = second.run(sent, samplings, transfers)
    return [[*tokens, *more] for tokens, more in zip(begun, rest, strict=True)]


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_tokens_are_those_of_one_engine(path: Path, engines: list[Engine], async_scheduling: bool) -> None:
    first, second, alone = pair_of(path, engines, async_scheduling=async_scheduling)
    begun = compute(first, PROMPTS, SAMPLINGS)
    assert go_on(second, PROMPTS, SAMPLINGS, begun) == alone.run(PROMPTS, SAMPLINGS)
    assert second.number("fetched_tokens_total") == sum(map(len, PROMPTS))
    num_blocks = sum(blocks_for(len(prompt)) for prompt in PROMPTS)
    assert first.number("stored_blocks_total") == second.number("fetched_blocks_total") == num_blocks


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_when_memory_is_short(llama: Path, engines: list[Engine], mode: str) -> None:
    first, second, alone = pair_of(llama, engines, num_gpu_blocks_override=24, preemption_mode=mode)
    begun = compute(first, PROMPTS, SAMPLINGS)
    assert go_on(second, PROMPTS, SAMPLINGS, begun) == alone.run(PROMPTS, SAMPLINGS)
    assert second.number(f"num_preemptions_by_{mode}_total") > 0
    assert second.number("fetched_blocks_total") > 0


def test_the_cache_of_a_draft_comes_along(
    llama: Path, engines: list[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers lie in the same blocks. A twin of the model is always right if it has seen the whole prompt."""
    monkeypatch.setattr("quire.worker.worker.measure_costs", lambda *_: FREE_DRAFTS)
    draft = {"model": str(make_checkpoint(tmp_path, "llama")), "num_speculative_tokens": 3}
    first, second, alone = pair_of(llama, engines, speculative_config=draft)
    expected = alone.run(PROMPTS[:2], SAMPLINGS[:2])
    # to the end, because a draft does not follow where nothing is ever drafted
    assert first.run(PROMPTS[:2], SAMPLINGS[:2], [KVTransfer(store="kv 0"), KVTransfer(store="kv 1")]) == expected
    assert go_on(second, PROMPTS[:2], SAMPLINGS[:2], [tokens[:1] for tokens in expected]) == expected
    assert second.number("fetched_tokens_total") == sum(map(len, PROMPTS[:2]))
    assert second.number("num_accepted_draft_tokens_total") == second.number("num_draft_tokens_total") > 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_what_is_here_is_not_moved(llama: Path, engines: list[Engine], async_scheduling: bool) -> None:
    first, second, alone = pair_of(llama, engines, async_scheduling=async_scheduling)
    prompt, sampling = PROMPTS[4], SAMPLINGS[0]
    second.run([[*prompt[:21], 3]], [_with_one_token(sampling)])
    begun = compute(first, [prompt], [sampling])
    assert go_on(second, [prompt], [sampling], begun) == alone.run([prompt], [sampling])
    assert second.number("fetched_blocks_total") == blocks_for(len(prompt)) - 21 // BLOCK_SIZE
    assert second.number("fetched_tokens_total") == len(prompt) - 20


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_what_is_lost_is_computed(llama: Path, engines: list[Engine], async_scheduling: bool) -> None:
    _, second, alone = pair_of(llama, engines, async_scheduling=async_scheduling)
    expected = alone.run(PROMPTS, SAMPLINGS)
    begun = [tokens[:1] for tokens in expected]
    assert go_on(second, PROMPTS, SAMPLINGS, begun) == expected
    assert second.number("fetched_tokens_total") == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"block_size": 8}, "block_size 4, not 8"), ({"dtype": "bfloat16"}, " float32, not ")],
)
def test_what_another_engine_lays_out_otherwise_is_computed(
    llama: Path, engines: list[Engine], options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = f"store {next(names)}"
    engines += [Engine(llama, store, **options), Engine(llama, store), Engine(llama, None)]
    first, second, alone = engines
    compute(first, PROMPTS, SAMPLINGS)
    expected = alone.run(PROMPTS, SAMPLINGS)
    assert go_on(second, PROMPTS, SAMPLINGS, [tokens[:1] for tokens in expected]) == expected
    assert second.number("fetched_tokens_total") == 0
    assert second.number("num_prefixes_refused_total") == len(PROMPTS)
    assert reason in caplog.text


def test_another_model_does_not_take_it(llama: Path, engines: list[Engine], tmp_path: Path) -> None:
    """The same shapes, other weights."""
    store = f"store {next(names)}"
    engines += [Engine(make_checkpoint(tmp_path, "llama", seed=4), store), Engine(llama, store), Engine(llama, None)]
    first, second, alone = engines
    compute(first, PROMPTS, SAMPLINGS)
    expected = alone.run(PROMPTS, SAMPLINGS)
    assert go_on(second, PROMPTS, SAMPLINGS, [tokens[:1] for tokens in expected]) == expected
    assert second.number("fetched_tokens_total") == 0


def test_both_may_run_at_once(llama: Path, engines: list[Engine]) -> None:
    """Each in a thread: what one stores the other fetches meanwhile, or computes if it is not there yet."""
    first, second, alone = pair_of(llama, engines)
    expected = alone.run(PROMPTS, SAMPLINGS)
    computing = threading.Thread(target=compute, args=(first, PROMPTS, SAMPLINGS))
    computing.start()
    for _ in range(3):
        assert go_on(second, PROMPTS, SAMPLINGS, [tokens[:1] for tokens in expected]) == expected
        second.client.control("reset_prefix_cache")
    computing.join()
    assert go_on(second, PROMPTS, SAMPLINGS, [tokens[:1] for tokens in expected]) == expected
    assert second.number("fetched_tokens_total") > 0


# ---- options


def test_a_model_with_windows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="sliding window"):
        Engine(make_checkpoint(tmp_path, "mistral"), "windows")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_connector": {"name": "memroy"}}, 'must be one of memory, tiered. Did you mean "memory"'),
        ({"kv_connector": {"name": "memory", "stroe": "a"}}, "stroe"),
        ({"kv_connector": {"name": "memory", "max_bytes": -1}}, "max_bytes=-1"),
        ({"kv_connector": {"store": "a"}}, "has no name"),
    ],
)
def test_a_wrong_option_says_what_is_wrong(llama: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        Engine(llama, None, **options)
