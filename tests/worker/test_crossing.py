"""Ranks on several machines: the operators do on memory of one rank what they do on memory that ranks share."""

import os
import subprocess
import sys

import pytest

from quire.worker import crossing

# three ranks in processes, which find each other through files of a folder
PROGRAM = """
import os, sys, threading, time
from pathlib import Path
import torch
from quire.worker import kernels
from quire.worker.crossing import CONNECTION_LOST, StageCrossing, SumCrossing
from quire.worker.kernels import reference

rank, size, folder, what = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]

class Files:
    def tell(self, key, value):
        (folder / f"{rank}.new").write_bytes(value)
        (folder / f"{rank}.new").rename(folder / key.replace("/", "_"))
    def hear(self, key):
        while not (folder / key.replace("/", "_")).exists():
            time.sleep(0.01)
        return (folder / key.replace("/", "_")).read_bytes()

# places of a few thousand numbers: some of what is brought goes in pieces
memory = torch.zeros(8192 + 2 * size * 12_288, dtype=torch.uint8)
crossing = SumCrossing(memory, list(range(size)), rank, Files(), "127.0.0.1")
kernels.relay_sums(crossing, memory, size)
link_memory = torch.zeros(8192 + 16 * 64 * size, dtype=torch.uint8)
stages = StageCrossing(link_memory, list(range(size)), rank, Files(), "127.0.0.1")
kernels.relay_links(stages, link_memory)

def brought(rank, turn):
    return torch.randn(1 + turn % 3, 700 * (1 + turn % 7), generator=torch.Generator().manual_seed(100 * turn + rank))

def sums():
    for turn in range(40):
        parts = [brought(other, turn) for other in range(size)]
        total = kernels.all_reduce(parts[rank], None, memory, rank, size, torch.float32)
        assert torch.equal(total, reference.sums.tree_sum(parts)), turn
        columns = [1000 * (other + 1) // size - 1000 * other // size for other in range(size)]
        shares = [part[:, :700][:, : columns[other]].contiguous() for other, part in enumerate(parts)]
        assert torch.equal(kernels.all_gather(shares[rank], memory, rank, size, 1000), torch.cat(shares, dim=1)), turn

def stages():
    for turn in range(60):
        if rank > 0:
            out = torch.empty_like(brought(0, turn))
            kernels.receive(out, link_memory, rank - 1, size - 1)
            assert torch.equal(out, brought(0, turn) + (rank - 1)), turn
        if rank < size - 1:
            kernels.send(brought(0, turn) + rank, link_memory, rank, size - 1)
    # nobody leaves before what it has sent was taken
    sums()

def lost():
    sums()
    if rank == 1:
        return
    kernels.all_reduce(torch.ones(4), None, memory, rank, size, torch.float32)
    assert int(memory[:4].view(torch.int32)) == CONNECTION_LOST, "nobody said that a rank was lost"

def aborted():
    sums()
    if rank == 1:
        memory[:4].view(torch.int32)[0] = 1
        return
    threading.Timer(0.5, lambda: memory[:4].view(torch.int32).fill_(1)).start()
    kernels.all_reduce(torch.ones(4), None, memory, rank, size, torch.float32)

{"sums": sums, "stages": stages, "lost": lost, "aborted": aborted}[what]()
print("done", flush=True)
os._exit(0)
"""


def run(folder, size, what, environment):
    children = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(size), str(folder), what],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        for rank in range(size)
    ]
    try:
        assert [child.communicate(timeout=120)[0] for child in children] == ["done\n"] * size
    finally:
        for child in children:
            child.kill()


@pytest.mark.parametrize(
    ("size", "what", "home"),
    [(3, "sums", "auto"), (2, "sums", "reference"), (3, "stages", "auto"), (2, "lost", "auto"), (2, "aborted", "auto")],
)
def test_ranks_that_share_no_memory(tmp_path, size, what, home):
    run(tmp_path, size, what, {"QUIRE_CPU_KERNELS": home})


class _DoneAtTheLastMoment:
    """A look at it ends in vain, and right behind that it is done."""

    def __init__(self, *, is_success: bool) -> None:
        self._is_success = is_success

    def wait(self, _: object) -> None:
        raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return self._is_success


def test_what_is_done_right_behind_a_look_has_not_failed():
    assert crossing._is_done(_DoneAtTheLastMoment(is_success=True))
    with pytest.raises(RuntimeError):
        crossing._is_done(_DoneAtTheLastMoment(is_success=False))
