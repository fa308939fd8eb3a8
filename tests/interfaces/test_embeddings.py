"""LLM.embed and AsyncLLM.embed: forms, errors, whole checkpoints of embedding models."""

import asyncio
import json
import threading

import numpy as np
import pytest
from safetensors.numpy import save_file

from quire import LLM, AsyncLLM, ModelError, PoolingParams, RequestError, RequestFailedError, SamplingParams
from quire.interfaces.own_pooling import Dense, OwnPooling, own_label_tokens, own_pooling
from quire.testing.fake_core import vector_of
from quire.testing.fake_llm import fake_async_llm, fake_llm
from quire.testing.tiny_checkpoints import make_checkpoint, make_model, write_tokenizer


def test_vectors_in_the_order_of_prompts():
    with fake_llm() as llm:
        first, second = llm.embed([[5, 6, 7], {"prompt_token_ids": [8]}], PoolingParams(normalize=False))
        assert np.array_equal(first.outputs.vector, vector_of([5, 6, 7]))
        assert second.outputs.embedding == vector_of([8]).tolist()
        assert (first.prompt_token_ids, first.finished, second.outputs.hidden_size) == ([5, 6, 7], True, 4)
        [text] = llm.embed("Hello")
        assert text.prompt == "Hello"
        assert np.linalg.norm(text.outputs.vector) == pytest.approx(1)
        each = llm.embed([[5, 6]] * 2, [PoolingParams(pooling="mean"), PoolingParams(dimensions=1)])
        assert [output.outputs.hidden_size for output in each] == [4, 1]
        # texts as before
        assert llm.generate([[5, 6, 7]])[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        ([[5], []], None, "no tokens"),
        ([[5], [10**9]], None, "whole number between 0 and"),
        ([[5]] * 2, [PoolingParams()], "1 given for 2 prompts"),
        ([[5]], [3], "must be PoolingParams"),
        ([[5] * 300], None, "maximum context length"),
        ([[5]], PoolingParams(dimensions=10**6), "dimensions=1000000"),
    ],
)
def test_a_mistake_is_found_before_anything_starts(prompts, params, words):
    with fake_llm() as llm:
        with pytest.raises(RequestError, match=words):
            llm.embed(prompts, params)
        assert llm.statistics()["requests_open"] == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pooling": "lst"}, "last, mean or cls"),
        ({"dimensions": 0}, "between 1"),
        ({"normalize": 1}, "True or False"),
        ({"normalise": True}, "normalize"),
    ],
)
def test_parameters_say_what_is_wrong(fields, words):
    with pytest.raises(RequestError, match=words):
        PoolingParams(**fields)


def test_one_that_fails_is_no_empty_vector():
    with fake_llm() as llm:
        llm.control("fail_at", {"num_tokens": 0, "error": "not finite"})
        with pytest.raises(RequestFailedError, match="not finite"):
            llm.embed([[5], [6]])


def test_matrices_are_not_multiplied_on_the_event_loop():
    threads = []

    class Watched(Dense):
        def __call__(self, vector):
            threads.append(threading.current_thread())
            return super().__call__(vector)

    async def main():
        async with fake_async_llm() as engine:
            weight = np.arange(8, dtype=np.float32).reshape(2, 4)
            engine._parts.embeddings._own = OwnPooling("last", (Watched(weight, None, False),), normalizes=False)
            output = await engine.embed([5, 6])
            assert output.outputs.embedding == pytest.approx((weight @ vector_of([5, 6])).tolist(), rel=1e-5)
            assert threading.current_thread() not in threads

    asyncio.run(main())
    assert threads


def test_streams_and_labels():
    async def main():
        engine = fake_async_llm()
        async with engine:
            outputs = await asyncio.gather(*(engine.embed([5, number], PoolingParams()) for number in range(9)))
            assert [output.prompt_token_ids[1] for output in outputs] == list(range(9))
            await engine.control("hold", {"at": 0})
            begun = []
            task = asyncio.ensure_future(engine.embed([5, 6], request_id="mine", on_start=begun.append))
            while not engine._labels.count("mine"):
                await asyncio.sleep(0)
            await engine.abort("mine")
            with pytest.raises(RequestFailedError, match="aborted"):
                await task
            assert engine.num_open_requests == 0
            await engine.control("hold", {"at": None})
            assert (await engine.embed([5, 6], request_id="mine", on_start=begun.append)).request_id == "mine"
            assert begun == [0]

    asyncio.run(asyncio.wait_for(main(), 30))


