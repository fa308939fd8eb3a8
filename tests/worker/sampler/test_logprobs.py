"""Log-probabilities of sampled and of prompt tokens, against a plain log-softmax."""

import pytest
import torch
from tests.support.worker_driver import WorkerDriver

from quire.sampling_params import SamplingParams
from quire.testing.fake_model import FakeModel
from quire.testing.model_harness import worker_config
from quire.worker.kernels.reference.order import ids_of, order_keys
from quire.worker.sampler import logprobs, prompt_logprobs
from quire.worker.worker import Worker

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def model():
    return FakeModel.random(vocab_size=50)


@pytest.fixture
def driver(model):
    worker = Worker(worker_config("none"), model_loader=lambda config: model)
    worker.load()
    worker.initialize_cache([], 0)
    return WorkerDriver(worker)


def expected_entry(model, tokens, chosen, count):
    """(ids, log-probabilities, ranks) after these tokens."""
    values = torch.log_softmax(model.logits_after(tokens), -1)
    best = torch.argsort(values, descending=True)[:count].tolist()
    rank = int((values > values[chosen]).sum()) + 1
    return [chosen, *best], values[[chosen, *best]].tolist(), [rank, *range(1, len(best) + 1)]


def assert_entry(entry, expected):
    ids, values, ranks = expected
    assert entry.token_ids == ids
    assert entry.ranks == ranks
    assert entry.logprobs == pytest.approx(values, abs=1e-6)


@pytest.mark.parametrize("count", [0, 1, 5, 50, 500])
def test_chosen_then_the_best(driver, model, count):
    driver.admit(0, PROMPT, sampling=SamplingParams(temperature=1.0, logprobs=count), seed=3)
    driver.admit(1, PROMPT)
    output = driver.step()

    assert list(output.logprobs) == [0]
    (entry,) = output.logprobs[0]
    assert_entry(entry, expected_entry(model, PROMPT, int(output.token_ids[0]), min(count, 50)))


def test_those_of_named_tokens(driver, model):
    named = SamplingParams(temperature=0.0, logprob_token_ids=[40, 2, 40 + 1])
    driver.admit(0, PROMPT[1:], sampling=SamplingParams(temperature=0.0, logprobs=2))
    driver.admit(1, PROMPT, sampling=named)
    driver.admit(2, PROMPT)
    driver.admit(3, PROMPT[2:], sampling=SamplingParams(temperature=0.0, logprob_token_ids=[7], logit_bias={7: 90.0}))
    output = driver.step()

    assert sorted(output.logprobs) == [0, 1, 3]
    (entry,) = output.logprobs[1]
    chosen = int(output.token_ids[1])
    values = torch.log_softmax(model.logits_after(PROMPT), -1)
    assert entry.token_ids == [chosen, 40, 2, 41]
    assert entry.logprobs == pytest.approx(values[entry.token_ids].tolist(), abs=1e-5)
    assert entry.ranks[1:] == [0, 0, 0]
    # the chosen one appears once
    (entry,) = output.logprobs[3]
    assert entry.token_ids == [7]
    assert_entry(output.logprobs[0][0], expected_entry(model, PROMPT[1:], int(output.token_ids[0]), 2))


def test_they_are_those_of_the_raw_logits(driver, model):
    sampling = SamplingParams(
        temperature=0.3, top_k=2, logit_bias={7: 50.0}, repetition_penalty=1.5, allowed_token_ids=[7, 8], logprobs=4
    )
    driver.admit(0, PROMPT, sampling=sampling)
    output = driver.step()

    assert output.token_ids.tolist() == [7]
    assert_entry(output.logprobs[0][0], expected_entry(model, PROMPT, 7, 4))


def test_rows_may_ask_for_different_numbers(driver, model):
    for row, count in enumerate([2, 0, None, 3, 2]):
        driver.admit(row, PROMPT[row:], sampling=SamplingParams(temperature=0.0, logprobs=count))
    output = driver.step()

    assert sorted(output.logprobs) == [0, 1, 3, 4]
    for row, count in ((0, 2), (1, 0), (3, 3), (4, 2)):
        chosen = int(output.token_ids[row])
        assert_entry(output.logprobs[row][0], expected_entry(model, PROMPT[row:], chosen, count))


