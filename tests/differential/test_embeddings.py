"""Vectors of real models: those of Transformers, whole, in chunks, behind a cached prefix, beside others."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from quire.engine_core.engine_core import EngineCore
from quire.messages import EngineRequest, split_sequence_id
from quire.sampling_params import SamplingParams
from quire.testing.greedy import real_core
from quire.testing.tiny_checkpoints import make_checkpoint

# native files, windows, a head of another width, and models that run through the Transformers library
ARCHITECTURES = ["llama", "qwen3_tied", "mistral", "gpt2", "opt_post_norm", "gemma2"]
POOLINGS = ("last", "mean")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp(request.param) / "model", request.param)


@pytest.fixture(scope="module")
def prompts():
    draw = random.Random(3)
    return [[draw.randrange(3, 200) for _ in range(count)] for count in (1, 5, 16, 37)]


@pytest.fixture(scope="module")
def expected(checkpoint, prompts):
    """By pooling, what Transformers computes for each prompt alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    backbone = getattr(model, model.base_model_prefix)
    with torch.inference_mode():
        states = [backbone(torch.tensor([prompt])).last_hidden_state[0].numpy() for prompt in prompts]
    return {"last": [state[-1] for state in states], "mean": [state.mean(axis=0) for state in states]}


def embed(core: EngineCore, prompts: list[list[int]], pooling: str, first_id: int = 0) -> list[np.ndarray]:
    for number, prompt in enumerate(prompts):
        core.add(request(first_id + number, prompt, pooling))
    found = {}
    while core.has_work:
        outputs = core.step()
        assert not [end.error for end in outputs.ends if end.error]
        for vector in outputs.vectors:
            found[split_sequence_id(vector.sequence_id)[0] - first_id] = np.frombuffer(vector.values, np.float32)
    return [found[number] for number in range(len(prompts))]


def request(request_id: int, prompt: list[int], pooling: str = "", **sampling) -> EngineRequest:
    params = SamplingParams(temperature=0.0, ignore_eos=True, **sampling)
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt, sampling=params, pooling=pooling)


def assert_close(found, expected, tolerance: float = 2e-5) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert np.abs(one - other).max() <= tolerance * np.abs(other).max()


@pytest.mark.parametrize("pooling", POOLINGS)
def test_as_transformers_computes_them(checkpoint, prompts, expected, pooling):
    core = real_core(checkpoint, max_model_len=64, num_gpu_blocks_override=64)
    assert_close(embed(core, prompts, pooling), expected[pooling])
    # again: of the last token all but one are cached, of a mean nothing is
    assert_close(embed(core, prompts, pooling, first_id=100), expected[pooling])
    hits = core.statistics()["num_prefix_hit_tokens_total"]
    assert (hits > 0) == (pooling == "last")
    core.shutdown()


@pytest.mark.parametrize("pooling", POOLINGS)
def test_in_chunks_beside_others_that_push_them_out(checkpoint, prompts, expected, pooling):
    """A budget of seven tokens, and outputs that grow into the memory of the prompts."""
    core = real_core(
        checkpoint,
        max_model_len=64,
        # a request needs four; with two groups of layers twelve, as windows are kept whole for a while
        num_gpu_blocks_override=13 if "gemma2" in str(checkpoint) else 7,
        max_num_batched_tokens=7,
        max_num_seqs=4,
        enable_prefix_caching=False,
    )
    for number in range(2):
        core.add(request(50 + number, [7 + number] * 9, max_tokens=40))
    assert_close(embed(core, prompts, pooling), expected[pooling])
    core.shutdown()
