"""benchmarks/rivals.py: engines that take turns, with engines that answer at once."""

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from quire.testing.model_harness import ModelHarness, worker_config
from quire.worker.model_loader import load_model

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
# An engine whose tokens take `pace` seconds each. It fails, or cannot, where the test says.
DRIVER = """
import sys, time
sys.path.insert(0, {drivers!r})
from protocol import NotSupportedError, Recorder, serve

def load(settings):
    options = settings["options"]
    if "broken" in options:
        raise RuntimeError("no such instruction")
    print("a library that talks")

    def generate(request):
        if len(request.prompts) > 1 and "alone" in options:
            raise NotSupportedError("several at once")
        if len(request.prompts[0]) > 40 and "dies" in options:
            raise SystemExit(3)
        recorder = Recorder(len(request.prompts))
        for number, length in enumerate(request.output_lengths):
            for _ in range(length):
                time.sleep(options["pace"])
                recorder.add(number, max(request.num_answers, request.beam_width, 1))
        return recorder

    return generate, {{"version": "1.0"}}

serve(load)
"""


@pytest.fixture
def rivals(monkeypatch):
    """The modules of the benchmark, found as a script finds its neighbours."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import rival_engines
    import rival_goals
    import rival_process
    import rival_report
    import rival_rounds
    import rival_workloads

    return SimpleNamespace(
        engines=rival_engines,
        goals=rival_goals,
        process=rival_process,
        report=rival_report,
        rounds=rival_rounds,
        workloads=rival_workloads,
    )


@pytest.fixture
def bench(rivals, tmp_path, monkeypatch):
    """`run(options of each engine)` measures fakes and returns what was written."""
    driver = tmp_path / "fake_driver.py"
    driver.write_text(DRIVER.format(drivers=str(BENCHMARKS / "rival_drivers")))
    monkeypatch.setattr(rivals.rounds, "_MIN_FREE_BYTES", 0)
    limits = {"threads": 2, "read_gb_s": 30.0, "bfloat16_gops": 400.0, "int8_gops": 800.0}
    monkeypatch.setattr(rivals.rounds, "measure_limits", lambda threads: SimpleNamespace(as_dict=lambda: limits))
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    sizes = rivals.workloads.Sizes.small(1000)

    def run(options, workloads=("W1", "W3"), budget=300.0):
        engine = rivals.engines.Engine
        engines = [engine(name, str(driver), {"bf16": "checkpoint"}) for name in options]
        results = rivals.rounds.Results.open(tmp_path / "results.json", {"sizes": {"prompt": 64}})
        settings = {"threads": 1, "priority": None, "options": options, "rounds": 2, "budget": budget}
        settings["start_limit"] = 60.0
        build = rivals.engines.Build(tmp_path / "build", checkpoint)
        pods = rivals.rounds.pods_of(engines, ["bf16"], workloads, 3)
        rivals.rounds.Run(build, results, sizes, **settings).run(pods)
        return json.loads((tmp_path / "results.json").read_text())

    return run


def test_engines_take_turns_and_are_compared_round_by_round(bench, rivals):
    before = psutil.Process().children()
    saved = bench({"quire": {"pace": 0.001}, "llama.cpp": {"pace": 0.01}})
    asked = [(unit["workload"], unit["round"]) for unit in saved["units"]]
    assert asked == [("W1", 0), ("W3", 0), ("W1", 1), ("W3", 1)]
    assert [next(iter(unit["figures"])) for unit in saved["units"]] == ["quire", "quire", "llama.cpp", "llama.cpp"]
    for key in ("W1", "W3", "W3w"):
        better = rivals.report.ratios(saved, "bf16", "llama.cpp", key)
        assert len(better) == 2
        assert min(better) > 2
    text = rivals.report.report(saved)
    assert "| llama.cpp |" in text
    assert "quire, bf16: 1.0, ready after" in text
    assert rivals.report.drawing(saved).startswith("<svg")
    assert psutil.Process().children() == before


def test_a_run_that_was_stopped_goes_on_where_it_was(bench):
    options = {"quire": {"pace": 0.0}, "vllm": {"pace": 0.0}}
    whole = bench(options, workloads=("W1",))
    assert bench(options, workloads=("W1",))["units"] == whole["units"]
    assert len(bench(options)["units"]) == len(whole["units"]) + 2


def test_what_cannot_be_done_is_noted_with_its_reason(bench):
    saved = bench({"quire": {"pace": 0.0}, "openvino": {"pace": 0.0, "alone": 1}, "vllm": {"broken": 1}})
    assert "openvino, bf16, W3: several at once" in saved["notes"]
    assert "vllm, bf16: RuntimeError: no such instruction" in saved["notes"]
    assert saved["units"][1]["figures"]["openvino"] == {}
    assert "W3" in saved["units"][1]["figures"]["quire"]


def test_an_engine_that_dies_does_not_stop_the_others(bench):
    saved = bench({"quire": {"pace": 0.0}, "vllm": {"pace": 0.0, "dies": 1}, "openvino": {"pace": 0.0}}, ("W1", "W3"))
    assert any(note.startswith("vllm, bf16: the process ended") for note in saved["notes"])
    assert all("W1" in unit["figures"]["openvino"] for unit in saved["units"] if unit["workload"] == "W1")


def test_what_does_not_fit_into_the_budget_is_left_out(bench, rivals, monkeypatch):
    monkeypatch.setitem(rivals.rounds._EXPECTED_OF, ("openvino", "W3"), 1e9)
    saved = bench({"quire": {"pace": 0.0}, "openvino": {"pace": 0.0}})
    assert {unit["workload"] for unit in saved["units"]} == {"W1"}
    assert any(note.startswith("openvino, bf16, W3: some rounds left out") for note in saved["notes"])


def _until(is_true, seconds=30.0):
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        os.sched_yield()


def test_paused_engines_stand_still(rivals, tmp_path):
    code = "import time\nwhile True:\n    time.sleep(0.001)"
    process = rivals.process.EngineProcess([sys.executable, "-c", code], {}, tmp_path / "log", None)
    try:
        process.pause()
        # the signal is sent, and arrives when the system comes to it
        _until(lambda: process._family()[0].status() == psutil.STATUS_STOPPED)
        process.go_on()
        _until(lambda: process._family()[0].status() != psutil.STATUS_STOPPED)
        with pytest.raises(rivals.process.EngineFailedError, match="no answer within 0 s"):
            process.ask({}, 0.05)
    finally:
        process._process.kill()
        process.end()


def test_the_model_is_made_once(rivals, tmp_path):
    from make_model import make_model
    from transformers import AutoTokenizer

    path = make_model(tmp_path / "model", num_layers=1, vocab_size=400)
    weights = path / "model.safetensors"
    made = weights.stat().st_mtime_ns
    assert weights.stat().st_size == pytest.approx(2 * (400 * 1024 + 15_730_000), rel=0.01)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert len(tokenizer) == 400
    assert tokenizer.decode(tokenizer("Grüße, you!").input_ids) == "Grüße, you!"
    assert make_model(path, num_layers=1, vocab_size=400) == path
    assert weights.stat().st_mtime_ns == made


def test_experts_are_the_same_in_both_files(rivals, tmp_path, monkeypatch):
    """What Quire reads and what llama.cpp does: logits of both files, by Quire."""
    pytest.importorskip("gguf")
    import expert_shape
    import make_model

    monkeypatch.syspath_prepend(str(BENCHMARKS / "rival_drivers"))
    import convert_gguf

    small = {"HIDDEN": 64, "INNER": 32, "TOP_K": 2, "VOCABULARY": 400, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 16}
    for name, value in small.items():
        monkeypatch.setattr(expert_shape, name, value)
    monkeypatch.setattr(make_model, "STD", 0.2)
    path = make_model.make_expert_model(tmp_path / "model", num_layers=2, num_experts=12)
    convert_gguf.write_bf16(path, tmp_path / "model.gguf")

    def logits(model):
        return ModelHarness(load_model(worker_config(model))).run(0, list(range(5, 40)))

    assert logits(tmp_path / "model.gguf").equal(logits(path))
    made = (path / "model-layer-001.safetensors").stat().st_mtime_ns
    assert make_model.make_expert_model(path, num_layers=2, num_experts=12) == path
    assert (path / "model-layer-001.safetensors").stat().st_mtime_ns == made


def test_the_table_of_goals(bench, rivals, tmp_path):
    from make_model import make_model

    bench({"quire": {"pace": 0.001}, "ik_llama.cpp": {"pace": 0.01}}, ("W1", "W2"))
    results = tmp_path / "results.json"
    saved = json.loads(results.read_text())
    checkpoint = make_model(tmp_path / "shape", num_layers=1, vocab_size=400)
    saved["settings"] |= {
        "weight_bytes": {"bf16": 1.2e6},
        "machine": "a machine",
        "date": "2026-01-02",
        "config": json.loads((checkpoint / "config.json").read_text()),
        "sizes": asdict(rivals.workloads.Sizes.small(400)),
    }
    results.write_text(json.dumps(saved))
    start = tmp_path / "start.json"
    one = {"median": 1.5, "q1": 1.4, "q3": 1.6}
    measures = dict.fromkeys(("further starts", "first start, from the disk", "import quire"), one)
    start.write_text(json.dumps({"workload": "W7", "model": "embedded", "measures": measures}))
    overhead = tmp_path / "overhead.txt"
    overhead.write_text("a table\n" + json.dumps({"steady_decode_us": {"256": 209.4}}))
    lines = rivals.goals.table(rivals.goals.Files.read([results, start, overhead])).splitlines()
    rows = {line.split(" | ")[0].strip("| "): line for line in lines[2:]}
    assert " of 30.0 GB/s" in rows["W1 bf16"]
    assert "2026-01-02 | a machine" in rows["W1 bf16"]
    assert float(rows["W2 bf16"].split(" of the limit")[0].split()[-1]) > 0
    assert "1.50 s (1.40 to 1.60)" in rows["W7 embedded"]
    assert "209 µs" in rows["W8 256 sequences"]
    assert rows["W9"].count("–") == 4
    [title] = [line for line in lines if "so many times better" in line]
    assert title.split(" | ")[1:] == ["ik_llama.cpp |"]
    times = float(rows["W1 one stream, bf16"].split(" | ")[1].split(" x ")[0])
    assert times > 2
    empty = rivals.goals.table(rivals.goals.Files([], {}))
    assert empty.count("\n") < len(lines)


def test_batches_of_llama_cpp_and_its_fork(rivals, monkeypatch):
    """Prompts in the order of arrival, a token for whoever has its prompt, copies of one."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "rival_drivers"))
    import llama_batches
    from protocol import NotSupportedError, Request

    class Library:
        """Says the sum of what it has seen of a sequence."""

        vocab_size = 97

        def __init__(self):
            self.kept = {}
            self.asked = []

        def decode(self, columns):
            self.asked.append(list(zip(columns.sequences, columns.positions, columns.tokens, strict=True)))
            self.sums = []
            for sequence, position, token in self.asked[-1]:
                tokens = self.kept.setdefault(sequence, [])
                assert len(tokens) == position
                tokens.append(token)
                self.sums.append(sum(tokens) % self.vocab_size)
            return True

        def logits(self, place):
            return np.eye(self.vocab_size, dtype=np.float32)[self.sums[place]]

        def clear(self):
            self.kept.clear()

        def remove(self, sequence):
            del self.kept[sequence]

        def copy(self, source, target):
            self.kept[target] = list(self.kept[source])

    library = Library()
    engine = llama_batches.Batches(library)
    recorder = engine.generate(Request({"prompts": [[1, 2, 3], [4]], "output_lengths": [3, 2]}))
    assert [sum(count for _, count in arrivals) for arrivals in recorder.arrivals] == [3, 2]
    assert library.asked == [
        [(1, 0, 4), (0, 0, 1), (0, 1, 2), (0, 2, 3)],
        [(0, 3, 6), (1, 1, 4)],
        [(0, 4, 12)],
    ]
    assert not library.kept
    recorder = engine.generate(Request({"prompts": [[1, 2]], "output_lengths": [4], "num_answers": 3}))
    assert sum(count for _, count in recorder.arrivals[0]) == 12
    with pytest.raises(NotSupportedError, match="no beam search"):
        engine.generate(Request({"prompts": [[1]], "output_lengths": [2], "beam_width": 2}))


