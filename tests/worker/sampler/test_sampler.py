"""The whole sampler over rows: seeds, parameters by row, processors, and where random numbers come from."""

import numpy as np
import pytest
from tests.support.worker_driver import WorkerDriver

from quire.sampling_params import SamplingParams
from quire.testing.fake_model import FakeModel
from quire.testing.model_harness import worker_config
from quire.worker.worker import Worker

LOGITS = [1.0, -0.5, 0.5, 2.0, 0.0, 1.5]
NUM_ROWS = 1500


def driver_of(model, num_rows=8):
    worker = Worker(worker_config("none", max_num_seqs=num_rows), model_loader=lambda config: model)
    worker.load()
    worker.initialize_cache([], 0)
    return WorkerDriver(worker)


def softmax(logits):
    weights = np.exp(np.asarray(logits, dtype=np.float64) - np.max(logits))
    return weights / weights.sum()


def chi_square_of(counts, probabilities):
    possible = probabilities > 0
    assert counts[~possible].sum() == 0, "an impossible token was drawn"
    expected = probabilities[possible] * counts.sum()
    return ((counts[possible] - expected) ** 2 / expected).sum()


def penalised(prompt, output, repetition=1.0, frequency=0.0, presence=0.0):
    logits = np.array(LOGITS)
    for token in range(len(logits)):
        times = output.count(token)
        if times or token in prompt:
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        logits[token] -= frequency * times + presence * (times > 0)
    return softmax(logits)


PROMPT = [3, 4]
OUTPUT = [5, 5, 0]
CASES = {
    "plain": ({}, softmax(LOGITS)),
    "temperature": ({"temperature": 0.5}, softmax(np.array(LOGITS) / 0.5)),
    "top_k": ({"top_k": 2}, softmax([-np.inf, -np.inf, -np.inf, 2.0, -np.inf, 1.5])),
    "top_p": ({"top_p": 0.7}, softmax([1.0, -np.inf, -np.inf, 2.0, -np.inf, 1.5])),
    "min_p": ({"min_p": 0.3}, softmax([1.0, -np.inf, -np.inf, 2.0, -np.inf, 1.5])),
    "repetition": ({"repetition_penalty": 1.8}, penalised(PROMPT, OUTPUT, repetition=1.8)),
    "frequency": ({"frequency_penalty": 0.7}, penalised(PROMPT, OUTPUT, frequency=0.7)),
    "presence": ({"presence_penalty": -0.9}, penalised(PROMPT, OUTPUT, presence=-0.9)),
    "bias": ({"logit_bias": {1: 2.5, 3: -2.0}}, softmax([1.0, 2.0, 0.5, 0.0, 0.0, 1.5])),
    "allowed": ({"allowed_token_ids": [2, 4]}, softmax([-np.inf, -np.inf, 0.5, -np.inf, 0.0, -np.inf])),
}


@pytest.mark.parametrize("case", CASES)
def test_distribution(case):
    """Each row has its own seed and draws twice from the same logits."""
    parameters, probabilities = CASES[case]
    driver = driver_of(FakeModel.constant(LOGITS), NUM_ROWS)
    sampling = SamplingParams(**parameters)
    for row in range(NUM_ROWS):
        driver.admit(row, PROMPT + OUTPUT, num_prompt_tokens=len(PROMPT), sampling=sampling, seed=1000 + row)
    counts = np.bincount(driver.step().token_ids, minlength=len(LOGITS))
    # 5 degrees of freedom or fewer: above 25.7 once in 10,000
    assert chi_square_of(counts, probabilities) < 25.7


def test_one_seed_draws_independently_along_the_output():
    driver = driver_of(FakeModel.constant(LOGITS))
    driver.admit(0, [1], sampling=SamplingParams(), seed=5)
    tokens = driver.generate(250)[0]

    assert chi_square_of(np.bincount(tokens, minlength=6), softmax(LOGITS)) < 25.7
    pairs = np.bincount(np.array(tokens[:-1]) * 6 + tokens[1:], minlength=36)
    both = np.outer(softmax(LOGITS), softmax(LOGITS)).reshape(-1)
    assert chi_square_of(pairs, both) < 75, "35 degrees of freedom: once in 10,000"


