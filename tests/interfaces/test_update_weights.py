"""Weights of a running engine change in place: afterwards it is the other model, bit for bit, in every respect."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.quantized_checkpoints import write_gptq

from quire import LLM, AsyncLLM, RequestError, SamplingParams
from quire.engine_core.driver import CoreDriver
from quire.errors import EngineError
from quire.interfaces.weights import WeightUpdates
from quire.messages import ControlCall, ControlReply, EngineFailed, EngineRequest, split_sequence_id
from quire.modeling import load_for_training
from quire.observability.run_log import RunLog
from quire.simulation.replay import Replay
from quire.testing.greedy import generate_greedy, real_core
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker.weight_update import WeightUpdate

PROMPTS = [
    "Paper is folded, cut and sewn; a quire is some leaves",
    "Once upon a time there was a printer without ink",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)


def opened(path: Path, **options: Any) -> LLM:
    return LLM(str(path), **{"dtype": "float32", "num_threads": 1, "max_model_len": 128, **options})


def answers(llm: LLM) -> list[tuple[list[int], float | None]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].cumulative_logprob) for output in outputs]


def two(tmp_path: Path, name: str) -> tuple[Path, Path]:
    first = make_checkpoint(tmp_path / "first", name, seed=1)
    return first, make_checkpoint(tmp_path / "second", name, seed=2)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama_tied", {}),
        ("qwen3_moe", {"dtype": "bfloat16"}),
        ("llama", {"quantization": "int8"}),
        *(
            pytest.param(name, options, marks=pytest.mark.nightly)
            for name, options in (
                ("llama", {"quantization": "int4", "enforce_eager": True}),
                ("llama", {"tensor_parallel_size": 2}),
                ("mistral", {"tensor_parallel_size": 2, "quantization": "int8"}),
                ("llama", {"engine_process": True}),
                ("deepseek_v3", {}),
                ("lfm2", {}),
                ("gemma3", {}),
                ("opt", {}),
            )
        ),
    ],
)
def test_the_engine_becomes_the_other_model_and_back_again(tmp_path: Path, name: str, options: dict[str, Any]):
    first, second = two(tmp_path, name)
    with opened(second, **options) as llm:
        expected = answers(llm)
    with opened(first, **options) as llm:
        before = answers(llm)
        assert before == answers(llm), "the prefix cache changes nothing"
        assert before != expected
        updated = llm.update_weights(load_file(second / "model.safetensors"))
        assert updated.num_weights > 0
        assert answers(llm) == expected
        again = llm.update_weights(first)
        assert again.version != updated.version
        assert answers(llm) == before


def test_a_head_that_config_json_calls_tied(tmp_path: Path):
    """Where the checkpoint has another head, it is a weight of its own; where it has none, two are refused."""
    first, second = two(tmp_path, "llama_tied")
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    tensors = [load_file(path / "model.safetensors") for path in (first, second)]
    untied = [{**weights, head: weights[embedding] + 0.25} for weights in tensors]
    with opened(first) as llm:
        with pytest.raises(RequestError, match=f"{embedding}: differs from {head}, and the model has one weight"):
            llm.update_weights(untied[1])
        llm.update_weights({embedding: tensors[1][embedding], head: tensors[1][embedding].clone()})
    for path, weights in zip((first, second), untied, strict=True):
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with opened(second) as llm:
        expected = answers(llm)
    with opened(first) as llm:
        before = answers(llm)
        llm.update_weights(untied[1])
        assert answers(llm) == expected != before


def test_a_part_of_the_weights(tmp_path: Path):
    first, second = two(tmp_path, "llama")
    changed = {name: tensor for name, tensor in load_file(second / "model.safetensors").items() if "layers.1." in name}
    mixed = load_file(first / "model.safetensors") | changed
    with opened(first) as llm:
        llm.update_weights(changed)
        updated = answers(llm)
    save_file(mixed, first / "model.safetensors", metadata={"format": "pt"})
    with opened(first) as llm:
        assert answers(llm) == updated


def broken(tensors: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    name = "model.layers.2.self_attn.q_proj.weight"
    match kind:
        case "shape":
            return {**tensors, name: tensors[name][:3].clone()}
        case "finite":
            return {**tensors, name: tensors[name].clone().index_fill_(0, torch.tensor([1]), float("nan"))}
        case "name":
            return {**tensors, "model.layers.9.mlp.up_proj.weight": tensors[name]}
        case _:
            return {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("kind", "words"),
    [("shape", "in the checkpoint"), ("finite", "NaN"), ("name", "no such weight"), ("part", r"qkv_proj.weight \(q\)")],
)
def test_what_is_wrong_changes_nothing(tmp_path: Path, kind: str, words: str):
    first, second = two(tmp_path, "llama")
    with opened(first) as llm:
        before = answers(llm)
        with pytest.raises(RequestError, match=words):
            llm.update_weights(broken(load_file(second / "model.safetensors"), kind))
        assert answers(llm) == before


def test_what_one_rank_alone_has_is_checked_there(tmp_path: Path):
    """A shape that only a rank's cut stumbles over, what lies in the last stage, and that stage alone."""
    first, second = two(tmp_path, "llama")
    tensors = load_file(second / "model.safetensors")
    of_last_layer = {name: tensor for name, tensor in tensors.items() if "layers.2." in name}
    with opened(first, tensor_parallel_size=2) as llm:
        before = answers(llm)
        with pytest.raises(RequestError, match="does not fit"):
            llm.update_weights({"model.layers.0.self_attn.o_proj.weight": torch.zeros(7)})
        assert answers(llm) == before
    with opened(first, pipeline_parallel_size=2) as llm:
        before = answers(llm)
        with pytest.raises(RequestError, match="in the checkpoint"):
            llm.update_weights(broken(tensors, "shape"))
        assert answers(llm) == before
        llm.update_weights(of_last_layer)
        assert answers(llm) != before


