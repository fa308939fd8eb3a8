"""Walls inside a worker's step, on a model that can be computed by hand."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.worker_driver import WorkerDriver

from quire.kv_connectors.connector import STEP_DATA, BlockLoad, BlockStore, StepTransfers
from quire.messages import AdmittedSequence, SchedulerOutput, StepOutput, int_array, sequence_id_of
from quire.sampling_params import SamplingParams
from quire.testing.fake_model import FakeModel
from quire.testing.model_harness import worker_config
from quire.worker.model_runner import STRANGE_TOKEN
from quire.worker.patience import TooLongError, Watch, uncounted
from quire.worker.row_table import RowTable
from quire.worker.step_isolation import OUT_OF_MEMORY, TOO_LONG, StepIsolation
from quire.worker.transfers import NOT_FETCHED
from quire.worker.unwritten import UnwrittenBlocks
from quire.worker.worker import Worker

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def model() -> FakeModel:
    return FakeModel.random(vocab_size=50)


@pytest.fixture
def driver(model: FakeModel) -> WorkerDriver:
    return _started(model)


def _started(model: FakeModel, connector: Any = None) -> WorkerDriver:
    worker = Worker(worker_config("none"), model_loader=lambda config: model)
    worker.load()
    if connector is not None:
        worker._connector = connector
    worker.initialize_cache([], 0)
    return WorkerDriver(worker)


def runner_of(driver: WorkerDriver) -> Any:
    return driver.worker._runner


def break_forward(monkeypatch: pytest.MonkeyPatch, model: FakeModel, error: Exception, on: int | None) -> None:
    """When this token is computed; always without one."""
    forward = model.forward

    def broken(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if on is None or on in input_ids.tolist():
            raise error
        return forward(input_ids, positions)

    monkeypatch.setattr(model, "forward", broken)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("shapes differ at /home/somebody"), "RuntimeError"),
        (MemoryError(), OUT_OF_MEMORY),
        (torch.OutOfMemoryError("x"), OUT_OF_MEMORY),
    ],
)
def test_one_row_fails_and_says_nothing_of_the_machine(
    driver: WorkerDriver, model: FakeModel, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    break_forward(monkeypatch, model, error, on=33)
    for row in range(6):
        driver.admit(row, [*PROMPT, 33, 2] if row == 4 else [*PROMPT, row])
    output = driver.step()
    assert list(output.failures) == [4]
    assert said in output.failures[4]
    assert "/home" not in output.failures[4]
    tokens = dict(zip(output.rows.tolist(), output.token_ids.tolist(), strict=True))
    assert tokens == {row: model.greedy([*PROMPT, row], 1)[0] for row in (0, 1, 2, 3, 5)}
    assert output.counts["num_divided_steps"] == 1
    assert ("num_out_of_memory" in output.counts) == (said == OUT_OF_MEMORY)


def test_a_failed_row_computes_nothing_until_it_is_released(
    driver: WorkerDriver, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A core that runs ahead grants it tokens before it knows."""
    break_forward(monkeypatch, model, RuntimeError("no"), on=33)
    driver.admit(0, [*PROMPT, 33])
    driver.admit(1, PROMPT)
    driver.step()
    output = driver.step({0: 1, 1: 1})
    assert (output.rows.tolist(), output.failures) == ([1], {})
    driver.release(0)
    driver.admit(0, PROMPT)
    output = driver.step({0: 5, 1: 1})
    assert sorted(output.rows.tolist()) == [0, 1]


