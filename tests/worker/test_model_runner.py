"""Steps of a worker with a model that can be computed by hand."""

import pytest
import torch
from tests.support.worker_driver import WorkerDriver

from quire.errors import EngineError
from quire.messages import SchedulerOutput, int_array
from quire.sampling_params import SamplingParams
from quire.testing.fake_model import FakeModel
from quire.testing.model_harness import worker_config
from quire.worker.worker import Worker

PROMPT = [3, 1, 4, 1, 5]


def started_worker(model, **options):
    worker = Worker(worker_config("none", **options), model_loader=lambda config: model)
    worker.load()
    worker.initialize_cache([], 0)
    return worker


@pytest.fixture
def model():
    return FakeModel.random(vocab_size=50)


@pytest.fixture
def driver(model):
    return WorkerDriver(started_worker(model))


def test_prefill_and_decode(driver, model):
    driver.admit(2, PROMPT)

    assert driver.generate(6) == {2: model.greedy(PROMPT, 6)}


def test_chunks_sample_only_at_the_end(driver, model):
    driver.admit(0, PROMPT)

    assert len(driver.step({0: 2}).rows) == 0
    assert len(driver.step({0: 2}).rows) == 0
    assert driver.step({0: 1}).token_ids.tolist() == model.greedy(PROMPT, 1)


def test_a_mixed_step(driver, model):
    driver.admit(0, PROMPT)
    driver.step()
    driver.admit(5, [9, 9, 9])
    driver.admit(3, [7, 7, 7, 7])

    output = driver.step({3: 2, 0: 1, 5: 3})

    assert output.rows.tolist() == [0, 5]
    assert output.token_ids.tolist() == [model.greedy(PROMPT, 2)[1], model.greedy([9, 9, 9], 1)[0]]


def test_a_preempted_sequence_goes_on_where_it_was(driver, model):
    driver.admit(0, PROMPT)
    driver.generate(3)
    driver.preempt(0)
    driver.generate(3)

    assert driver.tokens[0] == PROMPT + model.greedy(PROMPT, 6)


def test_a_prefix_hit_computes_only_the_rest(driver, model):
    driver.admit(0, PROMPT, num_computed_tokens=4)

    assert driver.step({0: 1}).token_ids.tolist() == model.greedy(PROMPT, 1)


def test_a_streamed_prompt_samples_when_it_is_final(driver, model):
    driver.admit(0, PROMPT[:2], is_final=False)
    assert len(driver.step().rows) == 0
    driver.append(0, PROMPT[2:4], is_final=False)
    assert len(driver.step().rows) == 0
    driver.append(0, PROMPT[4:], is_final=True)

    assert driver.generate(2) == {0: model.greedy(PROMPT, 2)}


def test_a_forced_token_is_computed_together_with_the_sampled_one(driver, model):
    driver.admit(0, PROMPT)
    first = driver.generate(1)[0]
    driver.append(0, [42])

    assert driver.step({0: 2}).token_ids.tolist() == model.greedy([*PROMPT, *first, 42], 1)


def test_a_row_is_released_and_admitted_in_one_step(driver, model):
    driver.admit(0, PROMPT)
    driver.step()
    driver.release(0)
    driver.admit(0, [8, 8])

    assert driver.generate(2) == {0: model.greedy([8, 8], 2)}


def test_a_child_outlives_its_parent_whose_row_is_given_on(driver, model):
    driver.admit(0, PROMPT)
    driver.generate(3)
    shorter = driver.tokens[0][:6]
    driver.fork(0, 1, num_total_tokens=6)
    driver.release(0)
    driver.admit(0, [8, 8])

    assert driver.generate(2) == {1: model.greedy(shorter, 2), 0: model.greedy([8, 8], 2)}


def test_an_empty_step_runs_no_model(driver, model):
    output = driver.step({})

    assert (output.step, len(output.rows), model.num_forwards) == (1, 0, 0)


def test_a_row_that_is_not_finite_fails_alone():
    table = FakeModel.random(vocab_size=50).table_PV
    table[sum((20, 1)) % len(table), 7] = float("nan")
    table[sum((30, 1)) % len(table), 7] = float("inf")
    model = FakeModel(table)
    driver = WorkerDriver(started_worker(model))
    driver.admit(0, [1, 20])
    driver.admit(1, [1, 2])
    driver.admit(2, [1, 30], sampling=SamplingParams(temperature=1.0, top_k=5))
    output = driver.step()

    assert output.rows.tolist() == [1]
    assert output.token_ids.tolist() == model.greedy([1, 2], 1)
    assert sorted(output.failures) == [0, 2]
    assert "not finite" in output.failures[0]


def test_a_step_that_fails_counts_nothing(driver, model, monkeypatch):
    driver.admit(0, PROMPT)
    monkeypatch.setattr(model, "compute_logits", model.compute_logits)
    monkeypatch.setattr(FakeModel, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        driver.step()
    monkeypatch.undo()

    again = driver.worker.execute(SchedulerOutput(step=9, rows=int_array([0]), num_tokens=int_array([5])))

    assert again.token_ids.tolist() == model.greedy(PROMPT, 1)


def test_statistics_and_controls(driver):
    driver.admit(0, PROMPT)
    driver.generate(2)

    assert driver.worker.control("ping", {}) == "pong"
    statistics = driver.worker.control("statistics", {})
    assert (statistics["num_steps"], statistics["num_tokens"], statistics["num_sampled_tokens"]) == (2, 6, 2)
    assert statistics["num_rows_used"] == 1
    with pytest.raises(EngineError, match="no such operation"):
        driver.worker.control("fly", {})


def test_the_order_of_calls_is_checked(model):
    worker = Worker(worker_config("none"), model_loader=lambda config: model)
    with pytest.raises(EngineError, match="load"):
        worker.measure_capacity()
    worker.load()
    with pytest.raises(EngineError, match="initialize_cache"):
        worker.execute(SchedulerOutput(step=0))


def test_the_number_of_threads_is_set(model):
    before = torch.get_num_threads()
    try:
        started_worker(model, num_threads=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
