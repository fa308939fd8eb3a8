"""n samples of one prompt: the same tokens alone, in a busy batch, and after a preemption (3.4.4, 3.4.5)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.engine_core.engine_core import EngineCore
from quire.messages import EngineRequest
from quire.sampling_params import SamplingParams
from quire.testing.greedy import assert_same_tokens, real_core, reference_generate
from quire.testing.run_requests import run_requests
from quire.testing.tiny_checkpoints import VOCAB_SIZE, make_checkpoint
from quire.worker.kernels import cpu

NUM_SAMPLES = 5
NUM_TOKENS = 24
LENGTHS = [16, 37, 5, 48, 21]
AMPLE: dict[str, Any] = {"block_size": 8, "num_gpu_blocks_override": 2000, "max_model_len": 96, "max_num_seqs": 64}
# Five sequences of 48 + 24 tokens need 45 blocks if nothing is shared.
SCARCE = {**AMPLE, "num_gpu_blocks_override": 46, "max_num_batched_tokens": 64}
Tokens = list[list[int]]
same_in_any_batch = pytest.mark.skipif(not cpu.load(), reason="torch's own kernels do not promise this")


@dataclass
class Subject:
    """A checkpoint, prompts, and what each of them yields alone with ample memory."""

    path: Path
    model: Any
    prompts: Tokens
    alone: list[Tokens]


@pytest.fixture(scope="module", params=["llama", "gpt2", "qwen3"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    path = make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]
    alone = []
    for number, prompt in enumerate(prompts):
        core = real_core(path, **AMPLE)
        alone.append(samples(core, [sampled(number, prompt)])[number])
        core.shutdown()
    return Subject(path, model, prompts, alone)


def sampled(number: int, prompt: list[int], **changes: Any) -> EngineRequest:
    asked = {"n": NUM_SAMPLES, "temperature": 1.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **changes}
    return EngineRequest(
        request_id=number, prompt_token_ids=prompt, sampling=SamplingParams(**asked), seed=1000 + number
    )


def samples(core: EngineCore, requests: list[EngineRequest]) -> dict[int, Tokens]:
    results = run_requests(core, requests)
    assert core.statistics()["num_blocks_held"] == 0
    return {number: [sequence.tokens for sequence in found] for number, found in results.items()}


def test_samples_differ_and_prompts_do_not_matter_to_each_other(subject: Subject) -> None:
    """Otherwise the other tests would say nothing."""
    for tokens in subject.alone:
        assert len({tuple(sample) for sample in tokens}) == NUM_SAMPLES
        assert all(len(sample) == NUM_TOKENS for sample in tokens)


@pytest.mark.parametrize("mode", [None, "recompute", "swap"])
def test_greedy_samples_agree(subject: Subject, mode: str | None) -> None:
    core = real_core(subject.path, **({**SCARCE, "preemption_mode": mode} if mode else AMPLE))
    requests = [sampled(number, prompt, temperature=0.0) for number, prompt in enumerate(subject.prompts)]
    found = samples(core, requests)
    assert (core.statistics()["num_preemptions_total"] > 0) == (mode is not None)
    core.shutdown()
    for number, prompt in enumerate(subject.prompts):
        reference = reference_generate(subject.model, prompt, NUM_TOKENS)
        assert_same_tokens(found[number][0], reference, f"prompt {number}")
        assert all(sample == found[number][0] for sample in found[number]), f"greedy samples of prompt {number} differ"


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_seeded_samples_repeat_alone_and_in_a_busy_batch(subject: Subject, prefix_caching: bool) -> None:
    core = real_core(subject.path, **AMPLE, enable_prefix_caching=prefix_caching)
    for number, prompt in enumerate(subject.prompts):
        # the second time the prompt comes from the prefix cache
        assert samples(core, [sampled(number, prompt)])[number] == subject.alone[number]
        assert samples(core, [sampled(number, prompt)])[number] == subject.alone[number]
    busy = [sampled(number, prompt) for number, prompt in enumerate(subject.prompts)]
    busy += [sampled(50 + number, prompt[::-1], n=1 + number) for number, prompt in enumerate(subject.prompts)]
    busy += [sampled(80 + number, prompt[:9], temperature=0.0) for number, prompt in enumerate(subject.prompts)]
    found = samples(core, busy)
    assert [found[number] for number in range(len(LENGTHS))] == subject.alone
    core.shutdown()


@same_in_any_batch
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_seeded_samples_repeat_after_preemption(subject: Subject, mode: str, prefix_caching: bool) -> None:
    core = real_core(subject.path, **SCARCE, preemption_mode=mode, enable_prefix_caching=prefix_caching)
    for order in (1, -1):
        found = samples(core, [sampled(number, prompt) for number, prompt in list(enumerate(subject.prompts))[::order]])
        assert [found[number] for number in range(len(LENGTHS))] == subject.alone
    statistics = core.statistics()
    assert statistics["num_preemptions_total"] > 0, "the test asks for preemption"
    if mode != "auto":
        assert statistics[f"num_preemptions_by_{mode}_total"] > 0
    core.shutdown()


@same_in_any_batch
def test_an_end_token_ends_one_sample_and_not_the_others(subject: Subject) -> None:
    """Sequences of a request end one by one, also while the request waits for memory."""
    for options in (AMPLE, {**SCARCE, "preemption_mode": "swap"}, {**SCARCE, "preemption_mode": "recompute"}):
        core = real_core(subject.path, **options)
        requests = []
        for number, prompt in enumerate(subject.prompts):
            stops = [subject.alone[number][index][4 * index + 3] for index in range(1, NUM_SAMPLES)]
            requests.append(sampled(number, prompt, stop_token_ids=stops))
        found = samples(core, requests)
        core.shutdown()
        for number, request in enumerate(requests):
            stops = request.sampling.stop_token_ids
            expected = [
                sample[: next((i + 1 for i, token in enumerate(sample) if token in stops), NUM_TOKENS)]
                for sample in subject.alone[number]
            ]
            assert found[number] == expected
