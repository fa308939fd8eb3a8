"""Greedy tokens are those of Transformers with every policy, one step ahead or not, with any drafts, streamed or whole.

All values of every two factors meet in some run of a short list, of which each model has some by default; the full
product is for the night. Requests arrive one after the other while others run, some of them with the same beginning, a
step is shorter than most prompts, and in two thirds of the runs memory is short. Messages go through the driver, as
those of any client do.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.sampled import sampled
from transformers import AutoModelForCausalLM

from quire.engine_core.driver import CoreDriver
from quire.engine_core.scheduler.recovery import RecoveryCosts
from quire.messages import EngineOutputs, EngineRequest, ExtendRequest
from quire.sampling_params import SamplingParams
from quire.testing.greedy import Reference, assert_same_tokens, real_core, reference_generate
from quire.testing.run_requests import Results, SequenceResult, collect
from quire.testing.tiny_checkpoints import make_checkpoint

ARCHITECTURES = ("llama", "qwen3", "gpt2", "qwen3_moe", "gpt_oss", "deepseek_v3_groups", "gemma4", "lfm2", "qwen3_next")
HYBRIDS = ("lfm2", "qwen3_next")
WINDOWED = ("gpt_oss", "gemma4")
NUM_TOKENS = 24
SHARED = list(range(40, 70))
PROMPTS = [
    [5, 6, 7, 8, 9, 10, 11],
    SHARED,
    [200, 3, 77],
    [*SHARED, 9, 9, 1],
    [4, 5, 6] * 9,
    [31],
    [*SHARED, 1],
    [8] * 17,
]
PRIORITIES = (1, 0, 2, 1, 0, 2, 0, 1)
OPTIONS: dict[str, Any] = {
    "block_size": 4,
    "max_num_batched_tokens": 24,
    "max_model_len": 64,
    "max_num_seqs": 7,
}
MEMORY: dict[str, dict[str, Any]] = {
    "ample": {"num_gpu_blocks_override": 260},
    "recompute": {"preemption_mode": "recompute"},
    "swap": {"preemption_mode": "swap"},
}
NUM_SCARCE = 26
# one block serves a layer, where some have windows: two groups of these, and one without
MORE_BLOCKS = {"gpt_oss": 60, "gemma4": 40, "lfm2": 30, "qwen3_next": 96}
# A step costs a second, a draft nothing: every row gets as many drafts as it may have.
FREE_DRAFTS = dict.fromkeys(
    ("seconds_per_token", "seconds_of_drafting", "seconds_per_draft_step", "seconds_per_draft_token"), 0.0
)


class Way(NamedTuple):
    """One way to run the engine."""

    policy: str
    is_async: bool
    drafts: str
    is_streamed: bool
    memory: str

    def __str__(self) -> str:
        is_async, is_streamed = "async" if self.is_async else "sync", "streamed" if self.is_streamed else "whole"
        return f"{self.policy}-{is_async}-{self.drafts}-{is_streamed}-{self.memory}"


FACTORS = (
    ("fifo", "priority", "srtf", "two_level"),
    (False, True),
    ("none", "ngram", "twin", "other"),
    (False, True),
    tuple(MEMORY),
)
ALL_WAYS = [Way(*values) for values in itertools.product(*FACTORS)]


def pairs(way: Way) -> set[tuple[int, int, object, object]]:
    return {(i, j, way[i], way[j]) for i, j in itertools.combinations(range(len(way)), 2)}


def pairwise() -> list[Way]:
    """A short list in which any two values of two factors meet: always the way with most pairs not yet seen."""
    missing = set().union(*map(pairs, ALL_WAYS))
    ways = []
    while missing:
        ways.append(max(ALL_WAYS, key=lambda way: len(pairs(way) & missing)))
        missing -= pairs(ways[-1])
    return ways


class Subject(NamedTuple):
    name: str
    path: Path
    drafts: dict[str, dict[str, Any] | None]
    references: list[Reference]


def make_subject(folder: Path, name: str) -> Subject:
    path = make_checkpoint(folder / "target", name)
    other = make_checkpoint(folder / "other", "qwen2", seed=5, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    by_model = {"method": "draft_model", "num_speculative_tokens": 3}
    return Subject(
        name,
        path,
        {
            "none": None,
            "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
            # a draft has no recurrent layers
            "twin": {**by_model, "model": str(other if name in HYBRIDS else path)},
            "other": {**by_model, "model": str(other)},
        },
        [reference_generate(model, prompt, NUM_TOKENS) for prompt in PROMPTS],
    )


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    """Each is made once."""
    return functools.cache(lambda name: make_subject(tmp_path_factory.mktemp(name), name))


@pytest.fixture(params=ARCHITECTURES)
def subject(request: pytest.FixtureRequest, subject_of: Callable[[str], Subject]) -> Subject:
    return subject_of(request.param)


@pytest.fixture(autouse=True)
def _nothing_that_was_timed_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts cost nothing, and a block is copied in the time of a token."""
    monkeypatch.setattr("quire.engine_core.launch.RecoveryCosts", lambda *_: RecoveryCosts(1e-3, 1e-3))
    monkeypatch.setattr("quire.worker.worker.measure_costs", lambda *_: {"seconds_per_step": 1.0, **FREE_DRAFTS})


