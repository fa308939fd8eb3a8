"""Models that alternate full attention and windows or chunks: several block tables over one pool, nothing special."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.beam_requests import assert_same_beams, beam_request
from tests.support.sampled import sampled
from transformers import AutoModelForCausalLM

from quire.engine_core.engine_core import EngineCore
from quire.engine_core.request import Sequence
from quire.testing.beam_reference import BeamResult, BeamSettings, beam_search, logits_of_transformers
from quire.testing.greedy import Reference, assert_same_tokens, generate_greedy, real_core, reference_generate
from quire.testing.run_requests import run_requests
from quire.testing.tiny_checkpoints import VOCAB_SIZE, make_checkpoint

# All have two layers with a window and one without: three groups, because one block serves equally many layers.
NATIVE, CHUNKED, TWO_SHAPES, FALLBACK = "qwen2_window", "llama4", "gemma4_moe", "gemma2"
MODELS = [NATIVE, CHUNKED, TWO_SHAPES, FALLBACK]
WINDOW = 24
BLOCK_SIZE = 4
LENGTHS = [3, 24, 25, 61, 90, 40]
NUM_TOKENS = 40
EOS_IDS = tuple(range(7, VOCAB_SIZE, 27))
AMPLE: dict[str, Any] = {
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": 1500,
    "max_model_len": 136,
    "max_num_batched_tokens": 16,
}
# Hardly more than the largest request may need, and less than several do; chunks pass their blocks all at once.
SCARCE_FOR_GREEDY = {NATIVE: 74, CHUNKED: 58, TWO_SHAPES: 74, FALLBACK: 74}
SCARCE_FOR_BEAMS = 150
# times that all searches are asked for, so that memory is short
NUM_COPIES = {NATIVE: 1, CHUNKED: 3, TWO_SHAPES: 1, FALLBACK: 1}
MAX_STEPS = 3000
# (prompt, search)
BEAMS = [
    (0, BeamSettings(4, 24, EOS_IDS)),
    (1, BeamSettings(4, 24, EOS_IDS, ignore_eos=True)),
    (2, BeamSettings(4, 24, EOS_IDS, length_penalty=2.0, early_stopping="never")),
    (3, BeamSettings(2, 24, EOS_IDS, ignore_eos=True)),
    (4, BeamSettings(2, 24, EOS_IDS, length_penalty=0.0)),
    (5, BeamSettings(2, 24, EOS_IDS, ignore_eos=True)),
    (2, BeamSettings(4, 24, EOS_IDS, ignore_eos=True)),
    (0, BeamSettings(4, 24, EOS_IDS, length_penalty=0.0, ignore_eos=True)),
    (4, BeamSettings(2, 24, EOS_IDS, ignore_eos=True)),
    (1, BeamSettings(2, 24, EOS_IDS, early_stopping=True)),
    (5, BeamSettings(2, 20, EOS_IDS)),
]
PRESSURE = {
    "ample": {},
    "recompute": {"preemption_mode": "recompute"},
    "swap": {"preemption_mode": "swap"},
    "auto": {"preemption_mode": "auto"},
}


@dataclass
class Subject:
    """A checkpoint, prompts, and what Transformers says."""

    path: Path
    name: str
    prompts: list[list[int]]
    references: list[Reference]
    beams: list[BeamResult]

    def core(self, pressure: str, num_scarce: int = 0, **options: Any) -> EngineCore:
        scarce = {} if pressure == "ample" else {"num_gpu_blocks_override": num_scarce}
        return real_core(self.path, **{**AMPLE, **PRESSURE[pressure], **scarce, **options})


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    """Each is made once."""

    @functools.cache
    def made(name: str) -> Subject:
        path = make_checkpoint(tmp_path_factory.mktemp(name), name)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        generator = torch.Generator().manual_seed(8)
        prompts = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]
        prompts[-1][:30] = prompts[3][:30]  # a prefix in common, longer than the window
        references = [reference_generate(model, prompt, NUM_TOKENS) for prompt in prompts]
        logits = logits_of_transformers(model)
        beams = [beam_search(logits, prompts[number], settings) for number, settings in BEAMS]
        return Subject(path, name, prompts, references, beams)

    return made


@pytest.fixture(params=MODELS)
def subject(request: pytest.FixtureRequest, subject_of: Callable[[str], Subject]) -> Subject:
    return subject_of(request.param)


class WindowWatch:
    """After each step: what memory says sums up, and no sequence holds more blocks than its windows need."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.most_blocks = 0
        self.num_passed = 0
        self.num_steps = 0

    def __call__(self, *_: Any) -> None:
        self.num_steps += 1
        assert self.num_steps < MAX_STEPS, "the requests never end"
        # not through control: a management operation wakes the core, which would never be idle then
        memory = self.core.scheduler.memory()
        assert sum(memory["slots"].values()) == memory["num_blocks"] * memory["block_size"]
        assert sum(memory["host_slots"].values()) == memory["num_host_blocks"] * memory["block_size"]
        statistics = self.core.statistics()
        held: set[int] = set()
        num_entries = 0
        for sequence in self.core.scheduler.running.living_sequences():
            for group, table in zip(self.core.scheduler.manager.groups, sequence.block_tables, strict=True):
                held.update(table.held().tolist())
                num_entries += len(table.held())
                step_tokens = self._tokens_a_step(sequence, was_preempted=statistics["num_preemptions_total"] > 0)
                most = group.most_blocks(sequence.num_total_tokens, step_tokens, BLOCK_SIZE)
                assert len(table.held()) <= most, f"{table} at {sequence.num_computed_tokens} tokens, {group}"
                self.num_passed += int((table.blocks < 0).sum())
        assert statistics["num_blocks_held"] == len(held)
        assert statistics["num_blocks_saved_by_sharing"] == num_entries - len(held)
        self.most_blocks = max(self.most_blocks, len(held))

    def _tokens_a_step(self, sequence: Sequence, was_preempted: bool) -> int:
        """Passed blocks go back when the next one is needed: what the steps before that wrote may still be there."""
        is_long_past_prompt = sequence.num_total_tokens > sequence.request.num_prompt_tokens + 2 * BLOCK_SIZE
        return 1 if is_long_past_prompt and not was_preempted else self.core.scheduler.max_num_batched_tokens

    def check_end(self, pressure: str) -> None:
        """Windows have really passed blocks, preemption has really happened, and nothing is held."""
        assert self.num_passed > 0
        statistics = self.core.statistics()
        assert statistics["num_blocks_held"] == 0
        assert (statistics["num_preemptions_total"] > 0) == (pressure != "ample"), "the test asks for preemption"
        if pressure in {"recompute", "swap"}:
            assert statistics[f"num_preemptions_by_{pressure}_total"] > 0


