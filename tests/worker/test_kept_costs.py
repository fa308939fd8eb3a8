"""What a step takes is measured at the first starts with the same options, and then read from a file."""

import dataclasses
import json
import os
import threading

import pytest

from quire.testing.model_harness import worker_config
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker import kept_costs, packed_store, worker
from quire.worker.capacity import StepCost
from quire.worker.kept_costs import MOST_KEPT, NUM_STARTS, kept_cost
from quire.worker.kernels import cpu


def cost_of(seconds):
    return StepCost(1000, "16 tokens", seconds, 100, 10 * seconds, seconds_per_pair=seconds / 8)


class Measured:
    """A start that measures; each takes as long as the next of these times."""

    def __init__(self, *seconds):
        self.seconds = list(seconds)

    def __call__(self):
        return cost_of(self.seconds.pop(0))


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.costs"


CONFIG = worker_config("none", max_num_batched_tokens=64)


def test_only_the_first_starts_measure_and_the_quickest_counts(file):
    measured = Measured(0.3, 0.2, 0.1)
    costs = [kept_cost(file, CONFIG, measured) for _ in range(5)]
    assert len(measured.seconds) == 3 - NUM_STARTS
    assert costs[0] == cost_of(0.3)
    assert costs[1:] == [cost_of(0.2)] * 4


def test_a_slower_second_start_does_not_count(file):
    measured = Measured(0.2, 0.3)
    costs = [kept_cost(file, CONFIG, measured) for _ in range(3)]
    assert costs == [cost_of(0.2)] * 3


def test_other_options_are_measured_for_themselves(file):
    for number in range(MOST_KEPT + 1):
        config = dataclasses.replace(CONFIG, max_num_batched_tokens=64 + number)
        assert kept_cost(file, config, Measured(0.1 + number)).seconds_per_token == 0.1 + number
        assert kept_cost(file, config, Measured(50.0)).seconds_per_token == 0.1 + number
    # the last ones are still there, and the first one is not
    assert kept_cost(file, config, Measured()).seconds_per_token == 0.1 + MOST_KEPT
    assert kept_cost(file, CONFIG, Measured(0.7)).seconds_per_token == 0.7


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"x": {"num_starts": 9}}', b"\xff", b'{"x": {"y": ' + b"[" * 100_000, b" " * (2 << 20)]
)
def test_a_damaged_file_is_written_anew(file, content, caplog):
    file.write_bytes(content)
    assert [kept_cost(file, CONFIG, Measured(0.1)).seconds_per_token for _ in range(2)] == [0.1, 0.1]
    assert kept_cost(file, CONFIG, Measured()).seconds_per_token == 0.1
    [line] = caplog.messages
    assert line.startswith(f"{file} is of no use")


def test_weights_that_this_process_is_just_writing_stay_as_they_are(file):
    weights = file.with_suffix(f".{os.getpid()}.part")
    weights.write_bytes(b"half of them")
    kept_cost(file, CONFIG, Measured(0.1))
    assert weights.read_bytes() == b"half of them"
    assert sorted(file.parent.iterdir()) == [weights, file]


@pytest.mark.parametrize("value", [-1, -0.5, 1e300, 10**30])
def test_numbers_that_no_step_has_are_not_believed(file, value):
    for _ in range(NUM_STARTS):
        kept_cost(file, CONFIG, Measured(0.1))
    text = file.read_text(encoding="utf-8")
    for name in ("num_bytes", "seconds_per_token", "seconds_per_pair"):
        if name == "num_bytes" and isinstance(value, float):
            continue
        content = json.loads(text)
        next(iter(content.values()))["cost"][name] = value
        file.write_text(json.dumps(content), encoding="utf-8")
        assert kept_cost(file, CONFIG, Measured(0.2)) == cost_of(0.2)


def test_a_record_of_a_release_that_measured_less_is_of_no_use(file, monkeypatch):
    with monkeypatch.context() as earlier:
        earlier.setattr(kept_costs, "fields", lambda kind: dataclasses.fields(kind)[:-1])
        for _ in range(NUM_STARTS):
            kept_cost(file, CONFIG, Measured(0.1))
    assert kept_cost(file, CONFIG, Measured(0.3)) == cost_of(0.3)


def test_a_folder_that_is_gone_costs_the_next_start_a_measurement_and_nothing_else(tmp_path):
    file = tmp_path / "gone" / "model.costs"
    assert [kept_cost(file, CONFIG, Measured(0.1)).num_bytes for _ in range(3)] == [1000] * 3


def test_a_disk_that_is_full_keeps_no_piece_of_it(file, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(file), "replace", fail)
    assert kept_cost(file, CONFIG, Measured(0.1)).num_bytes == 1000
    assert list(file.parent.iterdir()) == []


@pytest.mark.skipif(not cpu.load(), reason="weights are packed by C++ kernels")
def test_a_worker_measures_until_its_packed_weights_have_costs(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_store, "_SMALLEST", 1)
    measure = worker.measure_largest_step
    num_measured = 0

    def counted(*arguments):
        nonlocal num_measured
        num_measured += 1
        return measure(*arguments)

    monkeypatch.setattr(worker, "measure_largest_step", counted)
    path = make_checkpoint(tmp_path / "model", "qwen3_tied")
    capacities = []
    for _ in range(1 + NUM_STARTS + 2):
        started = worker.Worker(worker_config(path, attention_backend="cpu", packed_weights_cache=1 << 30))
        started.load()
        for thread in threading.enumerate():
            if thread.name == "quire-keep-packed":
                thread.join()
        capacities.append(started.measure_capacity())
        started.shutdown()
    # the first one has packed
    assert num_measured == 1 + NUM_STARTS
    assert len({capacity.step_bytes for capacity in capacities}) == 1