def test_codes_of_a_checkpoint_are_not_made_of_numbers(tmp_path: Path):
    first, second = two(tmp_path, "llama")
    path = tmp_path / "codes"
    path.mkdir()
    write_gptq(path, first)
    with opened(path) as llm:
        before = answers(llm)
        with pytest.raises(RequestError, match="codes"):
            llm.update_weights(second)
        assert answers(llm) == before


def test_the_unit_of_scales_is_recorded(tmp_path: Path):
    first, second = two(tmp_path, "llama")
    with opened(first, quantization="int4") as llm:
        before = answers(llm)
        with pytest.raises(RequestError, match="enforce_eager"):
            llm.update_weights(second)
        assert answers(llm) == before


def test_a_file_that_changes_while_it_is_read_ends_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first, second = two(tmp_path, "llama")
    replace = WeightUpdate._replace

    def touch_and_replace(self: WeightUpdate, *args: Any) -> None:
        os.utime(second / "model.safetensors", (1, 1))
        replace(self, *args)

    monkeypatch.setattr(WeightUpdate, "_replace", touch_and_replace)
    driver = CoreDriver(real_core(first))
    driver.handle(ControlCall(call_id=7, name="update_weights", args={"path": str(second)}))
    assert driver.is_dead
    errors = [message.error for message in driver.take() if isinstance(message, (EngineFailed, ControlReply))]
    assert len(errors) == 2
    assert all("two kinds" in str(error) for error in errors)
    driver.shutdown()


class Copies:
    """An engine that says what it is asked, and when it looks at the file."""

    def __init__(self, refusal: str | None = None) -> None:
        self.refusal = refusal
        self.calls: list[str] = []
        self.is_asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def control(self, name: str, args: dict[str, Any]) -> Any:
        self.is_asked.set()
        await self.may_answer.wait()
        self.calls.append(name)
        assert Path(args["path"]).is_file()
        if self.refusal is not None:
            raise EngineError(self.refusal)
        return {"version": "00", "num_weights": 1, "num_requests": 0}


