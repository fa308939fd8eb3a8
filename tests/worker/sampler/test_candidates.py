"""Candidates of rows whose next token the core chooses, against a plain float32 log-softmax and a plain sort."""

import math

import numpy as np
import pytest
import torch
from tests.support.worker_driver import WorkerDriver

from quire.messages import Candidates
from quire.sampling_params import SamplingParams
from quire.testing.fake_model import FakeModel
from quire.testing.model_harness import worker_config
from quire.worker.kernels.reference.order import ids_of, order_keys
from quire.worker.sampler import candidates
from quire.worker.sampler.candidates import read_candidates
from quire.worker.sampler.reading import Sampled
from quire.worker.worker import Worker

PROMPT = [3, 1, 4, 1, 5]
BEAMS = {"sampling": SamplingParams(temperature=0.0)}


def driver_of(model, num_rows=8):
    worker = Worker(worker_config("none", max_num_seqs=num_rows), model_loader=lambda config: model)
    worker.load()
    worker.initialize_cache([], 0)
    return WorkerDriver(worker)


def expected(logits, count, temperature=0.0):
    """The definition."""
    values = (logits / temperature if temperature else logits).log_softmax(-1).tolist()
    best = sorted(range(len(values)), key=lambda token: (-values[token], token))[:count]
    return Candidates(best, [values[token] for token in best])


def read(logits, counts, temperatures=None):
    """Candidates by position; a row that fails has none."""
    temperature = np.array(temperatures or [0.0] * len(counts), dtype=np.float32)
    reading = read_candidates(logits, np.arange(len(counts)), np.array(counts), temperature)
    sampled = Sampled()
    reading.settle([tensor.numpy() for tensor in reading.tensors], sampled)
    found = sampled.output.candidates
    assert sorted([*found, *sampled.output.failures]) == list(range(len(counts)))
    return found