def test_the_model_has_several_groups(subject: Subject) -> None:
    core = subject.core("ample")
    assert sorted(group.sliding_window for group in core.scheduler.manager.groups) == [0, WINDOW, WINDOW]
    core.shutdown()


IN_EVERY_WAY = pytest.mark.parametrize(
    ("prefix_caching", "pressure", "subject"),
    sampled([True, False], PRESSURE, MODELS, n=12),
    indirect=["subject"],
)


@IN_EVERY_WAY
def test_greedy_tokens_equal_transformers(subject: Subject, pressure: str, prefix_caching: bool) -> None:
    core = subject.core(pressure, num_scarce=SCARCE_FOR_GREEDY[subject.name], enable_prefix_caching=prefix_caching)
    watch = WindowWatch(core)
    for _ in range(1 + prefix_caching):
        tokens = generate_greedy(core, subject.prompts, NUM_TOKENS, watch)
        for ours, reference, length in zip(tokens, subject.references, LENGTHS, strict=True):
            assert_same_tokens(ours, reference, f"{subject.name}, {pressure}, prompt of {length}")
    watch.check_end(pressure)
    if pressure == "ample":
        assert (core.statistics()["num_prefix_hit_tokens_total"] > 100) == prefix_caching
    core.shutdown()


@IN_EVERY_WAY
def test_beams_equal_the_reference(subject: Subject, pressure: str, prefix_caching: bool) -> None:
    core = subject.core(pressure, num_scarce=SCARCE_FOR_BEAMS, enable_prefix_caching=prefix_caching)
    watch = WindowWatch(core)
    searches = BEAMS * NUM_COPIES[subject.name]
    requests = [
        beam_request(place, subject.prompts[number], settings) for place, (number, settings) in enumerate(searches)
    ]
    for _ in range(1 + prefix_caching):
        results = run_requests(core, requests, watch)
        num_equal = 0
        for place, (number, settings) in enumerate(searches):
            what = f"{subject.name}, {pressure}, prompt {number}, {settings}"
            num_equal += assert_same_beams(results[place], subject.beams[place % len(BEAMS)], settings, what)
        assert num_equal >= len(searches) - NUM_COPIES[subject.name], (
            "most comparisons were excused, so this test says nothing"
        )
    watch.check_end(pressure)
    core.shutdown()


def test_a_window_saves_memory(subject: Subject) -> None:
    """Three tables of full attention would hold three times the blocks of one."""
    whole = -(-(LENGTHS[4] + NUM_TOKENS) // BLOCK_SIZE)
    core = subject.core("ample", max_num_batched_tokens=8)
    watch = WindowWatch(core)
    generate_greedy(core, [subject.prompts[4]], NUM_TOKENS, watch)
    # what the window reaches back to, what a step writes, and one for the boundaries of both
    assert whole < watch.most_blocks <= whole + 2 * (WINDOW // BLOCK_SIZE + 8 // BLOCK_SIZE + 1)
    core.shutdown()
