"""thinking_token_budget from the prompt to the text: the embedded model, with two tokens of its vocabulary as marks."""

import shutil

import pytest

from quire import LLM, RequestError, SamplingParams
from quire.config.model_source import embedded_path
from quire.engine_core import launch
from quire.engine_core.scheduler.speculation import SpeculationCosts

BUDGET = 6
PROMPTS = ["Once upon a time<think>", "The sea is<think>", "The sea is", "Hello<think> a</think> b"]
SMALL = {"max_num_seqs": 16, "check_invariants": True, "num_threads": 1, "dtype": "float32"}
SMALL["reasoning_parser"] = "think"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Its own weights; two marks that it never writes are called otherwise."""
    folder = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(embedded_path(), folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        path = folder / file
        text = path.read_text(encoding="utf-8").replace("<|system|>", "<think>").replace("<|tool|>", "</think>")
        path.write_text(text, encoding="utf-8")
    return folder


def params(budget=BUDGET, **values):
    values = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, "skip_special_tokens": False, **values}
    return SamplingParams(thinking_token_budget=budget, **values)


def tokens_of(llm, asked, prompts=PROMPTS):
    return [[one.token_ids for one in output.outputs] for output in llm.generate(prompts, asked, use_tqdm=False)]


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **SMALL) as llm:
        yield llm


def test_a_thought_ends_after_its_budget_and_not_before(llm):
    marks = llm.renderer.thought_marks
    free, bounded = tokens_of(llm, params(None)), tokens_of(llm, params())

    for [unbounded], [answer] in zip(free[:2], bounded[:2], strict=True):
        assert marks.closing not in unbounded[: BUDGET + 1], "the model must not have ended its thought by itself"
        assert list(answer[:BUDGET]) == list(unbounded[:BUDGET])
        assert answer[BUDGET] == marks.closing
        assert marks.opening not in answer, "it thinks again: no case of this test"
        assert marks.closing not in answer[BUDGET + 1 :]
    # where no thought is open nothing changes
    assert bounded[2:] == free[2:]


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
        {"block_size": 4, "num_gpu_blocks_override": 40},
        {"max_num_batched_tokens": 16},
    ],
    ids=["drafts", "preempted", "chunks"],
)
def test_the_budget_is_the_same_on_every_way(folder, llm, options, monkeypatch):
    # on a machine that is busy while it measures, drafts may not pay
    monkeypatch.setattr(launch, "SpeculationCosts", lambda **measured: SpeculationCosts())
    asked = params(n=3, temperature=1.0, seed=1)
    with LLM(folder, **{**SMALL, **options}) as other:
        assert tokens_of(other, asked) == tokens_of(llm, asked)
        assert tokens_of(other, params()) == tokens_of(llm, params())
        statistics = other.statistics()
        if "num_gpu_blocks_override" in options:
            assert statistics["num_preemptions_total"] > 0
        if "speculative_config" in options:
            assert statistics["num_draft_tokens_total"] > 0


def test_a_model_that_does_not_think_says_so(folder):
    text = r"thinking_token_budget: no way .*\(reasoning_parser\)"
    with LLM(folder, **{**SMALL, "reasoning_parser": "none"}) as llm, pytest.raises(RequestError, match=text):
        llm.generate("a", params())


def test_marks_of_several_tokens_cannot_be_counted():
    text = "<think> and </think> are not one token each"
    with LLM(**SMALL) as llm, pytest.raises(RequestError, match=text):
        llm.generate("a", params())
