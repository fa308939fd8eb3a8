"""A model in pieces says what it says whole: as it is cut, and as torch's compiler makes code of the pieces."""

import logging
import os
import shutil

import pytest
import torch
from tests.support.eagle_checkpoints import make_eagle3_head
from tests.support.recorded_graphs import RecordedGraphs
from tests.support.speculative_worker import started
from tests.worker.compilation.test_graphs import a_life, drive

from quire.config import EngineOptions, resolve
from quire.errors import ModelError, OptionError
from quire.testing.model_harness import worker_config
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker.attention import Attention, attention_layers
from quire.worker.compilation import CannotCompileError, compile_model, piecewise
from quire.worker.model_loader import load_model
from quire.worker.platforms.cpu import CpuPlatform
from quire.worker.state_cache import recurrent_layers
from quire.worker.worker import Worker

# of every kind of layer that a native model has, and one that Transformers runs
SAMPLED = ("llama", "gpt_oss", "deepseek_v3_groups", "qwen3_next", "stablelm")
NAMES = (*SAMPLED, "qwen3_tied", "gemma4_moe", "bamba", "lfm2", "mamba2", "llama4", "minimax")
CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs one of C++")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    made = {}

    def make(name):
        if name not in made:
            made[name] = make_checkpoint(tmp_path_factory.mktemp(name), name)
        return made[name]

    return make


@pytest.fixture
def uncompiled(monkeypatch):
    """Pieces are run as they were cut, which takes no compiler and no time."""
    monkeypatch.setattr(piecewise, "compiled", lambda module, inputs: module.forward)


def plain(path, **options):
    return a_life(drive(Worker(worker_config(path, enforce_eager=True, attention_backend="auto", **options))))


def in_pieces(path, **options):
    driver = drive(Worker(worker_config(path, compile=True, attention_backend="auto", **options)))
    return driver.worker._model.forward, a_life(driver)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLED else pytest.mark.nightly) for name in NAMES]
)
def test_pieces_lie_between_layers_that_keep_something(name, checkpoint, uncompiled):
    path = checkpoint(name)
    forward, said = in_pieces(path)
    model = load_model(worker_config(path))
    assert forward.num_pieces == len(attention_layers(model)) + len(recurrent_layers(model)) + 1
    assert said == plain(path)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_next"])
def test_graphs_are_captured_of_pieces(name, checkpoint, uncompiled, monkeypatch):
    """As on a GPU, where steps of one token are both."""
    device = RecordedGraphs()
    monkeypatch.setattr(CpuPlatform, "graph_device", lambda platform: device)
    driver = drive(Worker(worker_config(checkpoint(name), compile=True, attention_backend="auto")))
    assert a_life(driver) == plain(checkpoint(name))
    assert driver.worker.statistics()["num_graph_replays_total"] > 8


@pytest.mark.parametrize("layers", [3, 9])
def test_pieces_that_are_alike_are_one_function(layers, tmp_path, uncompiled):
    model = load_model(worker_config(make_checkpoint(tmp_path, "llama", num_hidden_layers=layers)))
    forward = compile_model(model, 64, CPU, has_adapters=False)
    assert (forward.num_pieces, forward.num_functions) == (layers + 1, 3)


