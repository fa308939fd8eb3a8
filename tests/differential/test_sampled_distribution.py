"""Sampled tokens have the model's own distribution, end to end, with drafts and without, one step ahead.

A model with twelve tokens, so that the probability of every continuation of three can be counted out with Transformers
and held against thousands of requests, each with a seed of its own, by a chi-square test. Drafts are proposed with
the row's own random numbers (docs/speculation.md), which is where a bias could hide; the first token has no
drafts before it, the second and third have.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.engine_core.engine_core import EngineCore
from quire.messages import EngineRequest, IntArray
from quire.sampling_params import SamplingParams
from quire.testing.greedy import real_core
from quire.testing.run_requests import run_requests
from quire.testing.tiny_checkpoints import make_model
from quire.worker.row_table import RowTable

VOCAB_SIZE = 12
PROMPT = [3, 1, 4, 1, 5]
NUM_TOKENS = 3
NUM_SAMPLES = 2_500
LEAST_P = 1e-4
# Fewer expected samples than this in a cell make chi-square a bad measure; such cells count as one.
LEAST_EXPECTED = 5.0
CUTS: dict[str, dict[str, Any]] = {"whole": {}, "top_k": {"top_k": 4}, "top_p": {"top_p": 0.7}}
COSTS = {"seconds_per_step": 1.0} | dict.fromkeys(
    ("seconds_per_token", "seconds_of_drafting", "seconds_per_draft_step", "seconds_per_draft_token"), 0.0
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The target as Transformers has it, and the folders of it and of another model that drafts."""
    folder = tmp_path_factory.mktemp("twelve")
    sizes: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "bos_token_id": None, "eos_token_id": None}
    target = make_model("llama", **sizes)
    target.save_pretrained(folder / "target")
    make_model("qwen2", seed=5, num_hidden_layers=1, **sizes).save_pretrained(folder / "other")
    return {"reference": target, "target": folder / "target", "other": folder / "other"}


@pytest.fixture(autouse=True)
def _drafts_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.worker.worker.measure_costs", lambda *_: COSTS)


def core_for(models: dict[str, Any], draft: str | None) -> EngineCore:
    path: Path = models["target"]
    speculation = {"method": "draft_model", "model": str(models[draft]), "num_speculative_tokens": 2} if draft else None
    return real_core(
        path,
        num_gpu_blocks_override=2_000,
        max_model_len=64,
        max_num_seqs=256,
        async_scheduling=True,
        check_invariants=False,
        speculative_config=speculation,
    )


def samples(core: EngineCore, cut: dict[str, Any]) -> IntArray:
    """What each seed says: [samples, tokens]. The core takes no more drafts than rows have tokens to come."""
    sampling = SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True, **cut)
    results = run_requests(
        core,
        [
            EngineRequest(request_id=number, prompt_token_ids=PROMPT, sampling=sampling, seed=number)
            for number in range(NUM_SAMPLES)
        ],
    )
    return np.array([results[number][0].tokens for number in range(NUM_SAMPLES)])


@torch.inference_mode()
def probabilities(reference: Any, cut: dict[str, Any]) -> np.ndarray:
    """Of every continuation, [vocabulary] * NUM_TOKENS, worked out token by token."""
    joint = np.ones(())
    for length in range(NUM_TOKENS):
        texts = [[*PROMPT, *rest] for rest in itertools.product(range(VOCAB_SIZE), repeat=length)]
        next_NV = torch.softmax(reference(torch.tensor(texts)).logits[:, -1].double(), dim=-1)
        next_NV = _cut(next_NV, cut.get("top_k", VOCAB_SIZE), cut.get("top_p", 1.0))
        joint = joint[..., None] * next_NV.numpy().reshape(*[VOCAB_SIZE] * (length + 1))
    return joint


def _cut(probabilities_NV: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The top_k likeliest, or as many as make up top_p; renormalised."""
    ordered_NV, order_NV = probabilities_NV.sort(descending=True, dim=-1)
    before_NV = ordered_NV.cumsum(dim=-1) - ordered_NV
    is_kept_NV = (before_NV < top_p) & (torch.arange(VOCAB_SIZE) < top_k)
    kept_NV = torch.zeros_like(probabilities_NV).scatter(-1, order_NV, ordered_NV * is_kept_NV)
    return kept_NV / kept_NV.sum(dim=-1, keepdim=True)


def p_value(tokens: IntArray, joint: np.ndarray) -> float:
    """How likely counts as far from their expectation as these are."""
    counts = np.zeros(joint.shape)
    np.add.at(counts, tuple(tokens.T), 1)
    expected = joint * len(tokens)
    if (counts[expected == 0] > 0).any():
        return 0.0
    is_rare = expected < LEAST_EXPECTED
    observed = np.append(counts[~is_rare], counts[is_rare].sum())
    wanted = np.append(expected[~is_rare], expected[is_rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    chi_square = ((observed - wanted) ** 2 / wanted).sum()
    freedom = len(wanted) - 1
    assert freedom >= 10, "too few cells to see anything"
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(chi_square / 2.0)))


@pytest.mark.parametrize("draft", [None, "other", "target"])
def test_samples_follow_the_model(models: dict[str, Any], draft: str | None) -> None:
    core = core_for(models, draft)
    for name, cut in CUTS.items():
        p = p_value(samples(core, cut), probabilities(models["reference"], cut))
        assert p > LEAST_P, f"{name}: p = {p:.2g}"
    statistics = core.statistics()
    core.shutdown()
    if draft is not None:
        drafted, accepted = statistics["num_draft_tokens_total"], statistics["num_accepted_draft_tokens_total"]
        assert drafted > NUM_SAMPLES
        assert accepted > 0
        assert (accepted < drafted) == (draft == "other")


def accept_all(table: RowTable, rows_N: IntArray, lengths_N: IntArray, tokens_N: IntArray) -> np.ndarray:
    """A verification that believes every draft."""
    is_draft_N = lengths_N < table.num_total[rows_N]
    tokens_N[is_draft_N] = table.token_ids[rows_N, lengths_N][is_draft_N]
    return np.ones(len(rows_N), dtype=np.bool_)


def keep_all(table: RowTable, rows_N: IntArray, lengths_N: IntArray, tokens_N: IntArray) -> np.ndarray:
    """A verification that takes every draw, those after a wrong draft too."""
    return np.ones(len(rows_N), dtype=np.bool_)


@pytest.mark.parametrize("broken", [accept_all, keep_all])
def test_a_verification_that_believes_too_much_is_seen(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch, broken: Any
) -> None:
    monkeypatch.setattr("quire.worker.sampler.sampler.kept_draws", broken)
    core = core_for(models, "other")
    p = p_value(samples(core, {}), probabilities(models["reference"], {}))
    core.shutdown()
    assert p < LEAST_P / 100, f"p = {p:.2g}"