def test_the_report_says_of_which_processor(bench, rivals):
    saved = bench({"quire": {"pace": 0.0}}, ("W1",))
    saved["settings"] |= {"machine": "a processor, 2 cores", "date": "2026-01-02"}
    assert rivals.report.report(saved).startswith("a processor, 2 cores; 2026-01-02.")


def test_a_source_is_compiled_once_and_where_it_is_told(rivals, tmp_path, monkeypatch):
    commands = []

    def run(self, name, command):
        commands.append(command)
        if "--target" in command:
            (tmp_path / "build" / name / "built" / "src").mkdir()
            (tmp_path / "build" / name / "built" / "src" / "libllama.so").touch()

    monkeypatch.setattr(rivals.engines.Build, "_run", run)
    [source] = rivals.engines.SOURCES
    engine = next(one for one in rivals.engines.ENGINES if one.name == source.name)
    build = rivals.engines.Build(tmp_path / "build", tmp_path / "model")
    assert not build.is_installed(engine)
    build.compile(source)
    assert build.is_installed(engine)
    assert [command[0] for command in commands] == ["git", "git", "git", "cmake", "cmake", "cc"]
    assert source.commit in commands[1]
    assert "-DGGML_NATIVE=ON" in commands[3]
    build.compile(source)
    assert len(commands) == 6
    assert build.variables(engine, 1)["IK_LLAMA_CPP"] == str(tmp_path / "build" / source.name)
    with pytest.raises(rivals.engines.AbsentError, match=r"llama\.cpp converts its models"):
        build.model(engine, "bf16")