def test_a_file_stays_until_it_was_read_though_nobody_waits():
    async def main() -> None:
        engine: Any = Copies()
        task = asyncio.ensure_future(WeightUpdates().update(engine, {"a": torch.zeros(1)}))
        await engine.is_asked.wait()
        task.cancel()
        await asyncio.sleep(0)
        engine.may_answer.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.calls == ["check_weights", "update_weights"]

    asyncio.run(main())


def test_no_copy_begins_while_another_one_refuses():
    async def main() -> None:
        engine: Any = Copies("prefixes are pinned")
        engine.may_answer.set()
        with pytest.raises(RequestError, match="pinned"):
            await WeightUpdates().update(engine, {"a": torch.zeros(1)})
        assert engine.calls == ["check_weights"]

    asyncio.run(main())


def test_an_engine_that_died_comes_back_with_what_files_can_bring(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """And says what it has: the names of blocks, what it is asked for, and its answers agree."""
    first, second = two(tmp_path, "llama")

    async def answered(engine: AsyncLLM) -> list[int]:
        return [output async for output in engine.generate(PROMPTS[0], GREEDY)][-1].outputs[0].token_ids

    async def num_updates(engine: AsyncLLM) -> float:
        return (await engine.statistics())["num_weight_updates"]

    async def main() -> None:
        options: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_model_len": 128}
        async with AsyncLLM(str(first), **options) as engine:
            of_checkpoint = await answered(engine)
            version = (await engine.update_weights(second)).version
            updated = await answered(engine)
            assert updated != of_checkpoint
            await killed(engine)
            assert (engine.weights_version, await num_updates(engine)) == (version, 1)
            assert await answered(engine) == updated
            assert "of version" in caplog.text
            assert "Update them once more" not in caplog.text
            # out of memory, which nobody has any more
            await engine.update_weights(load_file(second / "model.safetensors"))
            assert await num_updates(engine) == 2
            await killed(engine)
            assert (engine.weights_version, await num_updates(engine)) == ("", 0)
            assert await answered(engine) == of_checkpoint
            assert "the engine has the checkpoint's weights again" in caplog.text

    caplog.set_level("INFO", logger="quire.interfaces.weights")
    asyncio.run(main())


async def killed(engine: AsyncLLM) -> None:
    os.kill(engine.processes[0].pid, signal.SIGKILL)
    while engine.dead_reason is None:
        await asyncio.sleep(0.01)
    await engine.restart()


async def bring_replica(updates: WeightUpdates, engine: Any) -> None:
    async with updates.bringing_replica(engine):
        """It would serve now."""


def test_no_update_passes_a_replica_by_that_does_not_serve_yet(tmp_path: Path):
    """It would reach the others alone, and nobody would ever tell."""

    async def main() -> None:
        updates = WeightUpdates()
        engine: Any = Copies()
        engine.may_answer.set()
        file = tmp_path / "a.safetensors"
        file.write_bytes(b"")
        async with updates.bringing_replica(engine):
            update = asyncio.ensure_future(updates.update(engine, file))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not engine.calls
        await update
        assert engine.calls == ["check_weights", "update_weights"]

    asyncio.run(main())


def test_a_replica_without_the_weights_of_the_others_does_not_serve(tmp_path: Path):
    async def main() -> None:
        updates = WeightUpdates()
        engine: Any = Copies()
        engine.may_answer.set()
        await bring_replica(updates, engine)
        file = tmp_path / "a.safetensors"
        file.write_bytes(b"")
        await updates.update(engine, file)
        engine.calls.clear()
        await bring_replica(updates, engine)
        assert engine.calls == ["check_weights", "update_weights"]
        await updates.update(engine, {"a": torch.zeros(1)})
        with pytest.raises(EngineError, match="the other replicas have weights of version 00"):
            await bring_replica(updates, engine)
        changed = WeightUpdates()
        await changed.update(engine, file)
        changed.version = "01"
        changed._files = [(file, "01")]
        with pytest.raises(EngineError, match="has changed since"):
            await bring_replica(changed, engine)
        # those of the others are what they were
        assert updates.version == "00"

    asyncio.run(main())


def test_keys_that_know_nothing_of_weights_are_refused(tmp_path: Path):
    first, second = two(tmp_path, "llama")
    with (
        opened(first, kv_connector={"name": "memory"}) as llm,
        pytest.raises(RequestError, match="kv_connector=memory"),
    ):
        llm.update_weights(second)


def test_a_run_is_replayed_when_the_file_has_gone(tmp_path: Path):
    first, second = two(tmp_path, "llama")
    log = tmp_path / "run.qlog"
    with opened(first, record=str(log)) as llm:
        before = answers(llm)
        llm.update_weights(load_file(second / "model.safetensors"))
        assert answers(llm) != before
    outcome = Replay(RunLog(log), None).run()
    assert outcome.difference is None
    assert outcome.num_steps > 10


def test_a_pinned_prefix_must_go_first(tmp_path: Path):
    first, second = two(tmp_path, "llama")
    with opened(first) as llm:
        llm.pin_prefix(PROMPTS[0], "leaves")
        with pytest.raises(RequestError, match="Unpin"):
            llm.update_weights(second)
        llm.unpin_prefix("leaves")
        llm.update_weights(second)


@pytest.mark.parametrize(
    "options", [{}, {"async_scheduling": True}, {"swap_space": 1 << 20, "preemption_mode": "swap"}]
)
def test_requests_that_run_go_on_with_the_new_weights(tmp_path: Path, options: dict[str, Any]):
    """What follows is what the other model says after the tokens that were there."""
    first, second = two(tmp_path, "llama")
    prompts = [list(range(7, 40)), list(range(90, 110))]
    core = real_core(first, **options)
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        core.add(EngineRequest(request_id=number, prompt_token_ids=prompt, sampling=sampling))
    tokens: list[list[int]] = [[], []]

    def step() -> None:
        outputs = core.step()
        for sequence_id, token in zip(outputs.sequence_ids.tolist(), outputs.token_ids.tolist(), strict=True):
            tokens[split_sequence_id(sequence_id)[0]].append(token)

    while min(map(len, tokens)) < 8:
        step()
    assert core.control("update_weights", {"path": str(second)})["num_requests"] == 2
    # steps that were under way still bring a token of the old model
    told = [len(one) for one in tokens]
    while core.has_work:
        step()
    core.shutdown()
    other = real_core(second)
    for prompt, whole, count in zip(prompts, tokens, told, strict=True):
        is_late = bool(options.get("async_scheduling"))
        ends = [count + late for late in range(2 + is_late)]
        continued = [whole[:end] + generate_greedy(other, [prompt + whole[:end]], 24 - end)[0] for end in ends]
        assert len(whole) == 24
        assert whole in continued
    other.shutdown()


def test_what_was_trained_is_served_to_the_bit(tmp_path: Path):
    path = make_checkpoint(tmp_path / "model", "qwen3_tied")
    trained = load_for_training(str(path), dtype="bfloat16", num_threads=1, max_model_len=128)
    optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3)
    with opened(path, dtype="bfloat16") as llm:
        for _ in range(2):
            (output, *_) = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            sequence = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            (logprobs,) = trained.logprobs([sequence])
            entries = output.outputs[0].logprobs
            assert entries is not None
            served = [entry[token].logprob for entry, token in zip(entries, output.outputs[0].token_ids, strict=True)]
            assert logprobs[-len(served) :].tolist() == served
            optimizer.zero_grad()
            (-logprobs.mean()).backward()
            optimizer.step()
            trained.update()
            llm.update_weights(trained.state_dict())
