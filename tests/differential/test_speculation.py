"""Speculation end to end: the same tokens with any proposer, with steps in flight and without, when memory is short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.eagle_checkpoints import make_eagle3_head, make_eagle_head
from tests.support.sampled import sampled

from quire import LLM, SamplingParams
from quire.testing.tiny_checkpoints import make_checkpoint

SHARED = list(range(40, 75))
PROMPTS = [
    [5, 6, 7, 8, 9, 10, 11],
    [200, 3, 77],
    SHARED,
    [*SHARED, 9, 9],
    [*SHARED, 1],
    [4, 5, 6] * 9,
    [31],
]
COMMON: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
SAMPLINGS = [
    SamplingParams(temperature=0.0, **COMMON),
    SamplingParams(temperature=1.0, top_p=0.9, seed=3, **COMMON),
    SamplingParams(temperature=0.8, n=3, seed=5, **COMMON),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.5, logprobs=2, **COMMON),
    SamplingParams(temperature=0.7, top_k=20, min_p=0.02, seed=8, **COMMON),
    SamplingParams(temperature=0.0, min_tokens=5, max_tokens=33, stop_token_ids=list(range(0, 300, 11))),
    SamplingParams(temperature=1.3, frequency_penalty=0.5, seed=2, prompt_logprobs=1, **COMMON),
]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "block_size": 4,
    "max_num_batched_tokens": 24,
    "max_model_len": 96,
    "check_invariants": True,
    "engine_process": False,
}
MEMORY = {
    "ample": {"num_gpu_blocks_override": 600},
    "recompute": {"num_gpu_blocks_override": 70, "preemption_mode": "recompute"},
    "swap": {"num_gpu_blocks_override": 70, "preemption_mode": "swap"},
}
METHODS = ("twin", "small", "windowed", "eagle", "eagle3", "ngram")
# A step costs a second, a draft nothing: every row gets as many drafts as it may have.
FREE_DRAFTS = dict.fromkeys(
    ("seconds_per_token", "seconds_of_drafting", "seconds_per_draft_step", "seconds_per_draft_token"), 0.0
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("speculation")
    target = make_checkpoint(path / "target", "llama")
    return {
        "target": target,
        "twin": make_checkpoint(path / "twin", "llama"),
        "small": make_checkpoint(path / "small", "qwen3", seed=5, num_hidden_layers=1, hidden_size=32, vocab_size=352),
        "windowed": make_checkpoint(path / "windowed", "qwen2_window"),
        "eagle": make_eagle_head(path / "eagle", target),
        "eagle3": make_eagle3_head(path / "eagle3", target),
    }


@pytest.fixture(autouse=True)
def _drafts_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.worker.worker.measure_costs", lambda *_: {"seconds_per_step": 1.0, **FREE_DRAFTS})


def speculative_config(checkpoints: dict[str, Path], method: str) -> dict[str, Any]:
    if method == "ngram":
        return {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    kind = "eagle" if method.startswith("eagle") else "draft_model"
    return {"method": kind, "model": str(checkpoints[method]), "num_speculative_tokens": 3}


def generate(path: Path, **options: Any) -> tuple[list[Any], dict[str, float]]:
    """What every sequence got, twice (the second time prefixes are there), and the engine's numbers."""
    llm = LLM(model=str(path), **{**OPTIONS, **options})
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    results = []
    for _ in range(2):
        outputs = llm.generate(prompts, SAMPLINGS, use_tqdm=False)
        results.append([[(one.token_ids, one.finish_reason) for one in output.outputs] for output in outputs])
    statistics = llm.statistics()
    llm.shutdown()
    return results, statistics


@pytest.fixture(scope="module")
def plain(checkpoints: dict[str, Path]) -> dict[str, Any]:
    return {name: generate(checkpoints[name], **MEMORY["ample"])[0] for name in ("target", "windowed")}


@pytest.mark.parametrize(
    ("method", "way"),
    sampled(METHODS, [("ample", False), ("ample", True), ("recompute", True), ("swap", True)], n=12),
)
def test_the_same_tokens(
    checkpoints: dict[str, Path], plain: dict[str, Any], method: str, way: tuple[str, bool]
) -> None:
    memory, async_scheduling = way
    results, statistics = generate(
        checkpoints["target"],
        speculative_config=speculative_config(checkpoints, method),
        async_scheduling=async_scheduling,
        **MEMORY[memory],
    )
    assert results == plain["target"]
    assert statistics["num_draft_tokens_total"] > 50
    assert (statistics["num_preemptions_total"] > 0) == (memory != "ample")
    if method == "twin":
        accepted = statistics["num_accepted_draft_tokens_total"] / statistics["num_draft_tokens_total"]
        assert accepted > 0.8, "penalties and stops alone make a twin wrong"


def test_a_target_without_attention(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Its states do not lie in the blocks of the draft's keys and values."""
    path = make_checkpoint(tmp_path, "mamba2")
    config = speculative_config(checkpoints, "small")
    results, statistics = generate(path, speculative_config=config, **MEMORY["ample"])
    assert results == generate(path, **MEMORY["ample"])[0]
    assert statistics["num_draft_tokens_total"] > 50


@pytest.mark.parametrize("method", ["small", "windowed"])
def test_a_target_with_windows(checkpoints: dict[str, Path], plain: dict[str, Any], method: str) -> None:
    results, statistics = generate(
        checkpoints["windowed"],
        speculative_config=speculative_config(checkpoints, method),
        **MEMORY["ample"],
    )
    assert results == plain["windowed"]
    assert statistics["num_draft_tokens_total"] > 50
