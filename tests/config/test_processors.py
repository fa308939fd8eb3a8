"""How many threads a machine, a cpuset or a container is worth."""

import os

import pytest

from quire.config.processors import Processors, keep_near, processors


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two nodes of two cores of two hardware threads each: core c has threads c and c + 4."""

    def make(allowed=range(8), cgroup="", files=None):
        for cpu in range(8):
            folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
        for node, cpus in enumerate(("1,3,5,7", "0,2,4,6")):
            folder = tmp_path / f"sys/devices/system/node/node{node}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "cpulist").write_text(cpus + "\n")
        (tmp_path / "proc/self").mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc/self/cgroup").write_text(cgroup)
        for name, text in (files or {}).items():
            file = tmp_path / "sys/fs/cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed))
        return processors(tmp_path)

    return make


def test_one_thread_a_core_node_by_node(machine):
    found = machine()
    assert found == Processors(cores=(1, 3, 0, 2), quota=None, num_nodes=2)
    assert found.num_threads == 4
    assert found.pinned(4) == (1, 3, 0, 2)
    assert found.pinned(3) is None
    assert "2 memory nodes" in found.reason


def test_a_cpuset_may_grant_the_second_thread_of_a_core(machine):
    assert machine(allowed=(5, 6)).cores == (5, 6)
    assert machine(allowed=(2, 6)).cores == (2,)


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/a/b\n", {"a/cpu.max": "250000 100000\n", "a/b/cpu.max": "max 100000\n"}),
        ("0::/\n", {"cpu.max": "250000 100000\n"}),
        ("4:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "250000", "cpu/a/cpu.cfs_period_us": "100000"}),
    ],
)
def test_a_quota_of_the_container_counts(machine, cgroup, files):
    found = machine(cgroup=cgroup, files=files)
    assert found.quota == 2.5
    assert found.num_threads == 2
    assert found.pinned(2) is None
    assert found.reason == "the container grants the time of 2.5 of 4 cores"


def test_a_quota_without_limit_is_none(machine):
    files = {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}
    assert machine(cgroup="4:cpu:/\n", files=files).quota is None
    assert machine(cgroup="0::/\n", files={"cpu.max": "1000 100000\n"}).num_threads == 1


def test_this_machine_has_at_least_one():
    assert processors().num_threads >= 1


@pytest.fixture
def kept(monkeypatch):
    """What threads were told to keep to."""
    told = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: told.append(sorted(cpus)))
    return told


def test_each_rank_keeps_to_the_node_of_its_processors(machine, kept, tmp_path):
    pinned = machine().pinned(4)
    for rank in range(2):
        keep_near(pinned[2 * rank : 2 * rank + 2], tmp_path)
    assert kept == [[1, 3, 5, 7], [0, 2, 4, 6]]


def test_what_was_forbidden_stays_so(machine, kept, tmp_path):
    machine(allowed=(1, 3, 5, 0))
    keep_near((1, 3), tmp_path)
    # the core, which has started this rank, keeps to its own node already
    machine(allowed=(1, 3, 5, 7))
    keep_near((0, 2), tmp_path)
    assert kept == [[1, 3, 5], [0, 2]]


def test_nothing_changes_for_who_has_all_nodes_and_on_one_node(machine, kept, tmp_path):
    keep_near(machine().cores, tmp_path)
    machine(allowed=(0, 2, 4, 6))
    keep_near((0,), tmp_path)
    keep_near((0, 1), tmp_path / "no such machine")
    assert kept == []


def test_a_refusal_is_no_error(machine, monkeypatch, tmp_path):
    def refuse(pid, cpus):
        raise PermissionError("no")

    machine()
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    keep_near((1,), tmp_path)
