"""Steps that are one call of the library say what they would have said operator by operator."""

import pytest

from quire import LLM, SamplingParams
from quire.messages import AdmittedSequence, int_array
from quire.testing.model_harness import ModelHarness, worker_config
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker.compilation import RecordedDecoding, record_model
from quire.worker.kernels import cpu
from quire.worker.kernels.cpu.decode import DecodeCall
from quire.worker.model_loader import load_model
from quire.worker.row_table import RowTable

pytestmark = pytest.mark.skipif(not cpu.load(), reason="programs are made of C++ kernels")
PROMPTS = ["a prompt", "another one, which is longer", "x"]


def greedy(max_tokens, **options):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def drawn(max_tokens, **options):
    return SamplingParams(temperature=0.9, max_tokens=max_tokens, ignore_eos=True, **options)


def answers(path, parameters, prompts=PROMPTS):
    with LLM(str(path), max_model_len=128, block_size=16, engine_process=False) as llm:
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture
def calls(monkeypatch):
    """What each call that computes a step has said."""
    said = []
    run = DecodeCall.run

    def noted(self):
        said.append(run(self))
        return said[-1]

    monkeypatch.setattr(DecodeCall, "run", noted)
    return said


@pytest.mark.parametrize("name", ["llama", "gemma4", "qwen3_moe", "gpt2"])
@pytest.mark.parametrize("is_drawn", [False, True])
def test_the_same_tokens_by_one_call(name, is_drawn, tmp_path, calls, monkeypatch):
    path = make_checkpoint(tmp_path, name)
    # they end one after the other
    parameters = [greedy(40), greedy(17), greedy(30)]
    if is_drawn:
        parameters[0] = drawn(40, seed=1)
        parameters[1] = drawn(17, seed=2, top_k=20, top_p=0.9, min_p=0.01)
    found = answers(path, parameters)
    assert len(calls) > 30
    assert all(calls)
    monkeypatch.setattr(RecordedDecoding, "of", lambda *arguments: None)
    calls.clear()
    assert answers(path, parameters) == found
    assert not calls


def test_what_one_call_does_not_compute_comes_as_before(tmp_path, calls, monkeypatch):
    path = make_checkpoint(tmp_path, "llama")
    found = answers(path, greedy(40))
    run, number = DecodeCall.run, iter(range(1000))
    monkeypatch.setattr(DecodeCall, "run", lambda self: run(self) and next(number) % 3 > 0)
    assert answers(path, greedy(40)) == found


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 1},
        {"presence_penalty": 1.0},
        {"prompt_logprobs": 1},
        {"ignore_eos": False, "min_tokens": 8},
    ],
)
def test_whoever_asks_for_more_gets_it(options, tmp_path, calls):
    parameters = SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True, **options})
    answers(make_checkpoint(tmp_path, "llama"), parameters, ["a prompt"])
    assert not calls


def test_rows_of_which_one_is_not_finite_or_has_more_to_compute(tmp_path):
    model = load_model(worker_config(make_checkpoint(tmp_path, "llama"), attention_backend="cpu"))
    harness = ModelHarness(model)
    assert record_model(model, 32, 4, 16, 4)
    harness.step({0: [5], 1: [5]})
    table = RowTable(4, 64, 256)
    table.open_groups(1, 16, 64)
    for row in range(3):
        table.admit(
            AdmittedSequence(
                row=row,
                sequence_id=row,
                token_ids=int_array([5, 6]),
                num_prompt_tokens=2,
                num_computed_tokens=1,
                sampling=SamplingParams(),
                seed=0,
            )
        )
        # what nobody has written is NaN
        [blocks] = harness.tables[row] if row < 2 else [[200]]
        table.block_tables[0, row, : len(blocks)] = blocks
    decoding = RecordedDecoding.of(model, table, harness.block_size)
    tokens = decoding.next_tokens(int_array([1, 0]), None)
    assert tokens[0] == tokens[1]
    assert decoding.next_tokens(int_array([0, 2]), None) is None
    table.num_computed[1] = 0
    assert decoding.next_tokens(int_array([0, 1]), None) is None
    # one behind the blocks that a table has room for
    table.num_computed[0] = 64
    table.num_total[0] = 65
    assert decoding.next_tokens(int_array([0]), None) is None
    table.num_computed[0] = 1
    table.num_total[0] = 2
    assert (decoding.next_tokens(int_array([0]), None) == tokens[:1]).all()
