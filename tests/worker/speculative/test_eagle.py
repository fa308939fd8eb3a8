"""Heads on the target's hidden states: right guesses where the head is made for it, the same text whatever it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.eagle_checkpoints import make_eagle3_head, make_eagle_head
from tests.support.speculative_worker import NUM_DRAFTS, CountingDriver, started

from quire.errors import ModelError
from quire.sampling_params import SamplingParams
from quire.testing.tiny_checkpoints import make_checkpoint

PROMPTS = {0: [5, 6, 7, 8, 9, 10, 11], 3: [60, 3, 37], 6: list(range(20, 55))}
SAMPLINGS = {
    0: SamplingParams(temperature=0.0),
    3: SamplingParams(temperature=1.0, top_p=0.9),
    6: SamplingParams(temperature=0.8, top_k=40),
}
LENGTH = 60
SIZE = 64


def finish(driver: CountingDriver, num_drafts: int = NUM_DRAFTS) -> dict[int, list[int]]:
    while min(len(tokens) for tokens in driver.tokens.values()) < LENGTH:
        driver.step(num_drafts=num_drafts)
    return {row: tokens[:LENGTH] for row, tokens in driver.tokens.items()}


def admit_all(driver: CountingDriver) -> CountingDriver:
    for row, prompt in PROMPTS.items():
        driver.admit(row, prompt, sampling=SAMPLINGS[row])
    return driver


@pytest.fixture(scope="module")
def expected(checkpoints):
    return finish(admit_all(started(checkpoints.target)), 0)


@pytest.fixture(scope="module", params=["one layer", "two layers", "third generation", "nested config"])
def head(request, checkpoints, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("head")
    if request.param == "third generation":
        return make_eagle3_head(path, checkpoints.target)
    make_eagle_head(path, checkpoints.target, num_layers=2 if request.param == "two layers" else 1)
    if request.param == "nested config":
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({"architectures": ["EAGLEModel"], "model": config}))
    return path


@pytest.fixture
def driver(checkpoints, head) -> CountingDriver:
    return started(checkpoints.target, "eagle", head)


def test_greedy_and_drawing_rows_together(driver, expected):
    assert finish(admit_all(driver)) == expected
    assert driver.num_verified > 100


def test_chunks_preemption_swaps_and_pauses(driver, expected):
    driver.admit(0, PROMPTS[0], sampling=SAMPLINGS[0])
    driver.step(num_drafts=NUM_DRAFTS)
    driver.admit(6, PROMPTS[6], sampling=SAMPLINGS[6])
    for chunk in (9, 13, 12):
        driver.step({6: chunk, 0: 1 + driver.drafts[0]}, num_drafts=NUM_DRAFTS)
    driver.admit(3, PROMPTS[3], sampling=SAMPLINGS[3])
    driver.step(num_drafts=NUM_DRAFTS)
    driver.preempt(0)
    driver.swap_out(6)
    driver.step({3: 1 + driver.drafts[3]}, num_drafts=NUM_DRAFTS)
    driver.swap_in(6)
    driver.step()
    driver.step()
    assert finish(driver) == expected


def test_forks_after_the_prompt(driver, checkpoints):
    plain = started(checkpoints.target)
    for one in (plain, driver):
        one.admit(6, PROMPTS[6], sampling=SAMPLINGS[3], seed=9)
        one.step()
        for row in (1, 2):
            one.fork(6, row, len(PROMPTS[6]), seed=row)
    assert finish(driver) == finish(plain, 0)


# ---------------------------------------------------------------------------------------------- heads that are right


@pytest.fixture(scope="module")
def cyclic(tmp_path_factory) -> Path:
    """A target whose layers do nothing: its state is its last token, which its head maps to the next one of a cycle."""
    path = make_checkpoint(tmp_path_factory.mktemp("cyclic"), "llama", vocab_size=SIZE, eos_token_id=None)
    weights = load_file(path / "model.safetensors")
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weight.zero_()
        if name.endswith("norm.weight"):
            weight.fill_(1.0)
    weights["model.embed_tokens.weight"] = torch.eye(SIZE)
    weights["lm_head.weight"] = next_of_cycle()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def next_of_cycle() -> torch.Tensor:
    """Times the unit vector of a token, it is that of the token after it."""
    return torch.eye(SIZE)[:, torch.roll(torch.arange(SIZE), 5)].T.contiguous()


def idle(layer: str) -> dict[str, torch.Tensor]:
    return {
        f"{layer}.self_attn.o_proj.weight": torch.zeros(SIZE, SIZE),
        f"{layer}.mlp.down_proj.weight": torch.zeros(SIZE, 128),
    }


def acceptance(target: Path, head: Path, num_drafts: int = NUM_DRAFTS) -> float:
    driver = started(target, "eagle", head)
    for row, prompt in PROMPTS.items():
        driver.admit(row, prompt)
    driver.step({6: 20, 0: 7, 3: 2}, num_drafts=num_drafts)
    while min(len(tokens) for tokens in driver.tokens.values()) < LENGTH:
        driver.step(num_drafts=num_drafts)
    return driver.acceptance


def test_a_head_that_looks_at_the_token_alone(cyclic, tmp_path):
    fc = torch.cat((torch.eye(SIZE), torch.zeros(SIZE, SIZE)), dim=1)
    head = make_eagle_head(tmp_path, cyclic, weights={"fc.weight": fc, **idle("layers.0")})
    assert acceptance(cyclic, head) == 1.0


def test_a_head_that_looks_at_the_state_alone(cyclic, tmp_path):
    """Only right if each token comes with the state of the token before it, also after a rejection or in a chunk."""
    fc = torch.cat((torch.zeros(SIZE, SIZE), next_of_cycle()), dim=1)
    head = make_eagle_head(tmp_path, cyclic, weights={"fc.weight": fc, **idle("layers.0")})
    assert acceptance(cyclic, head) == 1.0


@pytest.mark.parametrize("place", range(3))
def test_a_third_generation_head_that_looks_at_one_inner_state(cyclic, tmp_path, place):
    parts = [torch.zeros(SIZE, SIZE)] * 3
    parts[place] = next_of_cycle()
    weights = {"fc.weight": torch.cat(parts, dim=1), "lm_head.weight": next_of_cycle(), **idle("midlayer")}
    head = make_eagle3_head(tmp_path, cyclic, draft_vocab_size=SIZE, weights=weights)
    # one draft: what the layer yields goes into the next pass as it is, and this one stays where it is
    assert acceptance(cyclic, head, num_drafts=1) == 1.0


def test_a_smaller_vocabulary_names_tokens_of_the_target(cyclic, tmp_path):
    of_target = torch.arange(0, SIZE, 2)
    head = make_eagle3_head(
        tmp_path,
        cyclic,
        draft_vocab_size=len(of_target),
        weights={
            "fc.weight": torch.cat((next_of_cycle(), torch.zeros(SIZE, 2 * SIZE)), dim=1),
            "lm_head.weight": next_of_cycle()[of_target].contiguous(),
            **idle("midlayer"),
        },
    )
    # The cycle alternates between even tokens, which the head knows, and odd ones. A right draft brings a token more,
    # so that the next draft is for an even place again.
    assert acceptance(cyclic, head, num_drafts=1) > 0.9


# ---------------------------------------------------------------------------------------------- what cannot be used


def test_a_copy_of_the_targets_embedding_is_shared(checkpoints, tmp_path):
    embedding = load_file(checkpoints.target / "model.safetensors")["model.embed_tokens.weight"]
    for name, is_same in (("same", True), ("other", False)):
        weights = {"embed_tokens.weight": embedding + (not is_same)}
        head = make_eagle_head(tmp_path / name, checkpoints.target, weights=weights)
        proposer = started(checkpoints.target, "eagle", head).worker._proposer
        assert (proposer._model.head.embed_tokens is None) == is_same


def test_a_head_of_another_model(checkpoints, tmp_path):
    small = make_eagle_head(tmp_path, checkpoints.small)
    with pytest.raises(ModelError, match=r"hidden states of 32 numbers, those of .* have 64"):
        started(checkpoints.target, "eagle", small)


def test_inner_states_of_a_model_that_does_not_hand_them_out(tmp_path):
    target = make_checkpoint(tmp_path / "target", "opt")
    (tmp_path / "like").mkdir()
    like = make_checkpoint(tmp_path / "like", "llama")
    with pytest.raises(ModelError, match="inside the model, which OPTForCausalLM does not hand out"):
        started(target, "eagle", make_eagle3_head(tmp_path / "head", like))


def test_tokens_beyond_the_vocabulary(checkpoints, tmp_path):
    head = make_eagle3_head(tmp_path, checkpoints.target, weights={"d2t": torch.full((48,), 300)})
    with pytest.raises(ModelError, match="names tokens up to 347, the vocabulary has 320"):
        started(checkpoints.target, "eagle", head)
