"""Heads that come with a model: right guesses where they are made for it, the same text whatever they are."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.mtp_checkpoints import add_mtp_head

from quire import LLM, SamplingParams
from quire.engine_core import launch
from quire.engine_core.scheduler.speculation import SpeculationCosts
from quire.errors import ModelError, OptionError
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker.kernels import cpu
from quire.worker.kernels.cpu.program import Program

PROMPTS = [[5, 6, 7, 8, 9, 10, 11] * 6, [60, 3, 37], list(range(20, 55))]
MORE_KINDS = [
    "glm4_moe", "glm4_moe_norm", "deepseek_v3_halves", "qwen3_5_text", "qwen3_5_moe_text", "hy_v3", "ernie4_5_moe",
]  # fmt: skip
KINDS = [
    "deepseek_v3",
    "qwen3_next",
    "mimo_v2_flash",
    *(pytest.param(name, marks=pytest.mark.nightly) for name in MORE_KINDS),
]
SIZE = 64


@pytest.fixture(autouse=True)
def drafts_cost_nothing(monkeypatch):
    """Or these models, whose steps are short, would not be drafted for."""
    monkeypatch.setattr(launch, "SpeculationCosts", lambda **measured: SpeculationCosts())


def engine(path, **options) -> LLM:
    return LLM(str(path), device="cpu", dtype="float32", num_threads=1, max_model_len=128, **options)


def answers(llm: LLM, **sampling):
    params = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2, **sampling)
    return [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize("name", KINDS)
def test_the_text_is_the_same(tmp_path, name):
    """Also from a prefix cache, when drawn, and its log-probabilities."""
    path = add_mtp_head(make_checkpoint(tmp_path / "model", name))
    ways = ({"temperature": 0.0}, {"temperature": 0.9, "seed": 3})
    with engine(path, block_size=4) as plain:
        expected = [answers(plain, **way) for way in ways]
    with engine(path, block_size=4, speculative_config={"method": "mtp", "num_speculative_tokens": 3}) as llm:
        num_drafted = 0
        for _ in range(2):
            for way, texts in zip(ways, expected, strict=True):
                for found, text in zip(answers(llm, **way), texts, strict=True):
                    assert found.token_ids == text.token_ids
                    assert found.cumulative_logprob == pytest.approx(text.cumulative_logprob, abs=1e-3)
                    num_drafted += found.num_drafted_tokens
        assert num_drafted > 0


def cyclic(path, name: str, fc: torch.Tensor):
    """After each token comes the one five places on, whatever came before: the head's layer does nothing, nor do those
    of the model."""
    make_checkpoint(path, name, vocab_size=SIZE, eos_token_id=None, bos_token_id=None, tie_word_embeddings=False)
    weights = load_file(path / "model.safetensors")
    idle = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
    for key, weight in weights.items():
        if key.endswith(idle) or "down_proj" in key:
            weight.zero_()
        if key.endswith("norm.weight"):
            weight.fill_(0.0 if name == "qwen3_next" else 1.0)
    weights["model.embed_tokens.weight"] = torch.eye(SIZE)
    weights["lm_head.weight"] = next_of_cycle()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    add_mtp_head(path, weights={"fc": fc})
    head = load_file(path / "model.safetensors")
    for key, weight in head.items():
        if key.startswith(("mtp.", "model.mtp", "model.layers.3.")) and (key.endswith(idle) or "down_proj" in key):
            weight.zero_()
    save_file(head, path / "model.safetensors", metadata={"format": "pt"})
    return path


def next_of_cycle() -> torch.Tensor:
    return torch.eye(SIZE)[:, torch.roll(torch.arange(SIZE), 5)].T.contiguous()


@pytest.mark.skipif(not cpu.load(), reason="programs are made of C++ kernels")
@pytest.mark.parametrize(("method", "reads_all"), [("mtp", True), ("ngram", False)])
def test_a_head_reads_the_states_of_all_tokens(tmp_path, monkeypatch, method, reads_all):
    """Others leave the model only those to compute that tokens are sampled from."""
    wanted = []
    run = Program.run

    def noted(self, num_tokens, num_sequences, wanted_n=None):
        if num_sequences:
            wanted.append(wanted_n)
        run(self, num_tokens, num_sequences, wanted_n)

    monkeypatch.setattr(Program, "run", noted)
    path = add_mtp_head(make_checkpoint(tmp_path / "model", "deepseek_v3"))
    with engine(path, speculative_config={"method": method, "num_speculative_tokens": 2}) as llm:
        llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)
    assert wanted
    assert all((tokens is None) == reads_all for tokens in wanted)


LAID_OUT_OTHERWISE = ["hy_v3", "ernie4_5_moe", "mimo_v2_flash"]


@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v3",
        "qwen3_next",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in LAID_OUT_OTHERWISE),
    ],
)
@pytest.mark.parametrize("place", ["embedding", "state"])
def test_a_head_that_is_right_is_accepted(tmp_path, name, place):
    """It looks at the token alone, or at the state of the token before: each half of its input in its place."""
    nothing = torch.zeros(SIZE, SIZE)
    halves = (torch.eye(SIZE), nothing) if place == "embedding" else (nothing, next_of_cycle())
    path = cyclic(tmp_path / "model", name, torch.cat(halves, dim=1))
    options = {"async_scheduling": False, "enable_prefix_caching": False}
    with engine(path, speculative_config={"method": "mtp", "num_speculative_tokens": 3}, **options) as llm:
        prompts = [[token % SIZE for token in prompt] for prompt in PROMPTS]
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        found = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    for one in found:
        assert one.num_drafted_tokens == one.num_accepted_tokens > 0


def test_what_has_no_such_head(tmp_path):
    for name, words in (("llama", "no head of this kind"), ("deepseek_v3", "no tensor model.layers.3")):
        path = make_checkpoint(tmp_path / name, name)
        with pytest.raises(ModelError, match=words):
            engine(path, speculative_config={"method": "mtp"})
    with pytest.raises(OptionError, match="own checkpoint"):
        engine(path, speculative_config={"method": "deepseek_mtp", "model": str(path)})
    assert "num_nextn_predict_layers" in json.loads((path / "config.json").read_text())
