"""A draft model: right guesses where it is the target's twin, the same text whatever it is."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.support.speculative_worker import NUM_DRAFTS, CountingDriver, started

from quire.config import SpeculationConfig
from quire.errors import ModelError
from quire.sampling_params import SamplingParams
from quire.testing.model_harness import worker_config
from quire.worker.speculative.draft_model import DraftModelProposer
from quire.worker.worker import Worker

PROMPTS = {0: [5, 6, 7, 8, 9, 10, 11], 3: [200, 3, 77], 6: list(range(40, 75))}
SAMPLINGS = {
    0: SamplingParams(temperature=0.0),
    3: SamplingParams(temperature=1.0, top_p=0.9),
    6: SamplingParams(temperature=0.8, top_k=40, min_p=0.01),
}
LENGTH = 60


def admit_all(driver: CountingDriver) -> None:
    for row, prompt in PROMPTS.items():
        driver.admit(row, prompt, sampling=SAMPLINGS[row])


def finish(driver: CountingDriver, num_drafts: int = NUM_DRAFTS) -> dict[int, list[int]]:
    """Steps until all rows are long enough."""
    while min(len(tokens) for tokens in driver.tokens.values()) < LENGTH:
        driver.step(num_drafts=num_drafts)
    return {row: tokens[:LENGTH] for row, tokens in driver.tokens.items()}


@pytest.fixture(scope="module")
def expected(checkpoints) -> dict[int, list[int]]:
    driver = started(checkpoints.target)
    admit_all(driver)
    return finish(driver, 0)


@pytest.fixture(params=["copy", "small"])
def driver(request: pytest.FixtureRequest, checkpoints) -> CountingDriver:
    """A worker whose draft is the target again, or another model."""
    driver = started(checkpoints.target, "draft_model", getattr(checkpoints, request.param))
    driver.is_twin = request.param == "copy"
    return driver


def check(driver: CountingDriver, expected: dict[int, list[int]], acceptance: float = 1.0) -> None:
    assert {row: expected[row] for row in driver.tokens} == finish(driver)
    assert driver.num_verified > 10
    if driver.is_twin:
        assert driver.acceptance >= acceptance


def test_greedy_and_drawing_rows_together(driver, expected):
    admit_all(driver)
    check(driver, expected)


def test_a_prompt_in_chunks_beside_rows_that_decode(driver, expected):
    driver.admit(0, PROMPTS[0], sampling=SAMPLINGS[0])
    driver.step(num_drafts=NUM_DRAFTS)
    driver.admit(6, PROMPTS[6], sampling=SAMPLINGS[6])
    for chunk in (9, 13, 12):
        driver.step({6: chunk, 0: 1 + driver.drafts[0]}, num_drafts=NUM_DRAFTS)
    driver.step({6: 1}, num_drafts=NUM_DRAFTS)
    check(driver, expected)


def test_drafts_may_be_verified_one_by_one(driver, expected):
    admit_all(driver)
    for _ in range(25):
        grants = {row: min(1, len(driver.tokens[row]) + driver.drafts[row] - driver.computed[row]) for row in (0, 3)}
        driver.step({row: count for row, count in {**grants, 6: 9}.items() if count}, num_drafts=2)
    # a right draft with which a chunk ends is reported as the row's own token
    check(driver, expected, acceptance=0.8)


def test_rows_without_drafts_are_not_run_and_make_up_later(driver, expected):
    admit_all(driver)
    driver.step(num_drafts=NUM_DRAFTS)
    calls = count_tokens(driver)
    for _ in range(8):
        driver.step()
    assert sum(calls) == 0
    check(driver, expected)
    assert calls[0] > 3 * 8, "what was left out is made up for"


def test_what_is_missing_is_made_up_for_in_pieces(checkpoints, expected):
    driver = started(checkpoints.target, "draft_model", checkpoints.copy, max_num_batched_tokens=16)
    for row, prompt in PROMPTS.items():
        driver.admit(row, prompt, sampling=SAMPLINGS[row])
        while driver.computed[row] < len(prompt):
            driver.step({row: min(16, len(prompt) - driver.computed[row])})
    driver.step()
    calls = count_tokens(driver)
    driver.is_twin = True
    check(driver, expected)
    assert max(calls) <= 16


def test_counts_that_differ(checkpoints, expected):
    driver = started(checkpoints.target, "draft_model", checkpoints.copy)
    admit_all(driver)
    proposer = driver.worker._proposer
    propose = proposer.propose
    proposer.propose = lambda step: propose(
        dataclasses.replace(step, counts_n=1 + (step.rows_n + len(driver.tokens[0])) % NUM_DRAFTS)
    )
    driver.is_twin = True
    check(driver, expected)


def test_a_preempted_row_starts_again(driver, expected):
    admit_all(driver)
    for _ in range(3):
        driver.step(num_drafts=NUM_DRAFTS)
    for row in (0, 6):
        driver.preempt(row)
    driver.step({3: 1 + driver.drafts[3]}, num_drafts=NUM_DRAFTS)
    check(driver, expected)


def test_a_row_that_was_swapped_out(driver, expected):
    admit_all(driver)
    for _ in range(3):
        driver.step(num_drafts=NUM_DRAFTS)
    driver.swap_out(6)
    driver.step(num_drafts=NUM_DRAFTS)
    driver.swap_in(6)
    check(driver, expected)


def test_a_prefix_hit_brings_the_drafts_keys_along(checkpoints, expected):
    """What a child takes over of its parent's blocks is what a hit in the prefix cache takes over."""
    driver = started(checkpoints.target, "draft_model", checkpoints.copy)
    driver.admit(6, PROMPTS[6], sampling=SAMPLINGS[0])
    driver.step(num_drafts=NUM_DRAFTS)
    calls = count_tokens(driver)
    driver.fork(6, 2, 32)
    driver.step({2: 1}, num_drafts=NUM_DRAFTS)
    assert calls == [2, 1, 1], "the token that the target computed, the one that it sampled, and two drafts"
    while len(driver.tokens[2]) < LENGTH:
        driver.step(num_drafts=NUM_DRAFTS)
    assert driver.acceptance == 1.0