def requests(way: Way) -> list[list[EngineRequest | ExtendRequest]]:
    """What arrives before each step: a new request in each, the next piece of every prompt that is streamed."""
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    arrivals: list[list[EngineRequest | ExtendRequest]] = [[] for _ in range(30)]
    for number, prompt in enumerate(PROMPTS):
        pieces = [prompt[start : start + 5] for start in range(0, len(prompt), 5)] if way.is_streamed else [prompt]
        last = len(pieces) - 1
        first = EngineRequest(
            request_id=number,
            prompt_token_ids=pieces[0],
            sampling=greedy,
            priority=PRIORITIES[number],
            is_final=last == 0,
        )
        arrivals[2 * number].append(first)
        for place, piece in enumerate(pieces[1:], start=1):
            extension = ExtendRequest(request_id=number, token_ids=piece, is_final=place == last)
            arrivals[2 * number + place].append(extension)
    return arrivals


def run(driver: CoreDriver, way: Way) -> Results:
    """Steps on until everything has come and ended; a request that waits for its prompt leaves the core idle."""
    results: Results = {number: [SequenceResult()] for number in range(len(PROMPTS))}
    for number, messages in enumerate(itertools.chain(requests(way), itertools.repeat([]))):
        for message in messages:
            driver.handle(message)
        driver.step()
        for answer in driver.take():
            if isinstance(answer, EngineOutputs):
                collect(answer, results)
        if all(one.finish_reason for [one] in results.values()):
            return results
        assert number < 2000, "still at work"
        assert not driver.is_dead, "the core failed"
    raise AssertionError("there is always another step")


def check(subject: Subject, way: Way) -> None:
    memory = {"num_gpu_blocks_override": MORE_BLOCKS.get(subject.name, NUM_SCARCE), **MEMORY[way.memory]}
    core = real_core(
        subject.path,
        scheduling_policy=way.policy,
        async_scheduling=way.is_async,
        speculative_config=subject.drafts[way.drafts],
        **memory,
        **OPTIONS,
        **({"staging_size": 2} if way.policy == "two_level" else {}),
    )
    results = run(CoreDriver(core), way)
    statistics = core.statistics()
    core.shutdown()
    for number, reference in enumerate(subject.references):
        assert_same_tokens(results[number][0].tokens, reference, f"{way}, prompt {number}")
    # With ample memory somebody may have to give way, too: for a row, to what is more important.
    assert way.memory == "ample" or statistics["num_preemptions_total"] > 0
    assert statistics["num_blocks_held"] == 0
    if way.drafts != "none":
        drafted, accepted = statistics["num_draft_tokens_total"], statistics["num_accepted_draft_tokens_total"]
        assert drafted > 20
        # One that gave way goes on behind blocks of which a window has kept some: a draft that had read less than they
        # hold proposes worse from there.
        is_known = way.drafts == "twin" and subject.name in WINDOWED and way.memory != "ample"
        if is_known and 0.6 * drafted < accepted <= 0.9 * drafted:
            pytest.xfail(f"{accepted} of {drafted} drafts of a twin are accepted behind windows that gave way")
        assert way.drafts != "twin" or subject.name in HYBRIDS or accepted > 0.9 * drafted


@pytest.mark.parametrize(("way", "subject"), sampled(pairwise(), ARCHITECTURES, n=54), indirect=["subject"], ids=str)
def test_tokens_equal_transformers(subject: Subject, way: Way) -> None:
    check(subject, way)


@pytest.mark.nightly
@pytest.mark.parametrize("way", ALL_WAYS, ids=str)
def test_tokens_equal_transformers_in_any_combination(subject: Subject, way: Way) -> None:
    check(subject, way)
