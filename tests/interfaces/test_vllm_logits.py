"""vLLM's classes for the logits of a batch, each sequence of ours being a batch of one."""

from __future__ import annotations

import logging
import re
import sys
import time
from typing import Any

import pytest
import torch

import quire.vllm as vllm
from quire.errors import OptionError
from quire.worker import worker
from quire.worker.sampler.processors import call_budget, own_processors

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "num_gpu_blocks_override": 64, "max_model_len": 128, "num_threads": 1, "seed": 1,
}  # fmt: skip
PROMPTS = ["Once upon", "The paper", "A quire of"]


def target_of(params: Any) -> int | None:
    return None if params.extra_args is None else params.extra_args.get("target")


class Only(vllm.LogitsProcessor):
    """One token for each sequence that names one."""

    @classmethod
    def validate_params(cls, sampling_params):
        if not isinstance(target_of(sampling_params), int | None):
            raise ValueError("target is no number")

    def __init__(self, vllm_config, device, is_pin_memory):
        self.vocab_size = vllm_config.model_config.get_vocab_size()
        self.device = device
        self.targets: dict[int, int] = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        vllm.process_dict_updates(self.targets, batch_update, lambda params, _prompt, _output: target_of(params))

    def apply(self, logits):
        assert logits.shape[1] == self.vocab_size
        for row, target in self.targets.items():
            kept = logits[row, target].clone()
            logits[row] = float("-inf")
            logits[row, target] = kept
        return logits


class NeverAgain(vllm.AdapterLogitsProcessor):
    """No token that the prompt or the output has; it counts its own calls."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        calls = []

        def never(prompt, output, logits):
            calls.append(len(output))
            assert calls == list(range(len(calls))), "one state for a sequence, told of each token"
            changed = logits.clone()
            changed[torch.tensor([*prompt, *output])] = float("-inf")
            return changed

        return never


def greedy(**parameters: Any) -> vllm.SamplingParams:
    return vllm.SamplingParams(**{"temperature": 0, "max_tokens": 6, "ignore_eos": True, **parameters})


def test_a_class_sees_each_sequence_and_its_arguments() -> None:
    with vllm.LLM("embedded", logits_processors=[Only], **OPTIONS) as llm:
        asked = [greedy(extra_args={"target": 77}), greedy(), greedy(extra_args={"target": 99})]
        tokens = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, asked)]
        assert (tokens[0], tokens[2]) == ([77] * 6, [99] * 6)
        with pytest.raises(vllm.VLLMValidationError, match="Only: target is no number"):
            llm.generate(PROMPTS[0], greedy(extra_args={"target": "x"}))
        engine = llm.llm_engine
        engine.add_request("0", PROMPTS[1], greedy(extra_args={"target": 55}))
        assert engine.step()[0].outputs[0].token_ids == [55] * 6
        with pytest.raises(vllm.VLLMValidationError, match="beam search"):
            llm.generate(PROMPTS[0], vllm.BeamSearchParams(beam_width=2, max_tokens=2))
    with vllm.LLM("embedded", **OPTIONS) as llm:
        assert llm.generate(PROMPTS[1], greedy())[0].outputs[0].token_ids == tokens[1]
        with pytest.raises(vllm.VLLMValidationError, match="extra_args: are for classes of"):
            llm.generate(PROMPTS[0], greedy(extra_args={"target": 77}))


class WithoutABatch(Only):
    """Answers with a row where a batch of rows is wanted."""

    def apply(self, logits):
        return logits[0].clone() if self.targets else logits


def test_a_class_that_answers_with_another_shape_fails_its_own_sequence() -> None:
    with vllm.LLM("embedded", logits_processors=[WithoutABatch], **OPTIONS) as llm:
        plain = llm.generate(PROMPTS[1], greedy())[0].outputs[0].token_ids
        failed, other = llm.generate(PROMPTS[:2], [greedy(extra_args={"target": 77}), greedy()])
    assert (failed.outputs[0].finish_reason, other.outputs[0].token_ids) == ("error", plain)
    assert "WithoutABatch" in str(failed.outputs[0].stop_reason)


class Wrong(Only):
    """Breaks where a sequence has a target, in the way that the target names."""

    def apply(self, logits):
        match next(iter(self.targets.values()), None):
            case 0:
                raise KeyError("nothing there")
            case 1:
                next(iter(()))
            case 2:
                sys.exit("enough")
            case 3:
                while True:
                    pass
            case 4:
                raise KeyboardInterrupt
            case 5:
                raise GeneratorExit
        return logits


@pytest.mark.parametrize(
    ("way", "says"),
    [
        (0, "Wrong: KeyError: 'nothing there'"),
        (1, "Wrong: StopIteration"),
        (2, "Wrong: SystemExit: enough"),
        (3, "Wrong: TooSlowError: it takes too long: 0.2 s at once"),
        (4, "Wrong: KeyboardInterrupt"),
        (5, "Wrong: GeneratorExit"),
    ],
)
def test_a_class_that_breaks_or_hangs_ends_what_uses_it(monkeypatch: pytest.MonkeyPatch, way: int, says: str) -> None:
    monkeypatch.setattr(call_budget, "SECONDS_OF_PROGRAM", 0.2)
    with vllm.LLM("embedded", logits_processors=[Wrong], **OPTIONS) as llm:
        failed, other = llm.generate(PROMPTS[:2], [greedy(extra_args={"target": way}), greedy()])
        again = llm.generate(PROMPTS[1], greedy())[0]
    assert failed.outputs[0].finish_reason == "error"
    assert says in str(failed.outputs[0].stop_reason)
    assert other.outputs[0].finish_reason == "length"
    assert other.outputs[0].token_ids == again.outputs[0].token_ids


class Unmade(Only):
    def __init__(self, vllm_config, device, is_pin_memory):
        raise FileNotFoundError("words.txt")


def test_a_class_that_cannot_be_made_ends_its_requests_and_not_the_engine() -> None:
    with vllm.LLM("embedded", logits_processors=[Unmade], **OPTIONS) as llm:
        for _ in range(2):
            [output] = llm.generate(PROMPTS[0], greedy())
            assert "Unmade: FileNotFoundError: words.txt" in str(output.outputs[0].stop_reason)


class Unchecked(Only):
    @classmethod
    def validate_params(cls, sampling_params):
        return sampling_params.extra_args["target"]


def test_a_class_that_breaks_over_parameters_is_named() -> None:
    with vllm.LLM("embedded", logits_processors=[Unchecked], **OPTIONS) as llm:
        with pytest.raises(vllm.VLLMValidationError, match=r"^Unchecked: .* raised KeyError: 'target'"):
            llm.generate(PROMPTS[0], greedy(extra_args={"other": 1}))
        assert llm.generate(PROMPTS[0], greedy(extra_args={"target": 3}))[0].outputs[0].token_ids == [3] * 6


class Slow(Only):
    def apply(self, logits):
        end = time.monotonic() + 1.2
        while time.monotonic() < end:
            pass
        return super().apply(logits)


def test_a_slow_class_is_told_of_and_takes_nothing_of_the_time_of_a_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The watch over steps looks twice a second."""
    monkeypatch.setattr(worker, "_PATIENCE_SECONDS", 0.1)
    with vllm.LLM("embedded", logits_processors=[Slow], **OPTIONS) as llm, caplog.at_level(logging.WARNING):
        [output] = llm.generate(PROMPTS[0], greedy(max_tokens=2, extra_args={"target": 9}))
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("length", [9, 9])
    lines = [record.getMessage() for record in caplog.records if record.name == own_processors.__name__]
    assert len(lines) == 1, "one line a minute"
    assert re.search(r"logits processor Slow took 1\.\d s of a step", lines[0])


