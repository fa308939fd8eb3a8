"""What the kernels can be tuned to: the same bits whatever is chosen, and a tuner that chooses what is faster."""

import json
import logging
import os
import subprocess
import sys

import pytest
import torch

from quire.errors import OptionError
from quire.testing import kernel_contracts, linear_contracts
from quire.testing.attention_cases import AttentionCase
from quire.testing.linear_contracts import QuantizedCase
from quire.worker import kernels
from quire.worker.kernels import cpu
from quire.worker.kernels.cpu import library, tuning
from quire.worker.kernels.cpu.tuning import MOST_TRIES, Choice, Findings, LibraryKnobs, Tunable

# More than four panels, no whole number of panels or segments.
SHAPE = (150, 644)
WEIGHTS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": QuantizedCase(8, SHAPE),
    "int8 groups": QuantizedCase(8, SHAPE, 7, "each"),
    "int8 weight-only": QuantizedCase(8, SHAPE, is_weight_only=True),
    "int4": QuantizedCase(4, SHAPE, 23, "each", False),
    "fp4": QuantizedCase(4, SHAPE, 23),
    "int4 weight-only": QuantizedCase(4, SHAPE, 23, "fractions", False, is_weight_only=True),
    "int6": QuantizedCase(6, SHAPE, 23),
}
# So few that panels are walked side by side; tiles of the matrix unit and of vectors; several blocks.
ROWS = (1, 3, 5, 40, 200)
BATCHES = (
    AttentionCase(sequences=((1, 1100), (3, 700), (1, 5)), dtype=torch.bfloat16, num_heads=8, num_kv_heads=2),
    AttentionCase(sequences=((60, 640), (1, 1030)), dtype=torch.bfloat16, cache_dtype=torch.int8, head_dim=64),
    AttentionCase(sequences=((70, 640),)),
)


@pytest.fixture
def knobs():
    if not cpu.load():
        pytest.skip(f"no C++ kernels here: {cpu.statistics()['reason']}")
    found = LibraryKnobs(library.loaded())
    # one thread alone cuts no work
    cpu.set_crew(2)
    yield found
    cpu.set_crew(torch.get_num_threads())
    tuning.set_defaults(found)


def packed_weight(kind):
    if isinstance(kind, torch.dtype):
        return kernels.pack_weight(torch.randn(SHAPE, generator=torch.Generator().manual_seed(2)).to(kind))
    values, scales, offsets = kind.make()
    return kernels.pack_quantized(values, scales, offsets, bits=kind.bits, weight_only=kind.is_weight_only)


def products():
    """Of every kind of weight with every number of rows; of rows so long that a panel is cut; of experts."""
    results = []
    for kind in WEIGHTS.values():
        packed = packed_weight(kind)
        for dtype in {torch.bfloat16, kind if isinstance(kind, torch.dtype) else torch.bfloat16}:
            x = linear_contracts.inputs(max(ROWS), SHAPE[1], dtype)
            results += [kernels.packed_linear(x[-count:], packed, None, SHAPE[0]) for count in ROWS]
    long = kernels.pack_weight(torch.randn(40, 5001, generator=torch.Generator().manual_seed(1)).bfloat16())
    x = linear_contracts.inputs(300, 5001, torch.bfloat16)
    results += [kernels.packed_linear(x[-count:], long, None, 40) for count in (1, 7, 300)]
    experts = [packed_weight(WEIGHTS["int8"]), packed_weight(WEIGHTS["int8"])]
    ids = torch.tensor([[0], [1], [0]], dtype=torch.int32)
    x = linear_contracts.inputs(3, SHAPE[1], torch.bfloat16)
    results.append(torch.ops.quire.grouped_linear(x, ids, experts, [], SHAPE[0], None, 0))
    results.append(torch.ops.quire.sliced_linear(x, experts[0], None, SHAPE[0], 7, torch.bfloat16))
    return results


def attended():
    return [kernel_contracts.make_batch(case).attend(kernels) for case in BATCHES]


def assert_same_with_every_choice(knobs, names, compute):
    expected = compute()
    for tunable in knobs.tunables():
        if not tunable.name.startswith(names):
            continue
        for choice in tunable.choices[1:]:
            assert knobs.set(tunable.name, choice)
            assert all(map(torch.equal, compute(), expected)), f"{tunable.name}={choice}"
        assert knobs.set(tunable.name, tunable.choices[0])
    for last in (False, True):  # all others at once
        for tunable in knobs.tunables():
            knobs.set(tunable.name, tunable.choices[-1 if last else 1])
        assert all(map(torch.equal, compute(), expected))


