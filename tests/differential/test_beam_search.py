"""Beams of the engine equal those of a brute-force search and of Transformers, whatever is switched on."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.beam_requests import CLOSE_CALL, assert_same_beams, beam_request
from tests.support.sampled import sampled
from transformers import AutoModelForCausalLM

from quire.engine_core.engine_core import EngineCore
from quire.messages import EngineRequest
from quire.sampling_params import SamplingParams
from quire.testing.beam_reference import BeamResult, BeamSettings, Logits, beam_search, logits_of_transformers
from quire.testing.greedy import assert_same_tokens, real_core, reference_generate
from quire.testing.run_requests import SequenceResult, run_requests
from quire.testing.tiny_checkpoints import VOCAB_SIZE, make_checkpoint

ARCHITECTURES = ["llama", "gpt2", "qwen3"]
LENGTHS = [1, 9, 24, 40, 33]
MAX_TOKENS = 20
# So many ends of text, because each of them is as unlikely as any token of these models.
EOS_IDS = tuple(range(7, VOCAB_SIZE, 10))
GRID = [
    BeamSettings(width, MAX_TOKENS, EOS_IDS, length_penalty=penalty, early_stopping=early)
    for penalty, early, width in itertools.product((1.0, 0.0, 2.0, -1.0), (False, True, "never"), (4, 2, 6))
]
AMPLE: dict[str, Any] = {"block_size": 8, "num_gpu_blocks_override": 4000, "max_model_len": 128, "max_num_seqs": 64}
REPETITION = [
    BeamSettings(width, MAX_TOKENS, EOS_IDS, early_stopping=early, repetition_penalty=strength)
    for strength, early, width in itertools.product((1.3, 0.8, 2.0), (False, True, "never"), (4, 2))
]
PENALISED = [
    BeamSettings(4, MAX_TOKENS, EOS_IDS, frequency_penalty=0.5),
    BeamSettings(3, MAX_TOKENS, presence_penalty=-0.5, repetition_penalty=1.2),
    BeamSettings(4, MAX_TOKENS, frequency_penalty=0.7, presence_penalty=0.3, temperature=1.5),
    # so few stop tokens that a beam may have less than that many continuations
    *(BeamSettings(4, MAX_TOKENS, top_p=share) for share in (0.02, 0.1, 0.5)),
    *(BeamSettings(4, MAX_TOKENS, top_k=count, stop_token_ids=(5,)) for count in (1, 2, 3)),
    BeamSettings(4, MAX_TOKENS, top_p=0.05, top_k=30, repetition_penalty=1.5, stop_token_ids=(9,)),
    BeamSettings(4, MAX_TOKENS, top_p=0.3, num_groups=2, diversity_penalty=0.7, frequency_penalty=0.4),
]
SETTINGS = {
    "ample memory": {},
    "blocks of 1": {"block_size": 1},
    "blocks of 16": {"block_size": 16},
    "budget of 7": {"max_num_batched_tokens": 7},
    "no prefix cache": {"enable_prefix_caching": False},
    "few rows": {"max_num_seqs": 7},
}
# One request of width 6 needs 48 blocks of 8 if nothing is shared.
SCARCE = {"num_gpu_blocks_override": 50, "max_model_len": 64, "max_num_seqs": 40, "max_num_batched_tokens": 96}


@dataclass
class Subject:
    """A checkpoint, the same model in Transformers, and prompts."""

    path: Path
    model: Any
    logits: Logits
    prompts: list[list[int]]
    known: dict[tuple[int, BeamSettings], BeamResult] = field(default_factory=dict)

    def core(self, **options: Any) -> EngineCore:
        return real_core(self.path, **{**AMPLE, **options})

    def prompt(self, number: int) -> list[int]:
        return self.prompts[number % len(self.prompts)]

    def expected(self, number: int, settings: BeamSettings) -> BeamResult:
        key = (number % len(self.prompts), settings)
        if key not in self.known:
            self.known[key] = beam_search(self.logits, self.prompt(number), settings)
        return self.known[key]


def make_subject(path: Path, architecture: str) -> Subject:
    make_checkpoint(path, architecture)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]
    prompts[-1][:24] = prompts[3][:24]  # a prefix in common
    return Subject(path, model, logits_of_transformers(model), prompts)


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    """Each is made once."""
    return functools.cache(lambda architecture: make_subject(tmp_path_factory.mktemp(architecture), architecture))


@pytest.fixture(params=ARCHITECTURES)
def subject(request: pytest.FixtureRequest, subject_of: Callable[[str], Subject]) -> Subject:
    return subject_of(request.param)


def check(
    subject: Subject,
    core: EngineCore,
    grid: list[BeamSettings],
    others: list[EngineRequest] | None = None,
    each_step: Callable[..., None] | None = None,
) -> dict[int, list[SequenceResult]]:
    """All at once, each held against the reference. Hardly any may be excused by a close call."""
    requests = [beam_request(number, subject.prompt(number), settings) for number, settings in enumerate(grid)]
    results = run_requests(core, [*requests, *(others or [])], each_step)
    num_equal = 0
    for number, settings in enumerate(grid):
        what = f"{subject.path.name}, prompt {number % len(subject.prompts)}, {settings}"
        num_equal += assert_same_beams(results[number], subject.expected(number, settings), settings, what)
    assert num_equal >= 0.9 * len(grid), "most comparisons were excused, so this test says nothing"
    assert core.statistics()["num_blocks_held"] == 0
    return results


# ---------------------------------------------------------------------------------------------- the references


def transformers_beams(subject: Subject, number: int, settings: BeamSettings) -> tuple[list[list[int]], list[float]]:
    """What `generate` returns, padding cut off."""
    prompt = subject.prompt(number)
    output = subject.model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=settings.width,
        num_return_sequences=settings.width,
        max_new_tokens=settings.max_tokens,
        do_sample=False,
        eos_token_id=list(settings.eos_token_ids),
        pad_token_id=0,
        length_penalty=settings.length_penalty,
        early_stopping=settings.early_stopping,
        repetition_penalty=settings.repetition_penalty,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = [row[len(prompt) :] for row in output.sequences.tolist()]
    ends = [next((i + 1 for i, token in enumerate(row) if token in EOS_IDS), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)], output.sequences_scores.tolist()


@pytest.mark.parametrize(
    "grid",
    # every fifth one: each value of each setting is in some of them
    [[*GRID[::5], *REPETITION[::5]], pytest.param([*GRID, *REPETITION], marks=pytest.mark.nightly)],
    ids=["some", "all"],
)
def test_reference_and_engine_equal_transformers(subject: Subject, grid: list[BeamSettings]) -> None:
    """`generate(num_beams=...)` itself: the brute-force search is only as good as this."""
    core = subject.core()
    requests = [beam_request(number, subject.prompt(number), settings) for number, settings in enumerate(grid)]
    engine = run_requests(core, requests)
    core.shutdown()
    assert {end for result in engine.values() for end in (beam.finish_reason for beam in result)} == {"stop", "length"}
    for number, settings in enumerate(grid):
        reference = subject.expected(number, settings)
        tokens, scores = transformers_beams(subject, number, settings)
        if reference.margin < CLOSE_CALL:
            continue
        assert [hypothesis.tokens for hypothesis in reference.hypotheses] == tokens, settings
        assert [hypothesis.score for hypothesis in reference.hypotheses] == pytest.approx(scores, abs=1e-4, rel=1e-5), (
            settings
        )
        assert [beam.tokens for beam in engine[number]] == tokens, settings
        ours = [sum(beam.logprobs) / len(beam.tokens) ** settings.length_penalty for beam in engine[number]]
        assert ours == pytest.approx(scores, abs=1e-4, rel=1e-5), settings


def test_reference_with_groups() -> None:
    """A large penalty keeps groups apart, a vanishing one makes them equal; one group is beam search."""
    noise = torch.randn(4096, 30, generator=torch.Generator().manual_seed(1)) * 2

    def logits(prefix: tuple[int, ...]) -> Any:
        return noise[sum((place + 1) * token for place, token in enumerate(prefix)) % 4096].numpy()

    settings = BeamSettings(6, 8, num_groups=3)
    apart = beam_search(logits, [1], replace(settings, diversity_penalty=100.0))
    assert len({hypothesis.tokens[0] for hypothesis in apart.hypotheses}) >= 3
    together = beam_search(logits, [1], replace(settings, diversity_penalty=0.0))
    texts = [hypothesis.tokens for hypothesis in together.hypotheses]
    assert texts[0::3] == texts[1::3] == texts[2::3]
    alone = beam_search(logits, [1], BeamSettings(2, 8))
    assert texts[0::3] == [hypothesis.tokens for hypothesis in alone.hypotheses]


# ---------------------------------------------------------------------------------------------- the engine


@pytest.mark.parametrize(
    ("setting", "subject"),
    sampled(SETTINGS, ARCHITECTURES, n=9),
    indirect=["subject"],
)
def test_beams_equal_the_reference(subject: Subject, setting: str) -> None:
    core = subject.core(**SETTINGS[setting])
    check(subject, core, GRID[::2] if setting in {"blocks of 1", "budget of 7", "few rows"} else GRID)
    assert core.statistics()["num_preemptions_total"] == 0
    core.shutdown()


@pytest.mark.parametrize("memory", ["ample", "scarce"])
def test_penalties_and_nuclei_equal_the_reference(subject_of: Callable[[str], Subject], memory: str) -> None:
    subject = subject_of("llama")
    core = subject.core(**(SCARCE if memory == "scarce" else {"enable_prefix_caching": False}))
    check(subject, core, [*PENALISED, *REPETITION[::4]])
    assert (core.statistics()["num_preemptions_total"] > 0) == (memory == "scarce")
    core.shutdown()


def test_what_is_drawn_follows_from_the_seed(subject_of: Callable[[str], Subject]) -> None:
    """Alone or among others, preempted or not; another seed draws something else."""
    subject = subject_of("llama")

    def requests(seed: int) -> list[EngineRequest]:
        drawing = [replace(one, temperature=2.0) for one in GRID[:6]]
        made = [beam_request(number, subject.prompt(number), one) for number, one in enumerate(drawing)]
        for request in made:
            request.seed = seed
            assert request.decoding is not None
            request.decoding.args["do_sample"] = True
        return made

    def drawn(seed: int, *, alone: bool = False, **options: Any) -> list[list[list[int]]]:
        core = subject.core(**options)
        asked = requests(seed)
        parts = [[one] for one in asked] if alone else [asked]
        results = {number: found for part in parts for number, found in run_requests(core, part).items()}
        core.shutdown()
        return [[beam.tokens for beam in results[number]] for number in sorted(results)]

    expected = drawn(5, alone=True)
    assert drawn(5) == expected
    assert drawn(5, **SCARCE, preemption_mode="recompute") == expected
    assert drawn(6) != expected


@pytest.mark.parametrize(
    ("prefix_caching", "mode", "subject"),
    sampled([True, False], ["recompute", "swap", "auto"], ARCHITECTURES, n=9),
    indirect=["subject"],
)
def test_beams_equal_the_reference_with_preemption(subject: Subject, mode: str, prefix_caching: bool) -> None:
    core = subject.core(**SCARCE, preemption_mode=mode, enable_prefix_caching=prefix_caching)
    check(subject, core, GRID[::2])
    statistics = core.statistics()
    by_recompute = statistics["num_preemptions_by_recompute_total"]
    by_swap = statistics["num_preemptions_by_swap_total"]
    assert by_recompute + by_swap == statistics["num_preemptions_total"] > 0, "the test asks for preemption"
    if mode == "recompute":
        assert by_swap == 0
        assert statistics["recomputed_tokens_total"] > 0
    elif mode == "swap":
        assert by_swap > 0
        assert statistics["swapped_out_blocks_total"] >= statistics["swapped_in_blocks_total"] > 0
    core.shutdown()


def test_beams_among_other_requests(subject: Subject) -> None:
    """3.4.4, mixed decoding methods: nobody in the batch notices the others, also while all of them are preempted."""
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    sampled = SamplingParams(temperature=0.8, n=3, max_tokens=MAX_TOKENS, ignore_eos=True)
    others = [
        EngineRequest(request_id=100 + number, prompt_token_ids=prompt, sampling=sampling, seed=number)
        for sampling in (greedy, sampled)
        for number, prompt in enumerate(subject.prompts, start=0 if sampling is greedy else 50)
    ]
    core = subject.core()
    alone = {request.request_id: run_requests(core, [request])[request.request_id] for request in others}
    core.shutdown()
    for options in ({}, {**SCARCE, "preemption_mode": "swap"}, {**SCARCE, "preemption_mode": "recompute"}):
        core = subject.core(**options)
        results = check(subject, core, GRID[:12], others)
        assert (core.statistics()["num_preemptions_total"] > 0) == bool(options)
        core.shutdown()
        for request in others:
            tokens = [sequence.tokens for sequence in results[request.request_id]]
            if request.sampling is sampled:
                assert tokens == [sequence.tokens for sequence in alone[request.request_id]]
            else:
                reference = reference_generate(subject.model, request.prompt_token_ids, MAX_TOKENS)
                assert_same_tokens(tokens[0], reference, f"greedy request {request.request_id}")


def test_diverse_beams_equal_the_reference(subject: Subject) -> None:
    shapes = [(4, 2), (6, 2), (6, 3), (4, 4)]
    grid = [
        BeamSettings(width, 16, EOS_IDS, length_penalty=penalty, num_groups=groups, diversity_penalty=diversity)
        for (width, groups), penalty, diversity in itertools.product(shapes, (0.0, 1.0), (0.4, 2.0))
    ]
    for options in ({}, {**SCARCE, "preemption_mode": "auto"}):
        core = subject.core(**options)
        check(subject, core, grid)
        core.shutdown()


VARIANTS = {
    "one beam is greedy": BeamSettings(1, MAX_TOKENS, EOS_IDS),
    "temperature 0": BeamSettings(4, MAX_TOKENS, EOS_IDS, temperature=0.0),
    "temperature 0.5": BeamSettings(4, MAX_TOKENS, EOS_IDS, temperature=0.5),
    "temperature 3": BeamSettings(4, MAX_TOKENS, EOS_IDS, temperature=3.0),
    "stop ids": BeamSettings(4, MAX_TOKENS, EOS_IDS[:3], stop_token_ids=EOS_IDS[3:]),
    "stop ids with ignore_eos": BeamSettings(4, MAX_TOKENS, EOS_IDS[:3], stop_token_ids=EOS_IDS[3:], ignore_eos=True),
    "ignore_eos": BeamSettings(4, MAX_TOKENS, EOS_IDS, ignore_eos=True),
    "no end of text": BeamSettings(4, MAX_TOKENS),
    "one token": BeamSettings(6, 1, EOS_IDS),
    "two tokens": BeamSettings(6, 2, EOS_IDS),
    "sixteen beams": BeamSettings(16, MAX_TOKENS, EOS_IDS, early_stopping=True),
}


def test_variants_equal_the_reference(subject: Subject) -> None:
    core = subject.core()
    for shift in range(2):
        grid = list(VARIANTS.values())
        check(subject, core, grid[shift:] + grid[:shift])
    core.shutdown()


def test_fewer_outputs_than_beams_and_more_logprobs(subject: Subject) -> None:
    core = subject.core()
    settings = BeamSettings(6, MAX_TOKENS, EOS_IDS)
    (ours,) = run_requests(core, [beam_request(1, subject.prompts[2], settings, n=2, logprobs=3)]).values()
    reference = beam_search(subject.logits, subject.prompts[2], settings)
    assert len(ours) == 2
    assert assert_same_beams(ours, reference, settings, "n=2")
    for beam in ours:
        for place, listed in enumerate(beam.listed):
            logits = torch.from_numpy(subject.logits((*subject.prompts[2], *beam.tokens[:place])))
            assert listed[1:4] == logits.topk(3).indices.tolist()
    core.shutdown()


def test_beams_end_at_the_models_length(subject: Subject) -> None:
    core = subject.core(max_model_len=48)
    settings = BeamSettings(4, 8, EOS_IDS)
    (ours,) = run_requests(core, [beam_request(1, subject.prompts[3], settings, max_tokens=20)]).values()
    assert assert_same_beams(ours, beam_search(subject.logits, subject.prompts[3], settings), settings, "48 tokens")
    core.shutdown()


def test_settled_tokens_are_streamed(subject: Subject) -> None:
    """A token is sent when all beams agree on it, and not before; the rest comes with the end."""
    core = subject.core()
    num_early = 0
    for number, settings in enumerate([*GRID[:6], VARIANTS["ignore_eos"], VARIANTS["one beam is greedy"]]):
        reference = subject.expected(number, settings)
        (ours,) = run_requests(core, [beam_request(number, subject.prompt(number), settings)]).values()
        if not assert_same_beams(ours, reference, settings, f"{settings}"):
            continue
        growth = [after - before for before, after in itertools.pairwise([0, *reference.num_settled[:-1]])]
        early = [count for count in growth if count]
        num_early += sum(early)
        for beam in ours:
            assert beam.counts[: len(early)] == early
            assert len(beam.counts) <= len(early) + 1
    assert num_early > 0
    core.shutdown()


def test_blocks_of_beams_are_found_again(subject: Subject) -> None:
    """Beams leave in the prefix cache what their tokens say: prompts that go on from them get the right text."""
    core = subject.core()
    beams = check(subject, core, GRID[:10])
    before = core.statistics()["num_prefix_hit_tokens_total"]
    prompts = [subject.prompt(number) + beam.tokens for number, found in beams.items() for beam in found]
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    requests = [
        EngineRequest(request_id=number, prompt_token_ids=prompt, sampling=sampling)
        for number, prompt in enumerate(prompts)
    ]
    results = run_requests(core, requests)
    assert core.statistics()["num_prefix_hit_tokens_total"] > before + sum(map(len, prompts)) // 2
    for number, prompt in enumerate(prompts):
        assert_same_tokens(results[number][0].tokens, reference_generate(subject.model, prompt, 6), f"after {prompt}")
    core.shutdown()


# ---------------------------------------------------------------------------------------------- nightly


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "opt", "mistral", "qwen2_window", "gemma2"])
@pytest.mark.parametrize("seed", range(12))
def test_random_beams(architecture: str, seed: int, tmp_path: Path) -> None:
    """Any settings in any core."""
    chance = random.Random(seed)
    subject = make_subject(tmp_path / architecture, architecture)
    grid = []
    for _ in range(24):
        groups = chance.choice([1, 1, 1, 2, 3])
        ends = chance.sample(range(VOCAB_SIZE), 26)
        settings = BeamSettings(
            width=groups * chance.randint(1, 6 // groups),
            max_tokens=chance.randint(1, 24),
            eos_token_ids=tuple(ends[: chance.choice([0, 1, 8, 20])]),
            stop_token_ids=tuple(ends[20 : chance.choice([20, 20, 26])]),
            ignore_eos=chance.random() < 0.2,
            length_penalty=chance.choice([-1.0, 0.0, 0.5, 1.0, 2.0]),
            early_stopping=chance.choice([False, True, "never"]),
            temperature=chance.choice([0.0, 1.0, 0.7]),
            num_groups=groups,
            diversity_penalty=0.0 if groups == 1 else chance.choice([0.3, 1.0, 5.0]),
        )
        grid.append(settings)
    block_size = chance.choice([1, 4, 8, 16])
    num_groups = {"qwen2_window": 3, "gemma2": 3}.get(architecture, 1)
    core = subject.core(
        block_size=block_size,
        num_gpu_blocks_override=chance.choice([-(-64 // block_size) * 7 * num_groups, 4000]),
        max_model_len=64,
        max_num_batched_tokens=chance.choice([5, 64, 512]),
        max_num_seqs=chance.choice([6, 20, 64]),
        enable_prefix_caching=chance.random() < 0.6,
        preemption_mode=chance.choice(["auto", "recompute", "swap"]),
    )
    check(subject, core, grid)
    core.shutdown()