@pytest.mark.parametrize("vocab_size", [64, 1000])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_equals_rank_by_token_id_as_greedy_chooses(vocab_size, count):
    table = torch.full((1, vocab_size), -3.0)
    table[0, [3, 5, 9]] = 2.5
    table[0, [0, 7]] = torch.tensor([-0.0, 0.0])
    worker = Worker(worker_config("none"), model_loader=lambda config: FakeModel(table))
    worker.load()
    worker.initialize_cache([], 0)
    driver = WorkerDriver(worker)
    driver.admit(0, PROMPT, sampling=SamplingParams(temperature=0.0, logprobs=count))
    driver.admit(1, PROMPT, sampling=SamplingParams(temperature=0.0, logprobs=count, allowed_token_ids=[9]))
    driver.admit(2, PROMPT, sampling=SamplingParams(temperature=0.0, logprobs=5))
    output = driver.step()

    best = [3, 5, 9, 0, 7]
    assert output.token_ids.tolist() == [3, 9, 3]
    for row, (chosen, rank) in enumerate([(3, 1), (9, 3)]):
        (entry,) = output.logprobs[row]
        assert entry.token_ids == [chosen, *best[:count]]
        assert entry.ranks == [rank, *range(1, count + 1)]


def test_the_order_of_keys_is_that_of_the_numbers():
    values = torch.tensor([[0.0, -0.0, 1e-45, -1e-45, 3.5, -torch.inf, torch.inf, -3.5, 3.5, -3.0]])
    keys = order_keys(values)
    wanted = torch.sort(values, descending=True, stable=True).indices

    assert torch.argsort(keys, descending=True).tolist() == wanted.tolist()
    assert ids_of(keys, 10).tolist() == [list(range(10))]


@pytest.mark.parametrize("num_rows", [1, 2, 100])
def test_slices_of_rows_change_nothing(driver, model, num_rows, monkeypatch):
    monkeypatch.setattr(logprobs, "rows_in_slice", lambda vocab_size, device: num_rows)
    for row, count in enumerate([2, 0, 7, 3, 2]):
        driver.admit(row, PROMPT[row:], sampling=SamplingParams(temperature=0.0, logprobs=count))
    output = driver.step()

    for row, count in enumerate([2, 0, 7, 3, 2]):
        chosen = int(output.token_ids[row])
        assert_entry(output.logprobs[row][0], expected_entry(model, PROMPT[row:], chosen, count))


@pytest.mark.parametrize("chunks", [[8], [3, 5], [1] * 8, [7, 1]])
@pytest.mark.parametrize("slice_size", [1 << 24, 100])
def test_prompt_chunk_by_chunk(driver, model, chunks, slice_size, monkeypatch):
    monkeypatch.setattr(prompt_logprobs, "_SLICE", slice_size)
    driver.admit(2, PROMPT, sampling=SamplingParams(temperature=0.0, prompt_logprobs=2))
    driver.admit(0, PROMPT)
    entries = []
    for chunk in chunks:
        entries += driver.step({0: 1, 2: chunk}).prompt_logprobs.get(2, [])

    assert len(entries) == len(PROMPT) - 1
    for position, entry in enumerate(entries):
        seen = PROMPT[: position + 1]
        assert_entry(entry, expected_entry(model, seen, PROMPT[position + 1], 2))


def test_prompt_and_sampled_together_for_several_rows(driver, model):
    for row, count in ((4, 3), (1, 0)):
        driver.admit(row, PROMPT[row:], sampling=SamplingParams(temperature=0.0, prompt_logprobs=count, logprobs=1))
    output = driver.step()

    for row, count in ((4, 3), (1, 0)):
        prompt = PROMPT[row:]
        assert len(output.prompt_logprobs[row]) == len(prompt) - 1
        for position, entry in enumerate(output.prompt_logprobs[row]):
            assert_entry(entry, expected_entry(model, prompt[: position + 1], prompt[position + 1], count))
        (entry,) = output.logprobs[row]
        assert_entry(entry, expected_entry(model, prompt, model.greedy(prompt, 1)[0], 1))


def test_nothing_is_reported_twice_nor_for_outputs_nor_for_children(driver):
    driver.admit(0, PROMPT, sampling=SamplingParams(temperature=0.0, prompt_logprobs=1))
    assert len(driver.step({0: 4}).prompt_logprobs[0]) == 4
    driver.preempt(0)
    assert len(driver.step().prompt_logprobs[0]) == 3
    assert not driver.step().prompt_logprobs
    driver.fork(0, 1, num_total_tokens=9)
    driver.preempt(1)
    assert not driver.step().prompt_logprobs


def test_a_streamed_prompt_cannot_have_them(driver):
    driver.admit(0, PROMPT, is_final=False, sampling=SamplingParams(prompt_logprobs=1))

    assert "arrives in pieces" in driver.step().failures[0]
