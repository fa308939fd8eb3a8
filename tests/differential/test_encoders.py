"""Models that see a text as a whole, and heads of labels: vectors and logits are those of Transformers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from quire.errors import OptionError
from quire.messages import EngineRequest, split_sequence_id
from quire.sampling_params import SamplingParams
from quire.testing.greedy import real_core
from quire.testing.tiny_encoders import CLASSIFIERS, ENCODERS, make_encoder

LENGTHS = (1, 5, 16, 37, 90)


@pytest.fixture(scope="module", params=ENCODERS)
def encoder(request, tmp_path_factory):
    return make_encoder(tmp_path_factory.mktemp(request.param) / "model", request.param)


@pytest.fixture(scope="module")
def prompts():
    draw = random.Random(5)
    return [[draw.randrange(3, 200) for _ in range(count)] for count in LENGTHS]


def pooled(core, prompts, pooling, **fields) -> list[np.ndarray]:
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=1)
        core.add(EngineRequest(request_id=number, prompt_token_ids=prompt, sampling=params, pooling=pooling, **fields))
    found = {}
    while core.has_work:
        outputs = core.step()
        assert not [end.error for end in outputs.ends if end.error]
        for vector in outputs.vectors:
            found[split_sequence_id(vector.sequence_id)[0]] = np.frombuffer(vector.values, np.float32)
    return [found[number] for number in range(len(prompts))]


def assert_close(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert np.abs(one - other).max() <= 3e-5 * np.abs(other).max()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_vectors_are_those_of_transformers(encoder, prompts, backend):
    from transformers import AutoModel

    model = AutoModel.from_pretrained(encoder, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = [model(torch.tensor([prompt])).last_hidden_state[0].numpy() for prompt in prompts]
    core = real_core(encoder, attention_backend=backend)
    together = pooled(core, prompts, "cls")
    assert_close(together, [state[0] for state in states])
    assert_close(pooled(core, prompts, "mean"), [state.mean(axis=0) for state in states])
    alone = [pooled(core, [prompt], "cls")[0] for prompt in prompts]
    assert all(np.array_equal(one, other) for one, other in zip(together, alone, strict=True))
    assert any("no KV cache" in line for line in core.ready.report)
    core.shutdown()


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_labels_are_those_of_transformers(tmp_path, prompts, name):
    from transformers import AutoModelForSequenceClassification

    path = make_encoder(tmp_path / "model", name, is_classifier=True)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    model.config.pad_token_id = 0
    has_kinds = getattr(model.config, "type_vocab_size", 1) > 1
    # a prompt of one token is one text
    starts = [len(prompt) // 2 or len(prompt) for prompt in prompts]
    segments = [[0] * start + [1] * (len(prompt) - start) for prompt, start in zip(prompts, starts, strict=True)]
    with torch.inference_mode():
        expected = [
            model(torch.tensor([prompt]), **({"token_type_ids": torch.tensor([kinds])} if has_kinds else {})).logits[0]
            for prompt, kinds in zip(prompts, segments, strict=True)
        ]
    pooling = {"qwen3": "last", "llama": "last", "modernbert_mean": "mean"}.get(name, "cls")
    core = real_core(path)
    found = [
        pooled(core, [prompt], pooling, is_classified=True, second_start=len(prompt) // 2)[0] for prompt in prompts
    ]
    assert_close(found, [logits.numpy() for logits in expected])
    core.shutdown()


def test_a_request_is_one_step_or_refused(tmp_path, prompts):
    path = make_encoder(tmp_path / "model", "bert")
    core = real_core(path, max_num_batched_tokens=40)
    assert_close(pooled(core, prompts[:4], "mean"), pooled(core, prompts[:4], "mean"))
    core.add(
        EngineRequest(request_id=99, prompt_token_ids=prompts[4], sampling=SamplingParams(max_tokens=1), pooling="cls")
    )
    core.add(EngineRequest(request_id=98, prompt_token_ids=prompts[0], sampling=SamplingParams(max_tokens=1)))
    errors = {split_sequence_id(end.sequence_id)[0]: end.error for end in core.step().ends}
    assert "max_num_batched_tokens=40" in errors[99]
    assert "makes vectors of whole prompts" in errors[98]
    core.shutdown()
    with pytest.raises(OptionError, match="nothing of it is kept"):
        real_core(path, kv_cache_memory_bytes=2**20)
    for options in ({"enable_lora": True}, {"model_impl": "transformers"}):
        with pytest.raises(OptionError, match="files of their own"):
            real_core(path, **options)