def mixed_sampling(random):
    """Any mix of everything, so that one test covers every processor."""

    def choice(values):
        return values[int(random.integers(len(values)))]

    return SamplingParams(
        temperature=choice([0.0, 0.7, 1.3]),
        top_k=choice([0, 0, 3, 10]),
        top_p=choice([1.0, 0.8]),
        min_p=choice([0.0, 0.05]),
        presence_penalty=choice([0.0, 0.5]),
        frequency_penalty=choice([0.0, 0.0, 1.0]),
        repetition_penalty=choice([1.0, 1.0, 1.4]),
        logit_bias=choice([None, {7: 3.0, 9: -1.0}]),
        allowed_token_ids=choice([None, None, list(range(0, 50, 2))]),
        stop_token_ids=[int(random.integers(50))],
        min_tokens=choice([0, 4]),
        logprobs=choice([None, 0, 3]),
    )


def fields_of(random, row):
    return {
        "sampling": mixed_sampling(random),
        "seed": row * 77,
        "eos_token_ids": [3],
        "bad_words_token_ids": [[[11], [5, 6]], []][int(random.integers(2))],
    }


def test_a_batch_of_one_equals_a_batch_of_64():
    model = FakeModel.random(vocab_size=50)
    random = np.random.default_rng(11)
    prompts = [random.integers(0, 50, 1 + int(random.integers(6))).tolist() for _ in range(64)]
    fields = [fields_of(random, row) for row in range(64)]

    together = driver_of(model, 64)
    for row in range(64):
        together.admit(row, prompts[row], **fields[row])
    steps = [together.step() for _ in range(8)]

    for row in range(64):
        alone = driver_of(model, 64)
        alone.admit(63 - row, prompts[row], **fields[row])
        own = [alone.step() for _ in range(8)]

        assert alone.tokens[63 - row] == together.tokens[row]
        for one, many in zip(own, steps, strict=True):
            assert one.logprobs.get(63 - row) == many.logprobs.get(row)


def test_a_preempted_or_forked_sequence_draws_the_same_numbers():
    model = FakeModel.random(vocab_size=50)
    sampling = SamplingParams(temperature=1.5, frequency_penalty=0.8, repetition_penalty=1.2)
    plain = driver_of(model)
    plain.admit(0, [1, 2, 3], sampling=sampling, seed=4)
    plain.generate(10)

    disturbed = driver_of(model)
    disturbed.admit(5, [1, 2, 3], sampling=sampling, seed=4)
    disturbed.generate(7)
    disturbed.preempt(5)
    disturbed.step({5: 4})
    # a shorter child with the parent's seed must take the same way again
    disturbed.fork(5, 2, num_total_tokens=5, seed=4)
    disturbed.fork(5, 3, num_total_tokens=5, seed=99)
    disturbed.generate(8)

    assert disturbed.tokens[5][:13] == plain.tokens[0]
    assert disturbed.tokens[2] == plain.tokens[0]
    assert disturbed.tokens[3][5:] != plain.tokens[0][5:]


def test_a_reused_row_keeps_nothing_of_its_last_sequence():
    model = FakeModel.random(vocab_size=50)
    random = np.random.default_rng(2)
    driver = driver_of(model)
    for row in range(8):
        driver.admit(row, [1, 2], **{**fields_of(random, row), "bad_words_token_ids": [[4]]})
    driver.generate(3)
    for row in range(8):
        driver.release(row)
        driver.admit(row, [1, 2, row])
    driver.generate(3)

    for row in range(8):
        assert driver.tokens[row][3:] == model.greedy([1, 2, row], 3)


def test_when_every_token_is_excluded_only_that_row_fails():
    model = FakeModel.random(vocab_size=50)
    driver = driver_of(model)
    sampling = SamplingParams(temperature=0.0, allowed_token_ids=[4, 5])
    driver.admit(0, [1, 2], sampling=sampling, bad_words_token_ids=[[4], [5]])
    driver.admit(1, [1, 2])
    output = driver.step()

    assert output.rows.tolist() == [1]
    assert "no token is left" in output.failures[0]
