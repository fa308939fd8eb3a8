"""Steps of one token as graphs: what a device without any records and replays is what the model computes."""

from itertools import pairwise

import pytest
import torch
from tests.support.recorded_graphs import HostWorkError, RecordedGraphs
from tests.support.sampled import sampled
from tests.support.worker_driver import WorkerDriver

from quire.engine_core.kv_cache_manager.groups import make_groups
from quire.state_layout import state_layout
from quire.testing.model_harness import worker_config
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker.compilation.graphs import Outputs, ladder
from quire.worker.platforms.cpu import CpuPlatform
from quire.worker.worker import Worker

# of every kind of layer that a native model has
NAMES = (
    "llama", "qwen3_tied", "gpt_oss", "deepseek_v3_groups", "gemma4_moe", "qwen3_next", "bamba", "lfm2", "mamba2",
    "llama4", "minimax",
)  # fmt: skip
NUM_BLOCKS = 400


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    made = {}

    def make(name):
        if name not in made:
            made[name] = make_checkpoint(tmp_path_factory.mktemp(name), name)
        return made[name]

    return make


@pytest.fixture
def graphs(monkeypatch):
    """A CPU that captures."""
    device = RecordedGraphs()

    def of(path, **options):
        monkeypatch.setattr(CpuPlatform, "graph_device", lambda platform: device)
        return device, drive(Worker(worker_config(path, **options)))

    return of


def drive(worker):
    worker.load()
    capacity = worker.measure_capacity()
    groups, _ = make_groups(capacity.layers)
    names = [list(group.layer_names) for group in groups]
    states = state_layout(capacity.layers, names, 4)
    worker.initialize_cache(names, NUM_BLOCKS, 100)
    return WorkerDriver(
        worker,
        num_blocks=NUM_BLOCKS,
        num_host_blocks=100,
        num_groups=len(groups),
        num_state_blocks=states.num_blocks if states else 0,
    )


def a_life(driver):
    """Rows come and go, so that steps of one token have 1 to 5 of them; all tokens that were said."""
    said = {}
    driver.admit(0, [5, 6, 7, 8, 9])
    driver.step()
    driver.step()
    for row, length in ((3, 12), (1, 2), (6, 30)):
        driver.admit(row, list(range(40, 40 + length)))
    driver.step()
    driver.generate(3)
    driver.fork(3, 4, len(driver.tokens[3]))
    driver.generate(2)
    driver.swap_out(1)
    driver.generate(2)
    said |= {row: list(driver.tokens[row]) for row in (0, 4)}
    driver.release(0)
    driver.release(4)
    driver.swap_in(1)
    driver.generate(3)
    return said | driver.tokens


@pytest.mark.parametrize(("name", "backend"), sampled(NAMES, ["cpu", "reference"], n=len(NAMES)))
def test_a_replay_gives_what_the_model_gives(name, backend, checkpoint, graphs):
    path = checkpoint(name)
    expected = a_life(drive(Worker(worker_config(path, enforce_eager=True, attention_backend=backend))))
    device, driver = graphs(path, attention_backend=backend)
    assert a_life(driver) == expected
    # two were captured to measure what they take
    captured = device.graphs[2:]
    assert len(captured) == len(ladder(8))
    used = [graph.num_replays for graph in captured]
    assert sum(used) == driver.worker.statistics()["num_graph_replays_total"] > 8
    assert sum(count > 0 for count in used) >= 3, "steps of several sizes"


def test_sizes():
    assert ladder(1) == [1]
    assert ladder(3) == [1, 2, 3]
    assert ladder(20) == [1, 2, 4, 8, 16, 20]
    sizes = ladder(512)
    assert len(sizes) < 50
    assert all(after <= max(before + 8, before * 9 / 8) for before, after in pairwise(sizes))


def test_what_moves_is_noticed(checkpoint, graphs):
    device, driver = graphs(checkpoint("llama"))
    driver.admit(0, [1, 2, 3])
    driver.generate(2)
    worker = driver.worker
    norm = worker._model.model.norm
    norm.weight.data = norm.weight.data.clone()
    with pytest.raises(AssertionError, match="has moved"):
        device.graphs[-1].replay()
    worker._graphs.capture()
    device.graphs[-1].replay()


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x * float(x.sum()),
        lambda x: x[x > 0],
        lambda x: x + torch.tensor([1.0, 2.0]),
        lambda x: x * torch.from_numpy(x.numpy()),
        lambda x: x if x.any() else -x,
    ],
)
def test_the_host_has_no_part_in_a_graph(work):
    x = torch.ones(2)
    with pytest.raises(HostWorkError):
        RecordedGraphs(lambda: [x]).capture(lambda: Outputs(work(x), x))


def test_a_replay_sees_what_memory_holds_then():
    x = torch.ones(2)
    graph = RecordedGraphs(lambda: [x]).capture(lambda: Outputs(x.view(1, 2) + 1, x * 2))
    x.fill_(5)
    graph.replay()
    assert graph.outputs.hidden_TE.tolist() == [[6, 6]]
    assert graph.outputs.logits_TV.tolist() == [10, 10]