def coarse(*shape, seed=0):
    """Logits as bfloat16 weights make them: many are equal."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).bfloat16().float()


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 50, 511, 512, 513, 1025, 4999, 32_003, 151_936])
@pytest.mark.parametrize("count", [1, 2, 8, 33, 200])
def test_the_best_in_order(vocab_size, count):
    logits = coarse(3, vocab_size)
    found = read(logits, [count] * 3)

    assert found == {row: expected(logits[row], count) for row in range(3)}


@pytest.mark.parametrize("temperature", [1.0, 0.37, 2.5, 1e-3])
def test_temperature_divides_the_logits(temperature):
    logits = coarse(2, 3001)
    found = read(logits, [12, 12], [temperature, 0.0])

    assert found[0] == expected(logits[0], 12, temperature)
    assert found[1] == expected(logits[1], 12)


@pytest.mark.parametrize("vocab_size", [40, 5000])
def test_equals_come_by_token_id(vocab_size):
    flat = torch.zeros(vocab_size)
    steps = torch.arange(vocab_size) // 7 % 5 * 1.0
    late = torch.where(torch.arange(vocab_size) >= vocab_size - 3, 1.0, 0.0)
    found = read(torch.stack([flat, steps, late]), [6, 9, 6])

    assert found[0].token_ids == [0, 1, 2, 3, 4, 5]
    assert found[1].token_ids == [28, 29, 30, 31, 32, 33, 34, *([63, 64] if vocab_size > 40 else [21, 22])]
    assert found[2].token_ids == [vocab_size - 3, vocab_size - 2, vocab_size - 1, 0, 1, 2]


def test_logits_that_differ_but_have_equal_log_probabilities_come_by_token_id():
    logits = torch.full((1, 600), 0.1)
    logits[0, 300] = 10.0
    # a little more than the others; float32 cannot tell any more once 10 is subtracted
    logits[0, 599] = torch.nextafter(torch.tensor(0.1), torch.tensor(1.0))
    found = read(logits, [3])

    assert found[0].token_ids == [300, 0, 1]
    assert found[0] == expected(logits[0], 3)


def test_a_row_is_the_same_alone_and_among_others():
    logits = torch.randn(40, 40_001, generator=torch.Generator().manual_seed(2)) * 4
    counts, temperatures = [1 + row % 9 for row in range(40)], [(0.0, 0.6, 1.7)[row % 3] for row in range(40)]
    together = read(logits, counts, temperatures)
    for num_threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            for row in range(40):
                alone = read(logits[row : row + 1], counts[row : row + 1], temperatures[row : row + 1])
                assert alone[0] == together[row]
        finally:
            torch.set_num_threads(before)


def test_slices_of_rows_change_nothing(monkeypatch):
    logits = coarse(5, 700)
    whole = read(logits, [3, 1, 4, 1, 5])
    monkeypatch.setattr(candidates, "rows_in_slice", lambda vocab_size, device: 2)

    assert read(logits, [3, 1, 4, 1, 5]) == whole


def test_the_way_of_a_gpu_names_the_same():
    """There, whole numbers with the order of the values are compared: see order.py."""
    logprobs = coarse(4, 3001).log_softmax(-1)
    ids = ids_of(order_keys(logprobs).topk(20, dim=-1).values, 3001)

    for row in range(4):
        assert ids[row].tolist() == candidates._first_in_order(logprobs[row].numpy(), 20).tolist()


def test_excluded_tokens_are_left_out_and_unusable_rows_fail():
    logits = coarse(5, 900)
    logits[0, 5:] = -torch.inf
    logits[1, 7] = torch.nan
    logits[2, 7] = torch.inf
    logits[3] = -torch.inf
    found = read(logits, [8] * 5)

    assert sorted(found) == [0, 4]
    assert found[0] == expected(logits[0], 5)


# ---------------------------------------------------------------------------------------------- in steps of a worker


def test_rows_with_candidates_get_no_token():
    model = FakeModel.random(vocab_size=50)
    driver = driver_of(model)
    driver.admit(2, PROMPT, num_candidates=6, **BEAMS)
    output = driver.step()

    assert (output.rows.tolist(), output.token_ids.tolist()) == ([], [])
    assert output.candidates == {2: expected(model.logits_after(PROMPT), 6)}
    # Nothing is granted until the core has answered.
    driver.append(2, [output.candidates[2].token_ids[1]])
    again = driver.step()
    assert again.candidates == {2: expected(model.logits_after(driver.tokens[2]), 6)}
    assert len(driver.tokens[2]) == len(PROMPT) + 1


def test_they_mix_with_greedy_and_sampled_rows():
    model = FakeModel.random(vocab_size=50)
    driver = driver_of(model)
    sampled = SamplingParams(temperature=1.3, top_k=10, repetition_penalty=1.2, logprobs=2)
    others = {0: {}, 3: {"sampling": sampled, "seed": 7}, 6: {"sampling": SamplingParams(temperature=0.0, logprobs=1)}}
    for row, fields in others.items():
        driver.admit(row, PROMPT[row % 4 :], **fields)
    driver.admit(1, PROMPT[1:], num_candidates=4, **BEAMS)
    # what a processor would do is not done
    odd = SamplingParams(temperature=0.5, logit_bias={7: 50.0}, allowed_token_ids=[7])
    driver.admit(5, PROMPT[2:], num_candidates=2, sampling=odd)
    output = driver.step()

    assert output.rows.tolist() == [0, 3, 6]
    assert sorted(output.logprobs) == [3, 6]
    assert output.candidates == {
        1: expected(model.logits_after(PROMPT[1:]), 4),
        5: expected(model.logits_after(PROMPT[2:]), 2, 0.5),
    }
    for row, fields in others.items():
        alone = driver_of(model)
        alone.admit(row, PROMPT[row % 4 :], **fields)
        own = alone.step()
        assert own.token_ids.tolist() == driver.tokens[row][-1:]
        assert own.logprobs.get(row) == output.logprobs.get(row)


def test_penalties_move_log_probabilities_and_rows_without_them_stay():
    model = FakeModel.random(vocab_size=50)
    driver = driver_of(model)
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.25)
    driver.admit(0, PROMPT, num_candidates=50, sampling=sampling)
    driver.admit(3, PROMPT, num_candidates=50, **BEAMS)
    found = driver.step().candidates
    plain, penalised = (dict(zip(one.token_ids, one.logprobs, strict=True)) for one in (found[3], found[0]))
    said = set(PROMPT)
    assert found[0].logprobs == sorted(found[0].logprobs, reverse=True)
    for token, logprob in plain.items():
        # the frequency is that of the output, of which there is none yet
        assert penalised[token] == pytest.approx(logprob * 1.5 if token in said else logprob)
    assert found[0].log_total == pytest.approx(math.log(sum(map(math.exp, penalised.values()))), abs=1e-5)
    assert found[3] == expected(model.logits_after(PROMPT), 50)


def test_a_prompt_in_chunks_has_candidates_at_its_end():
    model = FakeModel.random(vocab_size=50)
    driver = driver_of(model)
    driver.admit(0, PROMPT, num_candidates=3, is_final=False, **BEAMS)
    assert driver.step({0: 2}).candidates == {}
    assert driver.step({0: 3}).candidates == {}
    driver.append(0, [9], is_final=True)

    assert driver.step().candidates == {0: expected(model.logits_after([*PROMPT, 9]), 3)}


def test_prompt_logprobs_travel_along():
    model = FakeModel.random(vocab_size=50)
    driver = driver_of(model)
    driver.admit(0, PROMPT, num_candidates=3, **BEAMS)
    driver.admit(1, PROMPT, sampling=SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=1))
    output = driver.step()

    assert output.candidates == {0: expected(model.logits_after(PROMPT), 3)}
    assert len(output.prompt_logprobs[1]) == len(PROMPT) - 1
    assert output.token_ids.tolist() == [output.logprobs[1][0].token_ids[0]] == model.greedy(PROMPT, 1)


def test_a_row_that_is_not_finite_fails_alone():
    table = FakeModel.random(vocab_size=50).table_PV
    table[(20 + 1) % len(table), 7] = float("nan")
    model = FakeModel(table)
    driver = driver_of(model)
    driver.admit(0, [1, 20], num_candidates=3, **BEAMS)
    driver.admit(1, [1, 2], num_candidates=3, **BEAMS)
    driver.admit(2, [1, 20])
    output = driver.step()

    assert output.candidates == {1: expected(model.logits_after([1, 2]), 3)}
    assert sorted(output.failures) == [0, 2]
    assert "not finite" in output.failures[0]


def test_children_inherit_and_start_where_everything_is_computed():
    """A step of beam search: every beam forks, the child has all tokens computed and gets its own next token."""
    model = FakeModel.random(vocab_size=50)
    driver = driver_of(model)
    driver.admit(0, PROMPT, num_candidates=4, sampling=SamplingParams(temperature=0.7))
    first, second = driver.step().candidates[0].token_ids[:2]
    driver.fork(0, 1, len(PROMPT), num_computed_tokens=len(PROMPT))
    driver.append(0, [first])
    driver.append(1, [second])
    output = driver.step()

    assert output.candidates == {
        0: expected(model.logits_after([*PROMPT, first]), 4, 0.7),
        1: expected(model.logits_after([*PROMPT, second]), 4, 0.7),
    }


def test_a_beam_forks_into_a_row_that_nobody_released():
    """Greedy, sampled and penalised sequences held the rows; nothing of them is left."""
    model = FakeModel.random(vocab_size=50)
    driver = driver_of(model)
    driver.admit(0, PROMPT, num_candidates=3, **BEAMS)
    old = SamplingParams(
        temperature=2.0, logit_bias={7: 50.0}, repetition_penalty=2.0, min_tokens=9, stop_token_ids=[1], logprobs=3,
        prompt_logprobs=1, allowed_token_ids=list(range(9)),
    )  # fmt: skip
    driver.admit(1, list(range(1, 30)), sampling=old, bad_words_token_ids=[[4]])
    driver.step()
    driver.fork(0, 1, len(PROMPT), num_computed_tokens=len(PROMPT))
    driver.append(0, [8])
    driver.append(1, [9])
    output = driver.step()

    assert output.candidates == {row: expected(model.logits_after([*PROMPT, 8 + row]), 3) for row in (0, 1)}
    assert (output.logprobs, output.prompt_logprobs) == ({}, {})

    # And the other way round: a greedy child where a beam was.
    driver.admit(4, PROMPT)
    driver.step({4: len(PROMPT)})
    driver.fork(4, 1, len(PROMPT))
    output = driver.step({1: 1})
    assert (output.candidates, output.token_ids.tolist()) == ({}, model.greedy(PROMPT, 1))
