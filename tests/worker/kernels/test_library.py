"""Building, loading and choosing: the parts around the kernels."""

import inspect
import logging
import os
import re
import shutil
import stat
import subprocess
import sys

import pytest
import torch

from quire.errors import OptionError
from quire.worker import kernels
from quire.worker.kernels import cpu, operators, reference
from quire.worker.kernels.cpu import build, library

NORM = (torch.randn(3, 32), torch.randn(32), 1e-6)


@pytest.fixture
def undecided(monkeypatch):
    """A process that has not looked for the library yet. (What is registered with torch stays so.)"""
    for name, value in (("_is_decided", False), ("_library", None), ("_path", None), ("_reason", "")):
        monkeypatch.setattr(library, name, value)


def test_no_compiler_falls_back_and_says_why(undecided, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("CXX", "a-compiler-that-does-not-exist")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "auto")
    with caplog.at_level(logging.WARNING, "quire"):
        assert not cpu.load()
        assert not cpu.load()
    assert len(caplog.records) == 1
    assert "no C++ compiler" in caplog.text
    assert cpu.statistics()["kernels"] == "reference"


def test_a_library_that_came_in_the_wheel_needs_no_compiler(monkeypatch, tmp_path):
    source = tmp_path / "source.cpp"
    source.write_text("int one() { return 1; }\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setenv("CXX", "a-compiler-that-does-not-exist")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    library = build._prebuilt_path()
    library.parent.mkdir()
    library.touch()
    assert build.build() == library
    # what somebody changed since is not what was compiled
    source.write_text("int one() { return 2; }\n")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.build()


def test_the_library_runs_where_torch_does():
    """With glibc 2.28 and the libstdc++ of GCC 8, whatever this machine has: a wheel brings it along."""
    if not cpu.load():
        pytest.skip(f"no C++ kernels here: {cpu.statistics()['reason']}")
    text = build.build().read_bytes()
    assert max(int(number) for number in re.findall(rb"\0GLIBC_2\.(\d+)", text)) <= 28
    assert max(int(number) for number in re.findall(rb"\0GLIBCXX_3\.4\.(\d+)", text)) <= 25


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no compiler")
def test_source_that_does_not_compile_falls_back(undecided, monkeypatch, tmp_path, caplog):
    (tmp_path / "src").mkdir()
    for name in (*build.PER_ISA, *build.X86.only["amx"], *build.X86.common):
        (tmp_path / "src" / name).write_text("this is no C++;\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "src")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "auto")
    assert not cpu.load()
    assert "error:" in caplog.text
    assert not list((tmp_path / "cache").glob("*.so"))
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700


def test_only_the_last_used_libraries_and_objects_stay(tmp_path):
    (tmp_path / "objects").mkdir()
    for number in range(300):
        names = (f"kernels-{number}.so", f"kernels-{number}.lock", f"objects/matmul-{number}.o")
        for path in map(tmp_path.joinpath, names):
            path.touch()
            os.utime(path, (1000 + number, 1000 + number))
    (tmp_path / "packed").mkdir()
    build._forget(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("kernels-*.so")) == [f"kernels-{n}.so" for n in range(292, 300)]
    assert len(list(tmp_path.glob("*.lock"))) == 8
    assert len(list((tmp_path / "objects").iterdir())) == 256
    assert (tmp_path / "packed").is_dir()


def test_who_waits_for_the_compiler_is_told_so_before_and_after(monkeypatch, tmp_path, caplog):
    lines_before: list[str] = []

    def compile_nothing(compiler, folder, architecture, libraries):
        assert not list(folder.iterdir())
        lines_before.extend(caplog.messages)
        (folder / "kernels.so").touch()
        return folder / "kernels.so"

    monkeypatch.setattr(build, "_compiler", lambda: sys.executable)
    monkeypatch.setattr(build, "_compile", compile_nothing)
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    left = build.library_path().with_suffix(".build") / "cut.o"
    left.parent.mkdir(parents=True)
    left.parent.parent.chmod(0o700)
    left.touch()
    with caplog.at_level(logging.WARNING, "quire"):
        assert build.build().parent == tmp_path / "cache"
        assert len(lines_before) == 1
        assert "a minute or two" in lines_before[0]
        assert re.search(r"compiled after \d+\.\d s", caplog.messages[1])
        build.build()
    assert not list((tmp_path / "cache").glob("*.build*")), "nothing is left, also of one that was killed before"
    # who finds them waits for nothing
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_cache_that_others_can_write_is_not_trusted(monkeypatch, tmp_path, mode):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_compiler", lambda: sys.executable)
    with pytest.raises(build.BuildError, match="chmod 700"):
        build.build()


def test_jit_raises_what_auto_logs(undecided, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "a-compiler-that-does-not-exist")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "jit")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        cpu.load()


def test_unknown_choice_is_an_error(undecided, monkeypatch):
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "fast")
    with pytest.raises(ValueError, match="auto, jit, reference or triton"):
        cpu.load()