def test_an_engine_that_computes_nothing_any_more_ends(
    driver: WorkerDriver, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row passes, nor a token beside them: it is not the requests' fault."""
    break_forward(monkeypatch, model, RuntimeError("broken"), on=None)
    driver.admit(0, PROMPT)
    driver.admit(1, PROMPT)
    with pytest.raises(RuntimeError, match="broken"):
        driver.step()


def test_two_bad_requests_alone_do_not_end_the_engine(
    driver: WorkerDriver, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_forward(monkeypatch, model, RuntimeError("broken"), on=33)
    driver.admit(0, [33, 1])
    driver.admit(1, [1, 33])
    assert sorted(driver.step().failures) == [0, 1]


def test_a_device_beyond_repair_ends_the_engine_at_once(
    driver: WorkerDriver, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_forward(monkeypatch, model, RuntimeError("CUDA error: device-side assert triggered"), on=33)
    platform = runner_of(driver).isolation._platform
    monkeypatch.setattr(platform, "is_beyond_repair", lambda error: "CUDA error" in str(error), raising=False)
    driver.admit(0, [33, 1])
    driver.admit(1, PROMPT)
    with pytest.raises(RuntimeError, match="device-side"):
        driver.step()


def test_a_sampler_that_fails_on_one_row(
    driver: WorkerDriver, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are computed by then, and are not divided to find out which."""
    sampler = runner_of(driver).isolation.computation.sampler
    sample, num_calls = sampler.sample, 0

    def broken(hidden: torch.Tensor, batch: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if 2 in batch.sampling_rows_N.tolist():
            raise IndexError("of a table")
        return sample(hidden, batch)

    monkeypatch.setattr(sampler, "sample", broken)
    for row in range(4):
        driver.admit(row, [*PROMPT, row])
    output = driver.step()
    assert list(output.failures) == [2]
    assert sorted(output.rows.tolist()) == [0, 1, 3]
    assert num_calls == 5, "four, two and two rows, and two alone"


@pytest.mark.parametrize("kind", ["admit", "fork"])
def test_a_row_that_cannot_be_made_ready_fails_alone(
    driver: WorkerDriver, model: FakeModel, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    settings = runner_of(driver).isolation.computation.sampler.settings
    hook = getattr(settings, kind)

    def broken(change: Any) -> None:
        if change.row == 1:
            raise ValueError("no such parameter")
        hook(change)

    monkeypatch.setattr(settings, kind, broken)
    driver.admit(0, PROMPT)
    driver.generate(1)
    if kind == "admit":
        driver.admit(1, PROMPT)
    else:
        driver.fork(0, 1, num_total_tokens=5)
    output = driver.step()
    assert list(output.failures) == [1]
    assert "ValueError" in output.failures[1]
    assert output.rows.tolist() == [0]
    assert driver.tokens[0][5:] == model.greedy(PROMPT, 2)


def test_a_fork_that_is_let_go_at_once_fails_for_nobody(
    driver: WorkerDriver, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core would take it for a row that had ended before, and forget all that is cached."""

    def broken(change: Any) -> None:
        raise ValueError("no such parameter")

    driver.admit(0, PROMPT)
    driver.generate(1)
    settings = runner_of(driver).isolation.computation.sampler.settings
    fork = settings.fork
    monkeypatch.setattr(settings, "fork", broken)
    driver.fork(0, 1, num_total_tokens=5)
    driver.release(1)
    assert driver.step().failures == {}
    monkeypatch.setattr(settings, "fork", fork)
    driver.fork(0, 1, num_total_tokens=5)
    output = driver.step()
    assert (sorted(output.rows.tolist()), output.failures) == ([0, 1], {})


@pytest.mark.parametrize("token", [50, 4711, -1, 2**31 - 1])
def test_a_token_that_is_not_in_the_vocabulary_fails_its_row(
    driver: WorkerDriver, model: FakeModel, token: int
) -> None:
    """SEC-20: the core refuses it; should one come through, it is not looked up in a table."""
    runner_of(driver).table._vocab_size = 50
    driver.admit(0, [*PROMPT, token, 3])
    driver.admit(1, PROMPT)
    driver.admit(2, PROMPT, is_final=False)
    assert driver.step().failures == {0: STRANGE_TOKEN}
    driver.release(0)
    driver.append(2, [token], is_final=False)
    output = driver.step()
    assert output.failures == {2: STRANGE_TOKEN}
    assert driver.tokens[1] == PROMPT + model.greedy(PROMPT, 2)


def test_a_long_prompt_that_does_not_fit_is_computed_in_parts(
    driver: WorkerDriver, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = model.forward
    sizes: list[int] = []

    def short_of_memory(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        sizes.append(len(input_ids))
        if len(input_ids) > 6:
            raise torch.OutOfMemoryError
        return forward(input_ids, positions)

    monkeypatch.setattr(model, "forward", short_of_memory)
    prompt = [k % 40 for k in range(20)]
    driver.admit(0, prompt, sampling=SamplingParams(temperature=0.0, prompt_logprobs=1))
    output = driver.step()
    assert sizes == [20, 10, 5, 5, 10, 5, 5]
    assert output.token_ids.tolist() == model.greedy(prompt, 1)
    assert [entry.token_ids[0] for entry in output.prompt_logprobs[0]] == prompt[1:]


# ---- blocks that were promised


def table_of_two(window: int = 0) -> RowTable:
    """Rows 0 and 1 share their first two blocks; blocks have 4 tokens."""
    table = RowTable(4, 64)
    table.open_groups(1, 16, 100, [window])
    for row, blocks, computed in ((0, [10, 11, 12], 0), (1, [10, 11, 20], 8)):
        tokens = int_array(range(11))
        table.admit(
            AdmittedSequence(
                row=row,
                sequence_id=row,
                token_ids=tokens,
                num_prompt_tokens=11,
                num_computed_tokens=computed,
                sampling=SamplingParams(),
                seed=0,
            )
        )
        table.block_tables[0, row, :3] = blocks
    return table


def test_readers_are_those_who_count_an_unwritten_block_as_computed() -> None:
    unwritten = UnwrittenBlocks(table_of_two(), 4)
    assert not unwritten.step_of
    assert unwritten.readers(int_array([0, 1])) == []
    unwritten.add_span(0, 5, 6)  # in blocks 11 and 12
    assert unwritten.readers(int_array([0, 1])) == [1]
    unwritten.discard_written(int_array([0]), int_array([8]))  # blocks 10 and 11, by whoever has row 0 now
    assert unwritten.readers(int_array([1])) == []
    assert unwritten.step_of


def test_a_block_behind_the_window_is_read_by_nobody() -> None:
    """The window of row 1 has passed block 10, which may have become somebody else's."""
    unwritten = UnwrittenBlocks(table_of_two(window=4), 4)
    unwritten.add([10])
    assert unwritten.readers(int_array([1])) == []
    unwritten.add([11])
    assert unwritten.readers(int_array([1])) == [1]
    whole = UnwrittenBlocks(table_of_two(), 4)
    whole.add([10])
    assert whole.readers(int_array([1])) == [1]


def test_a_block_is_unwritten_for_a_step_and_the_next_one_or_until_it_is_filled() -> None:
    unwritten = UnwrittenBlocks(table_of_two(), 4)
    unwritten.step = 7
    unwritten.add([10, 11, 12, 13, 14])
    moves = StepTransfers(loads=[BlockLoad(row=0, source=None, first_block=0, blocks=[[14]])])
    pairs = {"swapped_in": np.array([[3], [11]]), "block_copies": np.array([[13], [12]])}
    unwritten.open(SchedulerOutput(step=8, step_data={STEP_DATA: moves}, **pairs))
    assert set(unwritten.step_of) == {10, 13}
    unwritten.open(SchedulerOutput(step=9))
    assert not unwritten.step_of


# ---- connectors


class UnreliableConnector:
    """Cannot load into block 3, nor store what lies there."""

    def __init__(self) -> None:
        self.moved: list[int] = []

    def open(self, layout: Any, tensors: Any) -> None: ...

    def load(self, loads: list[BlockLoad]) -> None:
        self._move(loads)

    def store(self, stores: list[BlockStore]) -> None:
        self._move(stores)

    def _move(self, moves: list[Any]) -> None:
        for move in moves:
            if 3 in move.blocks[0]:
                raise ConnectionError("the store is gone")
            self.moved.append(move.row)


def test_what_a_connector_cannot_bring_costs_one_request_and_what_it_cannot_take_none(model: FakeModel) -> None:
    connector = UnreliableConnector()
    driver = _started(model, connector)
    loads = [BlockLoad(row=row, source=0, first_block=0, blocks=[[row + 2]]) for row in range(3)]
    stores = [BlockStore(row=row, key="k", token_ids=int_array(PROMPT), blocks=[[row + 3]]) for row in range(3)]
    for row in range(3):
        driver.admit(row, PROMPT, num_computed_tokens=4)
    scheduled = SchedulerOutput(
        step=1,
        admitted=driver._changes["admitted"],
        rows=int_array([0, 1, 2]),
        num_tokens=int_array([1, 1, 1]),
        step_data={STEP_DATA: StepTransfers(loads=loads, stores=stores)},
    )
    output: StepOutput = driver.worker.execute(scheduled)
    assert output.failures == {1: NOT_FETCHED}
    assert sorted(output.rows.tolist()) == [0, 2]
    assert output.token_ids.tolist() == model.greedy(PROMPT, 1) * 2
    # row 0 had its blocks and could not store them; of row 1 there is nothing to store
    assert connector.moved == [0, 2, 2]
    assert output.counts == {"num_failed_stores": 1}


def test_a_row_that_failed_in_an_earlier_step_stores_nothing(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step, with the rest of its prompt, was decided before anybody knew."""
    connector = UnreliableConnector()
    driver = _started(model, connector)
    prompt = [3, 33, 4, 1, 5, 9]
    break_forward(monkeypatch, model, RuntimeError("no"), on=33)
    driver.admit(0, prompt)
    driver.admit(1, PROMPT)
    assert list(driver.step({0: 4, 1: 5}).failures) == [0]
    stores = [BlockStore(row=row, key="k", token_ids=int_array(prompt), blocks=[[0]]) for row in (0, 1)]
    output: StepOutput = driver.worker.execute(
        SchedulerOutput(
            step=2,
            rows=int_array([0, 1]),
            num_tokens=int_array([2, 1]),
            step_data={STEP_DATA: StepTransfers(stores=stores)},
        )
    )
    assert not output.failures
    assert connector.moved == [1]


class ToldWatch:
    """Ends work as a clock would that runs only while certain tokens are computed."""

    def __init__(self, model: FakeModel, slow_token: int | None) -> None:
        self.model = model
        self.slow_token = slow_token
        self.limits: list[float] = []

    def run(self, work: Any, seconds: float) -> Any:
        self.limits.append(seconds)
        forward = self.model.forward

        def slow(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            if self.slow_token in input_ids.tolist() or (self.slow_token is None and len(input_ids) > 8):
                raise TooLongError
            return forward(input_ids, positions)

        self.model.forward = slow  # type: ignore[method-assign]
        try:
            return work()
        finally:
            self.model.forward = forward  # type: ignore[method-assign]


def watch_with(driver: WorkerDriver, watch: ToldWatch) -> StepIsolation:
    isolation: StepIsolation = runner_of(driver).isolation
    isolation._watch = watch  # type: ignore[assignment]
    return isolation


def test_a_request_that_takes_too_long_fails_with_all_its_rows(driver: WorkerDriver, model: FakeModel) -> None:
    """The others get what they would have got, and what follows is not watched more closely."""
    watch = ToldWatch(model, slow_token=33)
    isolation = watch_with(driver, watch)
    driver.admit(0, PROMPT)
    driver.admit(1, [*PROMPT, 33], sequence_id=sequence_id_of(7, 0))
    driver.admit(2, [1, 2])
    driver.admit(3, [*PROMPT, 33], sequence_id=sequence_id_of(7, 1))
    driver.admit(4, [*PROMPT, 4], sequence_id=sequence_id_of(7, 2))
    patience = isolation._patience.seconds
    output = driver.step()
    failed_together = {row for row, reason in output.failures.items() if reason == TOO_LONG}
    assert {1, 3} <= failed_together <= {1, 3, 4}
    tokens = dict(zip(output.rows.tolist(), output.token_ids.tolist(), strict=True))
    assert tokens[0] == model.greedy(PROMPT, 1)[0]
    assert tokens[2] == model.greedy([1, 2], 1)[0]
    assert watch.limits[0] >= patience
    assert max(watch.limits[1:]) < patience
    # of two rows that would take too long, one was run alone
    assert len(watch.limits) <= 7
    assert isolation._patience.seconds == patience
    for row in failed_together:
        driver.release(row)
    num_limits = len(watch.limits)
    driver.step()
    assert len(watch.limits) == num_limits + 1


def test_steps_that_are_slow_without_a_culprit_get_more_time(driver: WorkerDriver, model: FakeModel) -> None:
    """On a machine that stood still, nobody fails."""
    watch = ToldWatch(model, slow_token=None)
    isolation = watch_with(driver, watch)
    for row in range(4):
        driver.admit(row, PROMPT)
    patience = isolation._patience.seconds
    output = driver.step()
    assert output.failures == {}
    assert sorted(output.rows.tolist()) == [0, 1, 2, 3]
    assert isolation._patience.seconds == 2 * patience


def test_work_that_does_not_end_is_ended() -> None:
    watch = Watch()

    def endless() -> None:
        while True:
            pass

    with pytest.raises(TooLongError):
        watch.run(endless, 0.01)
    assert watch.run(lambda: 5, 100.0) == 5
    with pytest.raises(KeyError):
        watch.run(lambda: {}[1], 100.0)
    watch.close()


def test_what_does_not_count_leaves_the_work_its_time() -> None:
    watch = Watch()

    def work() -> None:
        [limit] = watch._running
        before = limit.deadline
        with uncounted():
            assert limit.deadline == math.inf
        assert before <= limit.deadline < before + 60.0

    watch.run(work, 100.0)
    # nobody watches here
    with uncounted():
        pass
    watch.close()


def test_an_end_that_the_work_itself_catches_does_no_harm_later() -> None:
    watch = Watch()

    def stubborn() -> int:
        try:
            while True:
                pass
        except TooLongError:
            return 3

    assert watch.run(stubborn, 0.01) == 3
    assert watch.run(lambda: sum(range(100_000)), 100.0) == 4999950000
    watch.close()


def test_an_ended_work_leaves_nothing_in_the_interpreter() -> None:
    """An exception that is looked for and never found would stop every profiler for ever."""
    program = """
import sys
from quire.worker.patience import TooLongError, Watch

def endless():
    while True:
        pass

def stubborn():
    try:
        endless()
    except TooLongError:
        return 3

watch = Watch()
assert watch.run(stubborn, 0.01) == 3
try:
    watch.run(endless, 0.01)
except TooLongError:
    print("ended")
sys.setprofile(lambda frame, event, argument: None)
sum(map(lambda number: number + 1, range(1000)))
sys.setprofile(None)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ended\n", "")


def test_a_watch_that_nobody_has_closed_ends_with_its_owner() -> None:
    watch = Watch()
    watch.run(lambda: 5, 100.0)
    thread = watch._thread
    assert thread is not None
    assert thread.is_alive()
    del watch
    thread.join(30.0)
    assert not thread.is_alive()