def test_forks_after_the_prompt(driver, checkpoints):
    """n=3: the first token of the parent, then children that compute the last token of the prompt again."""
    plain = started(checkpoints.target)
    for one in (plain, driver):
        one.admit(6, PROMPTS[6], sampling=SAMPLINGS[3], seed=9)
        one.step()
        for row in (1, 2):
            one.fork(6, row, len(PROMPTS[6]), seed=row)
    expected = finish(plain, 0)
    check(driver, expected)


def test_an_off_row_whose_draft_was_rejected(checkpoints, expected):
    """What the draft computed of rejected tokens does not count, also if nothing was asked for in that step."""
    driver = started(checkpoints.target, "draft_model", checkpoints.copy)
    admit_all(driver)
    table, propose = driver.worker._runner.table, driver.worker._proposer.propose

    def spoiled(step):
        drafts = propose(step)
        drafts[:, -1] = (drafts[:, -1] + 1) % 300
        return drafts

    driver.worker._proposer.propose = spoiled
    driver.step(num_drafts=NUM_DRAFTS)
    driver.worker._proposer.propose = propose
    driver.step()
    assert (table.num_drafts == 0).all()
    driver.num_verified = driver.num_accepted = 0
    driver.is_twin = True
    check(driver, expected)


def test_windows_of_the_draft_and_of_the_target(checkpoints, expected):
    """A draft whose layers look back less far than the target's keeps its keys where the target's are kept."""
    driver = started(checkpoints.target, "draft_model", checkpoints.windowed)
    admit_all(driver)
    driver.is_twin = False
    check(driver, expected)


def test_a_target_with_windows(checkpoints):
    plain = started(checkpoints.windowed)
    admit_all(plain)
    expected = finish(plain, 0)
    for draft, is_twin in ((checkpoints.windowed, True), (checkpoints.small, False)):
        driver = started(checkpoints.windowed, "draft_model", draft)
        admit_all(driver)
        driver.is_twin = is_twin
        check(driver, expected)


def test_a_draft_with_fewer_positions_stops_there(checkpoints, tmp_path, expected):
    short = tmp_path / "short"
    shutil.copytree(checkpoints.copy, short)
    change_config(short, max_position_embeddings=50)
    driver = started(checkpoints.target, "draft_model", short)
    admit_all(driver)
    driver.is_twin = True
    check(driver, expected)
    assert max(driver.worker._proposer._progress) == 50


def test_vocabularies_that_differ_by_more_than_padding(checkpoints, tmp_path):
    shutil.copytree(checkpoints.copy, tmp_path / "other")
    change_config(tmp_path / "other", vocab_size=5000)
    speculation = SpeculationConfig(method="draft_model", num_speculative_tokens=2, model_path=str(tmp_path / "other"))
    with pytest.raises(ModelError, match=r"vocabulary of 5,000 tokens, .*320.*less than 1,024"):
        DraftModelProposer(worker_config(checkpoints.target, speculation=speculation), torch.nn.Module())


def test_the_plan_counts_weights_and_keys(checkpoints):
    speculation = SpeculationConfig(method="draft_model", num_speculative_tokens=2, model_path=str(checkpoints.small))
    worker = Worker(worker_config(checkpoints.target, speculation=speculation))
    worker.load()
    layers = worker.measure_capacity().layers
    assert [layer.name for layer in layers if layer.is_draft] == ["draft.model.layers.0.self_attn.attn"]
    assert len(layers) == 4


def count_tokens(driver: CountingDriver) -> list[int]:
    """How many tokens each pass of the draft computes, from now on."""
    model, calls = driver.worker._proposer._model, list[int]()
    forward = model.forward_pass

    def counted(input_ids, positions, hidden):
        calls.append(len(input_ids))
        return forward(input_ids, positions, hidden)

    model.forward_pass = counted
    return calls


def change_config(path: Path, **changes: int) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