PRODUCTS = ("fetch_bytes", "panels", "rows_to_fetch", "block_bytes", "words_at_once", "prepared_bytes", "pieces")


def test_products_have_the_same_bits_whatever_is_chosen(knobs, product_kernels):
    assert_same_with_every_choice(knobs, PRODUCTS, products)


def test_attention_has_the_same_bits_whatever_is_chosen(knobs, cpu_kernels):
    assert_same_with_every_choice(knobs, ("attention",), attended)


def test_every_tunable_belongs_to_a_test_and_to_a_probe(knobs):
    names = [tunable.name for tunable in knobs.tunables()]
    assert all(name.startswith((*PRODUCTS, "attention")) for name in names)
    assert set(names) == set(tuning.Probes().by_name())
    assert not knobs.set("panels.floats", 3)
    assert not knobs.set("panels.none", 1)


class Fakes:
    """Knobs, a clock, and work that takes as long as is said for a choice."""

    def __init__(self, seconds, noise=()):
        self.now, self.seconds, self.chosen, self.noise = 0.0, seconds, {}, list(noise)

    def tunables(self):
        return [Tunable(name, tuple(times)) for name, times in self.seconds.items()]

    def set(self, name, value):
        is_choice = value in self.seconds.get(name, ())
        if is_choice:
            self.chosen[name] = value
        return is_choice

    def clock(self):
        return self.now

    def probes(self):
        def work(name):
            def run():
                factor = self.noise.pop(0) if self.noise else 1.0
                self.now += self.seconds[name][self.chosen.get(name, next(iter(self.seconds[name])))] * factor

            return run

        return {name: lambda name=name: work(name) for name in self.seconds}

    def tune(self, seconds=3.0):
        return tuning.tune(self, self.probes(), self.clock, seconds)


def test_the_faster_one_is_taken_where_it_wins_clearly():
    fakes = Fakes({"a": {1: 0.01, 2: 0.009, 4: 0.008}, "b": {1: 0.01, 2: 0.0099}, "c": {8: 0.01, 4: 0.02}})
    chosen = fakes.tune()
    assert {name: choice.value for name, choice in chosen.items()} == {"a": 4, "b": 1, "c": 8}
    assert fakes.chosen == {"a": 4, "b": 1, "c": 8}
    assert chosen["a"].ratios[4] == (0.8, 0.8, 0.8)


def test_one_that_is_faster_in_half_of_the_rounds_is_not_taken():
    # the first call is not timed; then whoever comes second in a round takes half as long
    fakes = Fakes({"a": {1: 0.01, 2: 0.01}}, noise=[1.0, *[1.0, 0.5] * 30])
    assert fakes.tune()["a"].value == 1


def test_nothing_is_chosen_while_other_work_decides_how_long_it_takes():
    # the first call is not timed; in every second pair of rounds each call takes three times as long
    fakes = Fakes({"a": {1: 0.01, 2: 0.008}}, noise=[1.0, *[*[1.0] * 4, *[3.0] * 4] * 30])
    assert fakes.tune() == {"a": Choice(1, {})}


def test_what_takes_too_long_keeps_its_default():
    fakes = Fakes({"slow": {1: 1.0, 2: 0.1}, "quick": {1: 0.01, 2: 0.008}})
    chosen = fakes.tune(seconds=3.0)
    assert chosen["slow"] == Choice(1, {})
    assert chosen["quick"].value == 2
    assert fakes.now <= 3.0 + 1.0  # and the last round


def test_nothing_begins_after_the_end():
    fakes = Fakes({name: {1: 5.0, 2: 1.0} for name in "abcd"})
    assert list(fakes.tune(seconds=3.0)) == ["a"]
    assert fakes.now == 5.0


@pytest.fixture
def fakes(monkeypatch):
    made = Fakes({"a": {1: 0.01, 2: 0.008}})
    monkeypatch.setattr(tuning.time, "perf_counter", made.clock)
    return made


def apply(knobs, file, probes, **options):
    return tuning.apply(knobs, file, probes, num_threads=2, **options)


def file_with(choices, tries=1):
    """As a start leaves it that has measured so much."""
    times = {name: {"2": [0.8, 0.8, 0.8]} for name in choices}
    return json.dumps({"tries": tries, "choices": choices, "time_by_default_median_and_quartiles": times})