@pytest.mark.skipif(not cpu.load(), reason="there is no library to choose from")
def test_an_instruction_set_that_is_not_there_is_an_error():
    """In a process of its own: the choice is made once."""
    script = "from quire.worker.kernels import cpu; cpu.load()"
    environment = {**os.environ, "QUIRE_CPU_ISA": "sse9", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "QUIRE_CPU_ISA=sse9: there is no such instruction set" in done.stderr


def test_why_amx_cannot_be_used_is_said(undecided, monkeypatch):
    if not cpu.load() or cpu.select_isa("amx"):
        pytest.skip("no kernels to choose from, or it can be used here")
    monkeypatch.setattr(library, "_is_decided", False)
    monkeypatch.setenv("QUIRE_CPU_ISA", "amx")
    with pytest.raises(OptionError, match=r"QUIRE_CPU_ISA=amx: .*does not (have|know|permit) it"):
        cpu.load()


def test_threads_that_were_named_before_the_library_was_there_are_kept(undecided, monkeypatch):
    """A worker says its threads, and on which processors, before the first kernel is called."""
    monkeypatch.setattr(library, "_crew", None)
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "auto")
    said = []

    class Library:
        quire_isa = quire_record_begin = quire_record_end = quire_program_drop = staticmethod(lambda: b"avx2")
        quire_program_size = quire_program_run = quire_program_can_narrow = staticmethod(lambda: None)
        quire_record_input = quire_decode = staticmethod(lambda: None)
        quire_set_crew = staticmethod(lambda size, processors: said.append((size, list(processors))))

    monkeypatch.setattr(build, "build", lambda: "x.so")
    monkeypatch.setattr(library.ctypes, "CDLL", lambda path: Library)
    cpu.set_crew(2, (3, 1))
    assert cpu.load()
    assert said == [(2, [3, 1])]


def test_a_changed_source_has_another_name(monkeypatch, tmp_path):
    for source in build.SOURCES.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    compiler = sys.executable  # anything that knows --version
    before = build._key(compiler)
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build._key(compiler) == before
    (tmp_path / "simd.h").write_text("// changed")
    assert build._key(compiler) != before


def test_objects_of_an_instruction_set_share_nothing(tmp_path):
    """A weak symbol compiled for AVX-512 could become the copy that a lesser processor runs."""
    try:
        compiler = build._compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    target = tmp_path / "fused.o"
    command = [*build.FLAGS, *build.X86.isas["avx512"], "-DQUIRE_ISA=avx512", "-c", str(build.SOURCES / "fused.cpp")]
    subprocess.run([compiler, *command, "-o", str(target)], check=True)
    symbols = subprocess.run(["nm", "-C", "--defined-only", str(target)], check=True, capture_output=True, text=True)
    kinds = {line.split()[1] for line in symbols.stdout.splitlines()}
    assert not kinds & set("WVu")
    assert "quire::avx512::table" in symbols.stdout


