"""A real model gives the same tokens whatever the engine does with its memory, up to close calls.

The settings are those of the simulated twin (tests/engine_core/test_metamorphic.py, which runs many more cases): prefix
cache or not, chunks, block size, memory that is ample or short, alone or among others. Greedy tokens and beams are held
against Transformers, whose margins say which choices are left to rounding; seeded samples against those of one setting.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.beam_requests import assert_same_beams, beam_request
from tests.support.metamorphic import PLAIN, SETTINGS, Setting
from transformers import AutoModelForCausalLM

from quire.engine_core.engine_core import EngineCore
from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.messages import EngineRequest
from quire.sampling_params import SamplingParams
from quire.testing.beam_reference import BeamResult, BeamSettings, beam_search, logits_of_transformers
from quire.testing.greedy import Reference, assert_same_tokens, real_core, reference_generate
from quire.testing.run_requests import Results, run_requests
from quire.testing.tiny_checkpoints import VOCAB_SIZE, make_checkpoint

NUM_CASES, NUM_NIGHTLY_CASES = 18, 144
NUM_TOKENS, MAX_MODEL_LEN = 32, 96
BEAMS = BeamSettings(2, NUM_TOKENS, eos_token_ids=tuple(range(5, VOCAB_SIZE, 60)))
WHOLE = 512
# by checkpoint: the windows of its groups of layers
WINDOWS = {"qwen3": [0], "qwen2_window": [24, 24, 0]}
GREEDY, GREEDY_TOO, SEVERAL, SEARCH = range(4)


@dataclass
class Subject:
    """A checkpoint and what is known of its answers."""

    path: Path
    windows: list[int]
    prompts: list[list[int]]
    references: dict[int, Reference]
    beams: BeamResult
    # seeded samples in PLAIN
    samples: list[list[int]]

    def requests(self) -> list[EngineRequest]:
        greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        seeded = SamplingParams(n=2, temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        of_sampling = partial(EngineRequest, seed=7)
        return [
            of_sampling(request_id=GREEDY, prompt_token_ids=self.prompts[GREEDY], sampling=greedy),
            of_sampling(request_id=GREEDY_TOO, prompt_token_ids=self.prompts[GREEDY_TOO], sampling=greedy),
            of_sampling(request_id=SEVERAL, prompt_token_ids=self.prompts[SEVERAL], sampling=seeded),
            beam_request(SEARCH, self.prompts[SEARCH], BEAMS),
        ]


@pytest.fixture(scope="module", params=WINDOWS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    path = make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    pick = random.Random(request.param)
    stem = [pick.randrange(VOCAB_SIZE) for _ in range(40)]
    prompts = [stem[:length] + [pick.randrange(VOCAB_SIZE) for _ in range(9)] for length in (40, 17, 33, 40)]
    references = {number: reference_generate(model, prompts[number], NUM_TOKENS) for number in (GREEDY, GREEDY_TOO)}
    beams = beam_search(logits_of_transformers(model), prompts[SEARCH], BEAMS)
    subject = Subject(path, WINDOWS[request.param], prompts, references, beams, [])
    found, _ = run(subject, PLAIN)
    subject.samples = [one.tokens for one in found[SEVERAL]]
    return subject


def core_for(subject: Subject, setting: Setting) -> EngineCore:
    options: dict[str, Any] = {
        "block_size": setting.block_size,
        "num_gpu_blocks_override": num_blocks(subject, setting),
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": min(setting.chunk, WHOLE),
        "max_num_seqs": 8,
        "enable_prefix_caching": setting.prefix_caching,
        "preemption_mode": "auto" if setting.memory == "ample" else setting.memory,
    }
    return real_core(subject.path, **options)


def num_blocks(subject: Subject, setting: Setting) -> int:
    """Ample, or hardly more than the largest request needs."""
    if setting.memory == "ample":
        return 1024 // setting.block_size * len(subject.windows)
    groups = [KVGroup((), window) for window in subject.windows]
    step_tokens = min(setting.chunk, WHOLE) + 1  # the token that is on its way while the next step is decided
    lengths = [(MAX_MODEL_LEN, 1)] + [(len(prompt) + NUM_TOKENS, 2) for prompt in subject.prompts[SEVERAL:]]
    needed = [
        count * sum(group.most_blocks(length, step_tokens, setting.block_size) for group in groups)
        for length, count in lengths
    ]
    return max(needed) + 1


def run(subject: Subject, setting: Setting) -> tuple[Results, int]:
    """What each request got, and how often somebody gave way."""
    core = core_for(subject, setting)
    batches = [[request] for request in subject.requests()] if setting.is_alone else [subject.requests()]
    results: Results = {}
    for batch in batches:
        results |= run_requests(core, batch)
    statistics = core.statistics()
    assert statistics["num_blocks_held"] == 0
    core.shutdown()
    return results, int(statistics["num_preemptions_total"])


def check(subject: Subject, setting: Setting) -> int:
    results, num_preemptions = run(subject, setting)
    for number, reference in subject.references.items():
        assert_same_tokens(results[number][0].tokens, reference, f"{setting}, request {number}")
    assert_same_beams(results[SEARCH], subject.beams, BEAMS, f"{setting}")
    assert [one.tokens for one in results[SEVERAL]] == subject.samples, f"{setting}"
    return num_preemptions


def test_settings_change_no_token(subject: Subject) -> None:
    preemptions: Counter[str] = Counter()
    for case in range(NUM_CASES):
        setting = SETTINGS[case * 35 % len(SETTINGS)]
        preemptions[setting.memory] += check(subject, setting)
    assert preemptions["ample"] == 0
    assert min(preemptions[memory] for memory in ("recompute", "swap", "auto")) > 0, preemptions


@pytest.mark.nightly
@pytest.mark.parametrize("case", range(NUM_CASES, NUM_NIGHTLY_CASES))
def test_no_setting_changes_a_token(subject: Subject, case: int) -> None:
    check(subject, SETTINGS[case * 35 % len(SETTINGS)])
