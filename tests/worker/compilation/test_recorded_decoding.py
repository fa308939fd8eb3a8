"""Steps that are one call of the library say what they would have said operator by operator."""

import os
import sys

import pytest

from quire import LLM, SamplingParams
from quire.config import BurstTimes
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


def answers(path, parameters, prompts=PROMPTS, *, burst_time=0):
    options = {"max_model_len": 128, "block_size": 16, "burst_time": burst_time, "engine_process": False}
    with LLM(str(path), **options) as llm:
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture
def calls(monkeypatch):
    """How many tokens of each row each call has brought that computes a step."""
    said = []
    run = DecodeCall.run

    def noted(self, most, nanoseconds):
        said.append(run(self, most, nanoseconds))
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
    assert set(calls) == {1}
    calls.clear()
    monkeypatch.setattr(sys.modules["quire.config.resolve"], "_WHOLE_BURST", 3600.0)
    assert answers(path, parameters, burst_time=1e-9) == found
    assert len(calls) < 20
    assert max(calls) > 4
    monkeypatch.setattr(RecordedDecoding, "of", lambda *arguments: None)
    calls.clear()
    assert answers(path, parameters) == found
    assert not calls


def test_what_one_call_does_not_compute_comes_as_before(tmp_path, calls, monkeypatch):
    path = make_checkpoint(tmp_path, "llama")
    found = answers(path, greedy(40))
    run, number = DecodeCall.run, iter(range(1000))
    monkeypatch.setattr(DecodeCall, "run", lambda self, *arguments: run(self, *arguments) * (next(number) % 3 > 0))
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


class Book:
    """A model that is recorded, and the table of rows of which each has one token to compute."""

    def __init__(self, path, num_rows, num_computed=1):
        model = load_model(worker_config(path, attention_backend="cpu"))
        self.harness = ModelHarness(model, block_size=16)
        assert record_model(model, 32, 4, 16, 4)
        tokens = [5] * num_computed
        self.harness.step(dict.fromkeys(range(num_rows), tokens))
        self.table = RowTable(4, 64, 256)
        self.table.open_groups(1, 16, 64)
        self.decoding = RecordedDecoding.of(model, self.table, self.harness.block_size, BurstTimes(1e-9, 3600.0))
        for row in range(num_rows):
            self.admit(row, [*tokens, 6], self.harness.tables[row][0])

    def admit(self, row, tokens, blocks, **sampling):
        admitted = AdmittedSequence(
            row=row,
            sequence_id=row,
            token_ids=int_array(tokens),
            num_prompt_tokens=len(tokens),
            num_computed_tokens=len(tokens) - 1,
            sampling=SamplingParams(max_tokens=40, **sampling),
            seed=0,
            in_bursts=True,
        )
        self.table.admit(admitted)
        self.table.block_tables[0, row, : len(blocks)] = blocks

    def next_tokens(self, *rows, most=32):
        return self.decoding.next_tokens(int_array(rows), None, most)


def test_rows_of_which_one_is_not_finite_or_has_more_to_compute(tmp_path):
    book = Book(make_checkpoint(tmp_path, "llama"), 2)
    # what nobody has written is NaN
    book.admit(2, [5, 6], [200])
    [tokens] = book.next_tokens(1, 0, most=1)
    assert tokens[0] == tokens[1]
    assert book.next_tokens(0, 2) is None
    book.table.num_computed[1] = 0
    assert book.next_tokens(0, 1) is None
    # one behind the blocks that a table has room for
    book.table.num_computed[0] = 64
    book.table.num_total[0] = 65
    assert book.next_tokens(0) is None
    book.table.num_computed[0] = 1
    book.table.num_total[0] = 2
    assert book.next_tokens(0) is not None


def test_a_row_gets_as_many_tokens_as_its_block_has_places_for(tmp_path):
    book = Book(make_checkpoint(tmp_path, "llama"), 2)
    size = book.harness.block_size
    assert len(book.next_tokens(0, 1, most=1)) == 1
    assert len(book.next_tokens(0, 1, most=4)) == 4
    tokens = book.next_tokens(0, 1)
    # position 1 is computed first, and the last place of the block is left
    assert len(tokens) == size - 2
    assert (tokens[:, 0] == tokens[:, 1]).all()
    book.table.in_bursts[1] = False
    assert len(book.next_tokens(0, 1)) == 1, "somebody reads each token"


def test_at_the_end_of_a_block_a_row_gets_one_token(tmp_path):
    path = make_checkpoint(tmp_path, "llama")
    size = Book(path, 1).harness.block_size
    for place in (size - 2, size - 1):
        book = Book(path, 1, place)
        assert len(book.next_tokens(0)) == 1
        assert len(book.next_tokens(0)) == 1


def test_rows_do_not_go_on_behind_their_ends(tmp_path):
    book = Book(make_checkpoint(tmp_path, "llama"), 2)
    book.next_tokens(0, 1)
    tokens = book.next_tokens(0, 1)[:, 0].tolist()
    third = tokens[2]
    [blocks] = book.harness.tables[1]
    # both stop where one does
    book.admit(1, [5, 6], blocks, stop_token_ids=[255, third])
    assert book.next_tokens(0, 1)[:, 0].tolist() == tokens[: tokens.index(third) + 1]
    book.table.most_total[0] = 4
    assert len(book.next_tokens(0, 1)) == min(2, tokens.index(third) + 1)
    # it has ended, and the core does not know
    book.table.most_total[0] = 2
    assert len(book.next_tokens(0, 1)) == 1
    book.table.most_total[0] = 64
    book.table.token_ids[1, 1] = third
    assert len(book.next_tokens(0, 1)) == 1


def test_who_arrives_ends_a_step_of_several_tokens(tmp_path):
    book = Book(make_checkpoint(tmp_path, "llama"), 1)
    arrivals, bell = os.pipe()
    book.decoding.watch_arrivals(arrivals)
    book.next_tokens(0)
    assert len(book.next_tokens(0)) > 1
    os.write(bell, b"!")
    assert len(book.next_tokens(0)) == 1
    os.read(arrivals, 1)
    assert len(book.next_tokens(0)) > 1
    os.close(arrivals)
    os.close(bell)


def test_one_with_more_stop_tokens_than_there_is_room_for_gets_a_token_a_step(tmp_path):
    book = Book(make_checkpoint(tmp_path, "llama"), 1)
    book.next_tokens(0)
    [blocks] = book.harness.tables[0]
    book.admit(0, [5, 6], blocks, stop_token_ids=list(range(100, 109)))
    assert len(book.next_tokens(0)) == 1