def test_what_was_chosen_is_found_again(fakes, tmp_path, caplog):
    file = tmp_path / "new" / "tuning-1.json"
    with caplog.at_level(logging.WARNING, "quire"):
        assert apply(fakes, file, fakes.probes) == "a=2"
    assert "tuned after" in caplog.text
    content = json.loads(file.read_text())
    assert (content["choices"], content["threads"], content["tries"]) == ({"a": 2}, 2, 1)
    assert not list(file.parent.glob("*.part"))
    fakes.chosen.clear()
    caplog.clear()
    assert apply(fakes, file, pytest.fail) == "a=2"
    assert fakes.chosen == {"a": 2}
    assert not caplog.records


WRONG = (
    file_with({"a": 3}),
    file_with({"b": 2}),
    file_with({"a": True}),
    file_with({"a": 2}, tries=float("inf")),
    '{"choices": {"a": 2}}',
    "[" * 100_000,
    file_with({"a": 2}) + " " * (2 << 20),
)


@pytest.mark.parametrize("text", ["", "[]", "{}", *WRONG])
def test_a_file_that_does_not_fit_is_not_used(fakes, tmp_path, caplog, text):
    file = tmp_path / "tuning-1.json"
    file.write_text(text)
    with caplog.at_level(logging.WARNING, "quire"):
        assert tuning.read(file, fakes) == Findings()
    assert len(caplog.records) == 1
    assert fakes.chosen == {"a": 1}
    assert apply(fakes, file, fakes.probes) == "a=2"
    assert tuning.read(file, fakes).choices["a"].value == 2


def test_a_name_that_the_library_would_cut_short_is_none(knobs, tmp_path):
    file = tmp_path / "tuning-1.json"
    tunable = knobs.tunables()[0]
    for name, value in ((f"{tunable.name}\0x", tunable.choices[1]), (tunable.name, 2**64 + tunable.choices[1])):
        file.write_text(file_with({name: value}))
        assert tuning.read(file, knobs) == Findings()


def test_nobody_waits_for_what_cannot_be_kept(fakes, tmp_path, caplog, monkeypatch):
    taken = tmp_path / "tuning-1.json"
    taken.mkdir()
    assert apply(fakes, taken, lambda: {"a": pytest.fail}) == "defaults"
    assert "not tuned to this processor at this start" in caplog.text

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tuning.Path, "replace", fail)
    assert apply(fakes, tmp_path / "tuning-2.json", lambda: {"a": pytest.fail}) == "defaults"
    assert "not tuned to this processor at this start: [Errno 28] No space left on device" in caplog.text
    assert not list(tmp_path.glob("*.part"))


def test_a_disk_that_is_full_in_the_end_keeps_what_was_measured_for_this_start(fakes, tmp_path, caplog, monkeypatch):
    write = tuning.write

    def write_few(file, findings, facts):
        if findings.choices:
            raise OSError(28, "No space left on device")
        write(file, findings, facts)

    monkeypatch.setattr(tuning, "write", write_few)
    assert apply(fakes, tmp_path / "tuning-1.json", fakes.probes) == "a=2"
    assert fakes.chosen == {"a": 2}
    assert "serves this start alone: [Errno 28] No space left on device" in caplog.text


def test_starts_that_are_ended_while_they_measure_are_counted(fakes, tmp_path):
    file = tmp_path / "tuning-1.json"

    def end():
        raise SystemExit

    for _ in range(MOST_TRIES):
        with pytest.raises(SystemExit):
            apply(fakes, file, lambda: {"a": end})
    assert apply(fakes, file, pytest.fail) == "defaults"


def test_what_a_busy_start_had_no_time_for_is_measured_by_the_next(tmp_path, monkeypatch, caplog):
    seconds = {"a": {1: 0.01, 2: 0.008}, "b": {1: 1.0, 2: 0.5}}
    busy = Fakes(seconds)
    monkeypatch.setattr(tuning.time, "perf_counter", busy.clock)
    file = tmp_path / "tuning-1.json"
    assert apply(busy, file, busy.probes) == "a=2"
    assert "1 of 2 numbers measured, the rest at the next start" in caplog.text

    quiet = Fakes({**seconds, "b": {1: 0.01, 2: 0.005}})
    monkeypatch.setattr(tuning.time, "perf_counter", quiet.clock)
    probes = {"a": pytest.fail, "b": quiet.probes()["b"]}
    assert apply(quiet, file, lambda: probes) == "a=2 b=2"
    assert quiet.chosen == {"a": 2, "b": 2}
    assert apply(quiet, file, pytest.fail) == "a=2 b=2"


def test_a_machine_that_is_always_busy_is_left_alone(tmp_path, monkeypatch, caplog):
    fakes = Fakes({"a": {1: 5.0, 2: 1.0}})
    monkeypatch.setattr(tuning.time, "perf_counter", fakes.clock)
    file = tmp_path / "tuning-1.json"
    for start in range(MOST_TRIES):
        caplog.clear()
        assert apply(fakes, file, fakes.probes) == "defaults"
        assert ("the rest at the next start" in caplog.text) == (start < MOST_TRIES - 1)
    assert apply(fakes, file, pytest.fail) == "defaults"


