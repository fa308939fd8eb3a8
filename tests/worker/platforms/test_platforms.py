import ctypes
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quire.config.process_memory import give_back_freed, process_memory
from quire.errors import OptionError
from quire.worker.platforms import cpu, current_platform

GIB = 2**30


@pytest.fixture
def machine(tmp_path):
    """machine(files) -> a root directory with 64 GiB of memory, 40 of them available."""

    def make(files):
        meminfo = f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {40 * GIB // 1024} kB\n"
        for name, content in {"proc/meminfo": meminfo, **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(str(content))
        return tmp_path

    return make


def group(path, limit, used, files=0):
    return {
        f"sys/fs/cgroup/{path}memory.max": limit,
        f"sys/fs/cgroup/{path}memory.current": used,
        f"sys/fs/cgroup/{path}memory.stat": f"anon 1\ninactive_file {files // 2}\nactive_file {files // 2}\n",
    }


def test_without_a_container_the_machine_is_the_limit(machine):
    report = process_memory(machine({"proc/self/cgroup": "0::/user.slice\n", **group("user.slice/", "max", GIB)}))
    assert (report.total_bytes, report.free_bytes) == (64 * GIB, 40 * GIB)
    assert report.limit == "the machine's memory"


def test_a_container_limits_what_is_free(machine):
    report = process_memory(machine({"proc/self/cgroup": "0::/\n", **group("", 16 * GIB, 10 * GIB)}))
    assert (report.total_bytes, report.free_bytes) == (16 * GIB, 6 * GIB)
    assert report.limit == "the container's memory limit"


def test_pages_of_files_do_not_count_as_used(machine):
    report = process_memory(machine({"proc/self/cgroup": "0::/\n", **group("", 16 * GIB, 10 * GIB, files=4 * GIB)}))
    assert report.free_bytes == 10 * GIB


def test_the_narrowest_group_on_the_way_up_counts(machine):
    files = {**group("a/b/", 30 * GIB, GIB), **group("a/", 8 * GIB, 5 * GIB)}
    report = process_memory(machine({"proc/self/cgroup": "0::/a/b\n", **files}))
    assert (report.total_bytes, report.free_bytes) == (8 * GIB, 3 * GIB)


def test_other_processes_of_the_machine_count_as_well(machine):
    report = process_memory(machine({"proc/self/cgroup": "0::/\n", **group("", 60 * GIB, GIB)}))
    assert report.free_bytes == 40 * GIB


def test_the_first_version_of_control_groups_is_read(machine):
    top = "sys/fs/cgroup/memory/"
    files = {
        f"{top}docker/x/memory.limit_in_bytes": 4 * GIB,
        f"{top}docker/x/memory.usage_in_bytes": 3 * GIB,
        f"{top}docker/x/memory.stat": f"total_inactive_file {GIB}\n",
        f"{top}memory.limit_in_bytes": 9223372036854771712,
        f"{top}memory.usage_in_bytes": 50 * GIB,
    }
    report = process_memory(machine({"proc/self/cgroup": "9:cpu:/x\n4:cpuset,memory:/docker/x\n", **files}))
    assert (report.total_bytes, report.free_bytes) == (4 * GIB, 2 * GIB)


def test_a_container_that_is_over_its_limit_has_nothing_free(machine):
    report = process_memory(machine({"proc/self/cgroup": "0::/\n", **group("", 2 * GIB, 3 * GIB)}))
    assert report.free_bytes == 0


def test_what_the_process_itself_has_is_its_own_pages(machine):
    status = "VmRSS: 900 kB\nRssAnon: 300 kB\nRssFile: 500 kB\nRssShmem: 100 kB\n"
    report = process_memory(machine({"proc/self/cgroup": "0::/\n", "proc/self/status": status}))
    assert report.own_bytes == 400 * 1024
    # where nobody says, all that is taken
    assert replace(report, process_bytes=None).own_bytes == 24 * GIB


def test_a_peak_is_measured_even_if_it_has_passed():
    with current_platform("cpu").measure_peak() as peak:
        block = torch.ones(1 << 20)
        del block
        torch.ones(1 << 10)
    assert peak.peak_bytes == 4 << 20


def test_types_by_name():
    platform = current_platform("cpu")
    assert platform.dtype("bfloat16") is torch.bfloat16
    with pytest.raises(OptionError, match="dtype=int4: a CPU computes in float32, bfloat16, float16"):
        platform.dtype("int4")


def test_devices_that_are_not_there():
    with pytest.raises(OptionError, match="must be one of cpu, cuda, mps"):
        current_platform("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(OptionError, match="device=cuda"):
            current_platform("cuda")


def test_apples_gpus_are_refused_with_the_reason():
    with pytest.raises(OptionError, match=r"device=mps: .*float64.* Use device=cpu"):
        current_platform("mps")


@pytest.fixture
def amd(monkeypatch):
    """amd(architecture): torch is a build for ROCm, and finds this GPU."""

    def make(architecture):
        properties = SimpleNamespace(gcnArchName=f"{architecture}:sramecc+:xnack-")
        monkeypatch.setattr(torch.version, "hip", "7.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return current_platform("cuda")

    return make


def test_a_torch_for_rocm_has_amds_gpus_under_the_name_cuda(amd):
    platform = amd("gfx942")
    assert (platform.name, platform.device.type) == ("cuda", "cuda")
    assert torch.bfloat16 in platform.supported_dtypes
    assert platform.is_beyond_repair(RuntimeError("HIP error: an illegal memory access was encountered"))
    assert not platform.is_beyond_repair(RuntimeError("a shape does not fit"))


def test_float32_is_float32_in_convolutions(amd, monkeypatch):
    """Those of Whisper's encoder, say."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    amd("gfx942")
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32


def test_amds_gpus_without_kernels_are_refused(amd, monkeypatch):
    with pytest.raises(OptionError, match="a gfx1100, and Quire's kernels are built for gfx90a, gfx942, gfx950"):
        amd("gfx1100")
    monkeypatch.setenv("QUIRE_GPU_KERNELS", "reference")
    assert amd("gfx1100").name == "cuda"


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library than glibc")
def test_what_was_freed_between_what_lives_on_goes_back_to_the_system():
    parts = [b"x" * 100_000 for _ in range(600)]  # too small to be mapped each on its own
    kept = parts[::100]
    before = process_memory().own_bytes
    parts = []
    assert len(kept) == 6
    give_back_freed()
    assert process_memory().own_bytes < before - 40_000_000


def resident_code_of(name):
    lines = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
    starts = [i for i, line in enumerate(lines) if line.endswith(name) and " r-xp " in line]
    sizes = [next(line for line in lines[start:] if line.startswith("Rss:")) for start in starts]
    return sum(int(size.split()[1]) for size in sizes) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="another system's memory")
def test_what_a_large_library_has_read_once_is_let_go_and_read_again_when_it_runs():
    x = torch.arange(12.0).view(3, 4)
    product = x @ x.T
    before = resident_code_of("libtorch_cpu.so")
    give_back_freed()
    after = resident_code_of("libtorch_cpu.so")
    assert torch.equal(x @ x.T, product)
    assert after < 1_000_000 < before
    assert after < resident_code_of("libtorch_cpu.so")


def test_a_cpu_says_what_is_taken_without_what_was_freed(monkeypatch):
    calls = []
    monkeypatch.setattr(cpu, "give_back_freed", lambda: calls.append("given back"))
    monkeypatch.setattr(cpu, "process_memory", lambda: calls.append("read"))
    platform = cpu.CpuPlatform()
    platform.memory()
    assert calls == ["given back", "read"]
    platform.release_memory()
    assert calls[2:] == ["given back"]