@pytest.mark.parametrize("sampling", [greedy(), greedy(n=2, temperature=1.0, seed=3)], ids=["one", "two"])
def test_a_function_of_each_sequence_keeps_its_state(sampling: vllm.SamplingParams) -> None:
    with vllm.LLM("embedded", logits_processors=[f"{__name__}:NeverAgain"], **OPTIONS) as llm:
        for output in llm.generate(PROMPTS, sampling):
            for sample in output.outputs:
                assert sample.finish_reason == "length"
                whole = [*output.prompt_token_ids, *sample.token_ids]
                assert len(set(sample.token_ids)) == 6
                assert not set(sample.token_ids) & set(whole[: len(output.prompt_token_ids)])


def test_states_follow_what_a_batch_does() -> None:
    swap, one_way = vllm.MoveDirectionality.SWAP, vllm.MoveDirectionality.UNIDIRECTIONAL
    states = {0: "a", 1: "b", 2: "c"}

    def change(removed: Any = (), added: Any = (), moved: Any = ()) -> bool:
        update = vllm.BatchUpdate(3, removed, added, moved)
        return vllm.process_dict_updates(states, update, lambda params, _prompt, _output: params)

    assert not vllm.process_dict_updates(states, None, lambda *_: "never")
    assert change(removed=[1], added=[(1, "d", None, []), (2, None, None, [])])
    assert states == {0: "a", 1: "d"}
    assert change(moved=[(0, 1, swap), (0, 5, swap)])
    assert states == {1: "a", 5: "d"}
    assert change(moved=[(5, 1, one_way)])
    assert states == {1: "d"}
    assert not change(removed=[7])


def test_a_state_that_is_a_tensor_may_take_the_place_of_another() -> None:
    states = {0: torch.zeros(2)}
    update = vllm.BatchUpdate(1, (), [(0, None, None, [])], ())
    assert vllm.process_dict_updates(states, update, lambda *_: torch.zeros(2))
    assert not vllm.process_dict_updates(states, vllm.BatchUpdate(1, (), (), ()), lambda *_: None)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"logits_processors": [dict]}, "must be a class made of vllm's LogitsProcessor"),
        ({"logits_processors": ["nowhere:Class"]}, "must be module:Class"),
        ({"logits_processors": [Only], "speculative_config": {"method": "ngram"}}, "cannot judge drafts"),
    ],
)
def test_what_cannot_be_had_is_said(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        vllm.LLM("embedded", **options)