@needs_compiler
@pytest.mark.nightly  # the compiler takes half a minute for three functions
def test_compiled_pieces_say_the_same_and_are_found_at_the_next_start(checkpoint, tmp_path, monkeypatch):
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    expected = plain(checkpoint("llama"))
    starts = []
    for _ in range(2):
        counters.clear()
        forward, said = in_pieces(checkpoint("llama"))
        assert said == expected
        assert forward.num_functions == 3
        starts.append({name: counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss")})
    assert starts == [{"hit": 0, "miss": 3}, {"hit": 3, "miss": 0}]


@needs_compiler
@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_layer_compiled(name, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert in_pieces(checkpoint(name))[1] == plain(checkpoint(name))


def test_the_compiler_writes_where_nobody_else_may(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "put back as it was")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    piecewise._set_compiler_folder()
    folder = tmp_path / "compiled"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    assert folder.stat().st_mode & 0o077 == 0
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    folder.chmod(0o777)
    with pytest.raises(CannotCompileError, match="chmod 700"):
        piecewise._set_compiler_folder()


@pytest.mark.parametrize(
    ("gains", "asked", "enforce_eager", "is_compiled"),
    [
        (True, None, False, True),
        (True, None, True, False),
        (True, False, False, False),
        (False, None, False, False),
        (False, True, False, True),
    ],
)
def test_when_a_model_is_compiled(gains, asked, enforce_eager, is_compiled, checkpoint, uncompiled, monkeypatch):
    """Where that pays, unless somebody says something else; on a CPU it does not (docs/benchmarks.md)."""
    assert not CpuPlatform.gains_from_compiling
    monkeypatch.setattr(CpuPlatform, "gains_from_compiling", gains)
    driver = drive(Worker(worker_config(checkpoint("llama"), compile=asked, enforce_eager=enforce_eager)))
    assert isinstance(driver.worker._model.forward, piecewise.PiecewiseForward) is is_compiled


def test_sums_in_a_fixed_order_are_not_left_to_a_compiler(checkpoint, uncompiled, monkeypatch):
    monkeypatch.setattr(CpuPlatform, "gains_from_compiling", True)
    monkeypatch.setenv("QUIRE_GPU_PRODUCTS", "fixed")
    driver = drive(Worker(worker_config(checkpoint("llama"), compile=None)))
    assert not isinstance(driver.worker._model.forward, piecewise.PiecewiseForward)


def test_what_cannot_be_compiled_is_refused_if_asked_for_and_else_runs(checkpoint, monkeypatch, caplog):
    def fail(module, inputs):
        raise CannotCompileError("there is no compiler")

    monkeypatch.setattr(piecewise, "compiled", fail)
    with pytest.raises(OptionError, match=r"compile: not for LlamaForCausalLM: there is no compiler\. Use compile=F"):
        in_pieces(checkpoint("llama"))
    monkeypatch.setattr(CpuPlatform, "gains_from_compiling", True)
    with caplog.at_level(logging.WARNING):
        driver = drive(Worker(worker_config(checkpoint("llama"), compile=None)))
    assert "there is no compiler" in caplog.text
    assert a_life(driver) == plain(checkpoint("llama"))


def test_code_that_does_not_run_is_found_at_the_start(checkpoint, monkeypatch):
    def for_two_tokens(module, inputs):
        def run(num_tokens, *arguments):
            if num_tokens == 1:
                raise KeyError("op15")
            return module.forward(num_tokens, *arguments)

        return run

    monkeypatch.setattr(piecewise, "compiled", for_two_tokens)
    with pytest.raises(OptionError, match=r"its code does not run \(KeyError: 'op15'\)"):
        in_pieces(checkpoint("llama"))


def test_a_target_whose_layers_a_draft_looks_into_is_not_compiled(checkpoint, tmp_path, uncompiled, monkeypatch):
    head = make_eagle3_head(tmp_path, checkpoint("llama"))
    with pytest.raises(ModelError, match=r"which compiled layers .* do not hand out"):
        started(checkpoint("llama"), "eagle", head, compile=True)
    monkeypatch.setattr(CpuPlatform, "gains_from_compiling", True)
    driver = started(checkpoint("llama"), "eagle", head, compile=None)
    assert not isinstance(driver.worker._model.forward, piecewise.PiecewiseForward)


def test_compiled_and_operator_by_operator_exclude_each_other(checkpoint):
    with pytest.raises(OptionError, match="compile and enforce_eager"):
        resolve(EngineOptions(model=str(checkpoint("llama")), device="cpu", compile=True, enforce_eager=True))


def model_of(work):
    """Whose forward pass is work(hidden, positions, attention)."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(16, 8)
            self.layer = Attention(2, 1, 4, 0.5, name="layer")

        def forward(self, input_ids, positions):
            return work(self.embedding(input_ids), positions, self.layer)

    return Model()


def attend(layer, x):
    return layer(x, x[:, :4].contiguous(), x[:, 4:].contiguous())


def added_in_place(x, positions, layer):
    y = attend(layer, x)
    x += y
    return x


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (added_in_place, "changes in place what was computed before attention"),
        (lambda x, positions, layer: attend(layer, x + positions.add_(1)[:, None]), "changes an input"),
        (lambda x, positions, layer: attend(layer, x) if x.sum() > 0 else x, "cannot be traced"),
        (lambda x, positions, layer: positions, "are not computed"),
    ],
    ids=["in place", "an input", "numbers", "nothing"],
)
def test_what_pieces_cannot_hold_is_refused(work, reason, uncompiled):
    with pytest.raises(CannotCompileError, match=reason):
        compile_model(model_of(work), 64, CPU, has_adapters=False)


def test_a_model_that_keeps_nothing_is_left_alone():
    with pytest.raises(CannotCompileError, match="keeps anything"):
        compile_model(torch.nn.Linear(2, 2), 64, CPU, has_adapters=False)