# ------------------------------------------------------------------------------------------------- what authors say


def write(folder, modules=None, pooling=None, name="1_Pooling"):
    if modules is not None:
        kinds = [{"idx": number, "path": path, "type": kind} for number, (path, kind) in enumerate(modules)]
        (folder / "modules.json").write_text(json.dumps(kinds))
    if pooling is not None:
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **pooling}))
    return folder


_PARTS = [("", "sentence_transformers.models.Transformer"), ("1_Pooling", "sentence_transformers.models.Pooling")]
_NORMALIZE = ("2_Normalize", "sentence_transformers.models.Normalize")


@pytest.mark.parametrize(
    ("modules", "pooling", "expected"),
    [
        (None, None, "last"),
        (_PARTS, {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, "last"),
        (_PARTS, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        (None, {"pooling_mode_mean_tokens": True}, "mean"),
        (_PARTS, {"pooling_mode_cls_token": True}, "cls"),
        ([*_PARTS, _NORMALIZE], {"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_the_pooling_that_its_authors_wrote_down(tmp_path, modules, pooling, expected):
    assert own_pooling(write(tmp_path, modules, pooling)).how == expected


@pytest.mark.parametrize(
    ("modules", "pooling", "words"),
    [
        (_PARTS, {"pooling_mode_max_tokens": True}, "pooled by max_tokens"),
        (_PARTS, {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "mean_tokens and max_tokens"),
        ([*_PARTS, ("2_Dense", "sentence_transformers.models.Dense")], {"pooling_mode_lasttoken": True}, "2_Dense"),
        ([*_PARTS, ("2_LSTM", "sentence_transformers.models.LSTM")], {"pooling_mode_lasttoken": True}, "kind LSTM"),
        (["broken"], None, "kind"),
    ],
)
def test_what_is_not_computed_here_is_said(tmp_path, modules, pooling, words):
    if modules == ["broken"]:
        (tmp_path / "modules.json").write_text('["broken"]')
    else:
        write(tmp_path, modules, pooling)
    with pytest.raises(RequestError, match=words):
        own_pooling(tmp_path)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"[" + b"1" * 100_000 + b"]", b"\xff"])
def test_a_broken_list_of_parts_is_one_line(tmp_path, content):
    (tmp_path / "modules.json").write_bytes(content)
    for read in (own_pooling, lambda path: own_label_tokens(path, 320)):
        with pytest.raises(RequestError, match=r"modules\.json of this model cannot be read"):
            read(tmp_path)


def test_what_a_file_says_is_shown_in_part(tmp_path):
    write(tmp_path, [("", "x." + "A" * 10**6)])
    with pytest.raises(RequestError, match="kind AAA") as caught:
        own_pooling(tmp_path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("shapes", "number", "words"),
    [
        ({"linear.weight": (2, 3, 4)}, 0.0, "no matrix"),
        ({"linear.weight": (2, 3), "linear.bias": (5,)}, 0.0, "no matrix"),
        ({"linear.weight": (2, 3)}, np.nan, "infinities or NaN"),
        ({"linear.bias": (2,)}, 0.0, "cannot be read"),
    ],
)
def test_a_layer_behind_the_pooling_that_is_none_is_refused(tmp_path, shapes, number, words):
    write_dense(tmp_path, {name: np.full(shape, number, dtype=np.float32) for name, shape in shapes.items()})
    with pytest.raises(RequestError, match=words):
        own_pooling(tmp_path)


def test_a_layer_behind_the_pooling_must_fit(tmp_path):
    write_dense(tmp_path, {"linear.weight": np.ones((2, 3), dtype=np.float32)})
    [dense] = own_pooling(tmp_path).dense
    assert dense(np.ones(3)).tolist() == [3.0, 3.0]
    with pytest.raises(RequestError, match=r"3 inputs .* 64 numbers"):
        dense(np.ones(64))


def write_dense(folder, tensors):
    write(folder, [*_PARTS, ("2_Dense", "x.Dense")], {"pooling_mode_lasttoken": True})
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "config.json").write_text(json.dumps({"activation_function": "x.Identity"}))
    save_file(tensors, folder / "2_Dense" / "model.safetensors")


@pytest.mark.parametrize("tokens", [(10**30, 5), (-1, 5), (320, 5), ("x" * 10**6, 5), (None, 5), (True, 5)])
def test_tokens_that_compare_texts_must_be_among_all(tmp_path, tokens):
    write(tmp_path, [("", "x.Transformer"), ("1_LogitScore", "x.LogitScore")])
    (tmp_path / "1_LogitScore").mkdir()
    declared = dict(zip(("true_token_id", "false_token_id"), tokens, strict=True))
    (tmp_path / "1_LogitScore" / "config.json").write_text(json.dumps(declared))
    with pytest.raises(RequestError, match="two of its 320 are needed") as caught:
        own_label_tokens(tmp_path, 320)
    assert len(str(caught.value)) < 1000


def test_a_folder_outside_the_checkpoint_is_not_read(tmp_path):
    inside = tmp_path / "model"
    inside.mkdir()
    write(tmp_path, pooling={"pooling_mode_mean_tokens": True}, name="other")
    write(inside, [("../other", "x.Pooling")])
    assert own_pooling(inside).how == "last"


# ------------------------------------------------------------------------------------------------- whole checkpoints

PROMPTS = [[5, 6, 7, 8], [9] * 20]


def expected_means(backbone) -> list[np.ndarray]:
    import torch

    with torch.inference_mode():
        states = [backbone(torch.tensor([prompt])).last_hidden_state[0].mean(dim=0) for prompt in PROMPTS]
    return [(state / state.norm()).numpy() for state in states]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_a_checkpoint_of_a_backbone_alone(tmp_path, name):
    """As embedding models come: no head, no prefix in the names, a pooling of its own."""
    backbone = make_model(name).model
    backbone.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    write(tmp_path, [*_PARTS, _NORMALIZE], {"pooling_mode_mean_tokens": True})
    assert json.loads((tmp_path / "config.json").read_text())["architectures"][0].endswith("Model")
    with LLM(str(tmp_path), device="cpu", dtype="float32", num_threads=1, max_model_len=64) as llm:
        outputs = llm.embed(PROMPTS, use_tqdm=False)
        for output, expected in zip(outputs, expected_means(backbone), strict=True):
            assert np.abs(output.outputs.vector - expected).max() < 1e-5
        with pytest.raises(RequestError, match="generates no text"):
            llm.generate([[5]])


def test_names_without_a_prefix_and_a_head_that_is_tied(tmp_path):
    """The architecture says that there is a head, the weights are those of the backbone."""
    model = make_model("qwen3_tied")
    model.model.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    write_tokenizer(tmp_path)
    with LLM(str(tmp_path), device="cpu", dtype="float32", num_threads=1, max_model_len=64) as llm:
        [first, _] = llm.embed(PROMPTS, PoolingParams(pooling="mean"), use_tqdm=False)
        assert np.abs(first.outputs.vector - expected_means(model.model)[0]).max() < 1e-5
        assert llm.generate([[5]], use_tqdm=False)[0].outputs[0].token_ids


def test_an_encoder_is_refused_at_the_start(tmp_path):
    with pytest.raises(ModelError, match="bert"):
        LLM(str(make_checkpoint(tmp_path / "m", "bert")), device="cpu", num_threads=1)


def test_beside_texts_in_an_engine_of_its_own_process():
    async def main():
        async with AsyncLLM(device="cpu", dtype="float32", num_threads=1, max_model_len=128) as engine:

            async def text():
                async for output in engine.generate([7, 8, 9], SamplingParams(temperature=0.0)):
                    last = output
                return last.outputs[0].token_ids

            alone = await text()
            vector = (await engine.embed([5, 6, 7])).outputs.vector
            together = await asyncio.gather(text(), engine.embed([5, 6, 7]), text(), engine.embed([5, 6, 7]))
            assert together[0] == together[2] == alone
            for output in together[1::2]:
                assert np.abs(output.outputs.vector - vector).max() < 1e-5

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_text_config_that_is_none_has_nothing_to_say(tmp_path):
    path = make_checkpoint(tmp_path / "m", "llama")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "text_config": "x"}))
    with LLM(str(path), device="cpu", num_threads=1, max_model_len=32, num_gpu_blocks_override=8) as llm:
        [output] = llm.embed("Hello")
        assert output.outputs.hidden_size == config["hidden_size"]
