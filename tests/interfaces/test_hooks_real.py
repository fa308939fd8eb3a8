"""Hooks over the embedded model: whoever is judged and let pass has the same tokens, whatever else is on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine_core.launch import make_executor
from quire.hooks import Hook, HookEngine, SequenceTokens, Verdict
from quire.interfaces.hooks.banned_text import BannedText
from quire.lora_request import LoRARequest
from quire.messages import PermitTokens
from quire.observability.run_log import RunLog
from quire.observability.run_records import Received
from quire.outputs import RequestOutput
from quire.simulation.replay import Replay, config_of
from quire.testing.tiny_adapters import make_adapter
from quire.testing.tiny_checkpoints import make_checkpoint

PROMPTS = ["Once upon a time", "What is a block?", "The dog", "Count from 3 to 9", "A scheduler"]
_NIGHTLY: list[dict[str, Any]] = [
    {"async_scheduling": True},
    {"max_num_seqs": 2},
    {"kv_cache_memory_bytes": "192KiB", "max_model_len": 96},
    {"enable_prefix_caching": False, "max_num_batched_tokens": 16},
    {"engine_process": True},
]
WAYS = [
    pytest.param({}, id="plain"),
    pytest.param({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, id="drafts"),
    *(pytest.param(way, id=next(iter(way)), marks=pytest.mark.nightly) for way in _NIGHTLY),
]


class Patient(Hook):
    """Waits with each token, and says nothing."""

    lockstep = True

    def on_tokens(self, tokens: SequenceTokens) -> Verdict | None:
        return Verdict(hold=5)


class Watching(Hook):
    stride = 3
    ahead = 7

    def on_tokens(self, tokens: SequenceTokens) -> Verdict | None:
        return Verdict(hold=2)


def generated(hooks: list[Hook], **options: Any) -> list[RequestOutput]:
    params = [
        SamplingParams(
            max_tokens=12 + number,
            temperature=number % 2,
            seed=number,
            logprobs=2 if number % 3 == 0 else None,
            n=1 + number % 2,
            stop=["the"] if number % 5 == 0 else [],
            frequency_penalty=0.5 * (number % 2),
        )
        for number in range(len(PROMPTS))
    ]
    with LLM(hooks=hooks, check_invariants=True, **options) as llm:
        return llm.generate(PROMPTS, params, use_tqdm=False)


def seen(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (one.text, one.token_ids, one.logprobs, one.cumulative_logprob, one.finish_reason, one.stop_reason)
        for output in outputs
        for one in output.outputs
    ]


@pytest.mark.parametrize("options", WAYS)
def test_who_is_let_pass_has_the_same_tokens(options: dict[str, Any]) -> None:
    plain = seen(generated([], **options))
    for hooks in ([Patient()], [Watching(), BannedText(["nowhere to be found"])]):
        assert seen(generated(hooks, **options)) == plain


class Masking(Hook):
    """Nothing of what was said may come again; the third token is given."""

    lockstep = True

    def on_tokens(self, tokens: SequenceTokens) -> Verdict | None:
        if len(tokens.token_ids) == 2:
            return Verdict(force=[300, 301], ban=tokens.token_ids)
        if len(tokens.token_ids) == 8:
            return Verdict(allow=[310])
        return Verdict(ban=tokens.token_ids)


@pytest.mark.parametrize("options", WAYS)
def test_masks_and_forced_tokens_hold_for_what_comes_next(options: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True, n=2)
    with LLM(hooks=[Masking()], check_invariants=True, **options) as llm:
        for output in llm.generate(PROMPTS[:5], params, use_tqdm=False):
            for one in output.outputs:
                assert one.token_ids[2:4] == [300, 301]
                assert one.token_ids[8] == 310
                others = [token for place, token in enumerate(one.token_ids) if place not in (2, 3, 8)]
                assert len(set(others)) == len(others) == 11


@pytest.mark.parametrize("with_model", [False, True])
def test_a_run_with_verdicts_is_replayed(with_model: bool, tmp_path: Path) -> None:
    log = tmp_path / "run.qlog"
    params = SamplingParams(max_tokens=14, temperature=1.0, seed=3, ignore_eos=True, n=2)
    with LLM(hooks=[Masking()], record=str(log)) as llm:
        llm.generate(PROMPTS[:5], params, use_tqdm=False)
    messages = [record.message for record in RunLog(log) if isinstance(record, Received)]
    assert sum(isinstance(message, PermitTokens) for message in messages) > 20
    opened = RunLog(log)
    outcome = Replay(opened, make_executor(config_of(opened.header).worker) if with_model else None).run()
    assert outcome.difference is None
    assert outcome.num_steps > 10


def test_a_mask_that_leaves_nothing_fails_its_own_sequence() -> None:
    class Forbidding(Hook):
        lockstep = True

        def on_tokens(self, tokens: SequenceTokens) -> Verdict | None:
            is_first = tokens.request.prompt_token_ids[0] == first
            return Verdict(allow=[]) if is_first else None

    with LLM(hooks=[Forbidding()]) as llm:
        first = llm.renderer.encode("Once upon")[0]
        params = SamplingParams(max_tokens=6, temperature=0)
        one, other = llm.generate(["Once upon a time", "The dog"], params, use_tqdm=False)
        assert one.outputs[0].finish_reason == "error"
        assert "no token is left" in str(one.outputs[0].stop_reason)
        assert other.outputs[0].finish_reason == "length"


def test_a_session_goes_on_from_what_was_shown() -> None:
    """The core has kept more than the client saw: the next turn must not begin behind it."""

    class Third(Hook):
        ahead = 1

        def on_tokens(self, tokens: SequenceTokens) -> Verdict | None:
            return Verdict(stop="enough", keep=3) if len(tokens.token_ids) >= 6 else Verdict(hold=6)

    params = SamplingParams(max_tokens=20, temperature=0)
    with LLM(hooks=[Third()]) as llm:
        with llm.open_session() as session:
            first = session.generate("Once upon a time", params).outputs[0]
            assert (first.finish_reason, len(first.token_ids)) == ("content_filter", 3)
            kept = session.token_ids
            assert kept[-3:] == first.token_ids
            second = session.generate(" and", params).outputs[0]
        added = llm.renderer.render_continuation(" and", max_tokens=9)
        [plain] = llm.generate({"prompt_token_ids": [*kept, *added]}, params, use_tqdm=False)
        assert plain.outputs[0].token_ids == second.token_ids
        assert llm.statistics()["num_blocks_held"] == 0


def test_another_model_judges_in_the_same_steps(tmp_path: Path) -> None:
    """An adapter makes one of the model: its requests share rows and budget with those that wait for them."""
    model = make_checkpoint(tmp_path / "model", "llama")
    adapter = make_adapter(tmp_path / "judge", model, rank=4, seed=1)
    short = SamplingParams(max_tokens=4, temperature=0)

    class Judging(Hook):
        stride = ahead = 4

        def open(self, engine: HookEngine) -> None:
            self.engine = engine
            self.said: list[str] = []
            self.vectors: list[list[float]] = []

        def on_tokens(self, tokens: SequenceTokens) -> Verdict | None:
            self.said.append(self.engine.generate(tokens.token_ids, short, adapter="judge"))
            self.vectors += self.engine.embed([tokens.token_ids], pooling="mean", adapter="judge")
            return None

    judge = Judging()
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 4, "lora_modules": (f"judge={adapter}",)}
    with LLM(str(model), hooks=[judge], max_num_seqs=1, hook_timeout=60.0, **options) as llm:
        [output] = llm.generate(
            {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=8, temperature=0), use_tqdm=False
        )
        assert llm.statistics()["num_hook_failures_total"] == 0
    seen = output.outputs[0].token_ids
    lora = LoRARequest("judge", 1, str(adapter))
    with LLM(str(model), **options) as llm:
        for place, said in zip((4, 8), judge.said, strict=True):
            [other] = llm.generate({"prompt_token_ids": seen[:place]}, short, lora_request=lora, use_tqdm=False)
            assert other.outputs[0].text == said