def test_while_another_process_measures_what_is_known_serves(fakes, tmp_path, caplog):
    file = tmp_path / "tuning-1.json"
    with file.with_suffix(".lock").open("w") as lock:
        tuning.fcntl.flock(lock, tuning.fcntl.LOCK_EX)
        assert apply(fakes, file, pytest.fail) == "defaults"
        assert "another process measures now" in caplog.text
        assert fakes.chosen == {"a": 1}
        assert not file.exists()
        both = Fakes({"a": {1: 0.01, 2: 0.008}, "b": {1: 1.0, 2: 0.5}})
        file.write_text(file_with({"a": 2}))
        assert apply(both, file, pytest.fail) == "a=2"
    assert both.chosen == {"a": 2, "b": 1}


@pytest.mark.parametrize("error", [MemoryError("no memory"), RuntimeError("no memory either"), OSError("no space")])
def test_what_cannot_be_measured_fails_no_start(fakes, tmp_path, caplog, error):
    def fail():
        fakes.set("a", 2)
        raise error

    file = tmp_path / "tuning-1.json"
    assert apply(fakes, file, lambda: {"a": lambda: fail}) == "defaults"
    assert f"not tuned to this processor at this start: {error}" in caplog.text
    assert fakes.chosen == {"a": 1}
    assert tuning.read(file, fakes) == Findings({}, 1)


def test_who_has_no_home_gets_the_defaults(knobs, monkeypatch, caplog):
    for name in ("QUIRE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(library, "_tuning", "")
    library._tune("auto", may_measure=True)
    assert "this user has no home" in caplog.text
    assert cpu.statistics()["tuning"] == "defaults"


def test_it_can_be_repeated(fakes, tmp_path):
    file = tmp_path / "tuning-1.json"
    file.write_text(file_with({"a": 1}, tries=MOST_TRIES))
    assert apply(fakes, file, pytest.fail) == "defaults"
    assert apply(fakes, file, fakes.probes, is_again=True) == "a=2"
    assert tuning.read(file, fakes).num_tries == 1


def test_a_switch_that_there_is_not(monkeypatch):
    monkeypatch.setattr(library, "_is_decided", False)
    monkeypatch.setenv("QUIRE_CPU_TUNING", "maybe")
    with pytest.raises(OptionError, match="QUIRE_CPU_TUNING=maybe: must be auto, again or off"):
        cpu.load()


def test_another_processor_or_number_of_threads_has_another_file(monkeypatch, tmp_path):
    here = tuning.file_of(tmp_path / "kernels-1.so", "avx2", 2)
    assert here == tuning.file_of(tmp_path / "kernels-1.so", "avx2", 2)
    assert here != tuning.file_of(tmp_path / "kernels-2.so", "avx2", 2)
    assert here != tuning.file_of(tmp_path / "kernels-1.so", "neon", 2)
    assert here != tuning.file_of(tmp_path / "kernels-1.so", "avx2", 1)
    monkeypatch.setattr(tuning, "processor", lambda: "another one")
    assert here != tuning.file_of(tmp_path / "kernels-1.so", "avx2", 2)


def test_a_process_tunes_until_all_is_measured(knobs, tmp_path):
    """In processes of their own, with the real kernels and little time."""
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache" / os.path.basename(cpu.statistics()["path"])).symlink_to(cpu.statistics()["path"])
    program = """
import logging
import os
logging.basicConfig(level=logging.WARNING)
from quire.worker.kernels import cpu
from quire.worker.kernels.cpu import tuning
tuning.SECONDS = 0.5
assert cpu.load()
files = sorted(os.listdir(os.environ["QUIRE_CACHE_DIR"]))
# a model that caches hold is spared it
cpu.measure(tuning.WEIGHT_BYTES - 1)
assert sorted(os.listdir(os.environ["QUIRE_CACHE_DIR"])) == files
cpu.measure(tuning.WEIGHT_BYTES)
print(cpu.statistics()["tuning"])
"""
    environment = {
        **os.environ,
        "QUIRE_CPU_TUNING": "auto",
        "QUIRE_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    runs = [
        subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
        for _ in range(MOST_TRIES + 1)
    ]
    assert "tuned after" in runs[0].stderr
    assert runs[-1].stderr == ""
    assert runs[-1].stdout == runs[-2].stdout != ""