def test_reference_can_be_asked_for():
    """In a process of its own: the library cannot be taken back once it is loaded."""
    script = """
import sys, torch
from quire.errors import OptionError
from quire.worker import kernels
from quire.worker.kernels import cpu, reference
x = torch.randn(3, 32)
assert torch.equal(kernels.rms_norm(x, x[0], 1e-6), reference.rms_norm(x, x[0], 1e-6))
assert cpu.statistics() == {"kernels": "reference", "reason": "QUIRE_CPU_KERNELS=reference"}, cpu.statistics()
"""
    environment = {**os.environ, "QUIRE_CPU_KERNELS": "reference", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


def test_torch_compile_sees_one_operator(cpu_kernels):
    seen = []

    def backend(graph, _example_inputs):
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    @torch.compile(fullgraph=True, backend=backend)
    def layer(x, weight, cache, slots):
        normed, total = kernels.add_rms_norm(x, x, weight, 1e-6)
        kernels.write_kv(normed[:, None], total[:, None], cache[0], cache[1], slots)
        return kernels.silu_and_mul(normed)

    cache = torch.zeros(2, 4, 1, 8, 32)
    x, weight, eps = NORM
    out = layer(x, weight, cache, torch.tensor([0, 9, -1]))
    normed, total = reference.add_rms_norm(x, x, weight, eps)
    torch.testing.assert_close(out, reference.silu_and_mul(normed))
    torch.testing.assert_close(cache[1, 1, 0, 1], total[1])
    names = {str(target) for target in seen}
    assert {"quire.add_rms_norm.default", "quire.write_kv.default", "quire.silu_and_mul.default"} <= names


def test_wrong_arguments_are_refused(cpu_kernels):
    cache = torch.zeros(2, 1, 8, 32)
    key = torch.zeros(1, 1, 32)
    with pytest.raises(RuntimeError, match="slot 16 is beyond the cache of 16"):
        kernels.write_kv(key, key, cache, cache, torch.tensor([16]))
    with pytest.raises(RuntimeError, match="dtype must be"):
        kernels.write_kv(key.int(), key, cache, cache, torch.tensor([1]))
    with pytest.raises(RuntimeError, match="same head dimension"):
        kernels.write_kv(key, key[..., :16], cache, cache, torch.tensor([1]))
    with pytest.raises(RuntimeError, match="block 2 is not in a cache of 2"):
        kernels.copy_blocks([cache], torch.tensor([[0, 2]]))
    with pytest.raises(RuntimeError, match="block 2 is not in a cache of 2"):
        kernels.move_blocks([torch.zeros(3, 1, 8, 32)], [cache], torch.tensor([[2, 2]]))
    with pytest.raises(RuntimeError, match="block -1 is not in a cache of 2"):
        kernels.move_blocks([cache], [cache.clone()], torch.tensor([[-1, 0]]))
    with pytest.raises(RuntimeError, match="must have the same blocks"):
        kernels.move_blocks([cache], [torch.zeros(2, 1, 8, 16)], torch.tensor([[0, 0]]))
    with pytest.raises(RuntimeError, match="one destination for each source"):
        kernels.move_blocks([cache], [], torch.tensor([[0, 0]]))
    with pytest.raises(RuntimeError, match="position 7 is beyond the table of 7"):
        kernels.rotary_embedding(torch.tensor([7]), key, key, torch.zeros(7, 32))
    tables, starts = torch.zeros(1, 2, dtype=torch.int32), torch.tensor([0, 1])
    with pytest.raises(RuntimeError, match="longer than its 16 slots"):
        kernels.paged_attention(key, cache, cache, tables, torch.tensor([17]), starts, key.clone(), scale=1.0)


def test_operators_may_be_called_as_their_specifications():
    """By which they are typed: as many arguments, of which the same may be left out."""
    for name in operators._SCHEMAS:
        arguments = getattr(operators, name)._schema.arguments
        parameters = inspect.signature(getattr(reference, name)).parameters.values()
        missing = inspect.Parameter.empty
        assert [argument.default_value if argument.has_default_value() else missing for argument in arguments] == [
            parameter.default for parameter in parameters
        ], name


def test_a_part_of_attention_has_the_width_of_values_beside_slopes_too():
    with torch._subclasses.FakeTensorMode():
        query, cache = torch.empty(3, 2, 16), torch.empty(4, 1, 8, 16)
        tables, lengths, starts = (torch.empty(size, dtype=torch.int32) for size in ((1, 4), (1,), (2,)))
        given = query, cache, cache, tables, lengths, starts
        for more in ({}, {"slopes_H": torch.empty(2)}, {"bias_HR": torch.empty(2, 9)}):
            part = kernels.attention_part(*given, scale=0.25, value_dim=12, rank=0, size=2, **more)
            assert part.shape == (3, 2, 13)
