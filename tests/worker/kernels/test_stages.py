"""Bytes from stage to stage, through memory that processes share."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from quire.engine_core.executor.shared_memory import SharedMeeting
from quire.worker import kernels
from quire.worker.kernels import reference

NUM_LINKS, NUM_SLOTS = 2, 16
# slots of 128 bytes: most tensors take several, and some more than there are
NUM_BYTES = 8192 + NUM_LINKS * NUM_SLOTS * 128

CHAIN = """
import sys
import torch
from quire.engine_core.executor.shared_memory import SharedMeeting
from quire.worker import kernels
from quire.worker.kernels import reference

stage, descriptor, num_bytes, home = *map(int, sys.argv[1:4]), sys.argv[4]
memory = torch.frombuffer(SharedMeeting(num_bytes, descriptor).memory, dtype=torch.uint8)
twin = reference if home == "reference" else kernels
for turn in range(60):
    size = (turn * 37) % 4000
    expected = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(turn))
    x = expected
    if stage > 0:
        x = torch.zeros(size, dtype=torch.uint8)
        twin.receive(x, memory, stage - 1, 2)
        assert torch.equal(x, expected), turn
    if stage < 2:
        twin.send(x, memory, stage, 2)
print("done")
"""


@pytest.mark.parametrize(
    "homes", [["kernels"] * 3, pytest.param(["reference"] * 3, marks=pytest.mark.nightly)], ids=["kernels", "reference"]
)
def test_three_stages_hand_on_what_they_get(homes):
    meeting = SharedMeeting(NUM_BYTES)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHAIN, str(stage), str(meeting.descriptor), str(NUM_BYTES), home],
            pass_fds=(meeting.descriptor,),
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for stage, home in enumerate(homes)
    ]
    try:
        assert [child.communicate(timeout=120)[0] for child in children] == ["done\n"] * 3
    finally:
        for child in children:
            child.kill()
        meeting.close_descriptor()


@pytest.fixture
def meeting():
    meeting = SharedMeeting(NUM_BYTES)
    yield meeting
    meeting.close_descriptor()


def memory_of(meeting):
    return torch.frombuffer(meeting.memory, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_a_tensor_of_any_type_comes_as_it_was(meeting, dtype):
    x = torch.randn(3, 8).mul(100).to(dtype).t()
    out = torch.empty(8, 3, dtype=dtype)
    kernels.send(x, memory_of(meeting), 1, NUM_LINKS)
    kernels.receive(out, memory_of(meeting), 1, NUM_LINKS)
    assert torch.equal(out, x)


@pytest.mark.parametrize("twin", [kernels, reference], ids=["kernels", "reference"])
def test_a_sender_is_ahead_by_as_much_as_there_are_slots(meeting, twin):
    memory = memory_of(meeting)
    twin.send(torch.ones(NUM_SLOTS * 128, dtype=torch.uint8), memory, 0, NUM_LINKS)
    assert not meeting.is_waiting(0, 3)
    assert not meeting.is_waiting(1, 3)
    sender = threading.Thread(target=twin.send, args=(torch.full((1,), 7, dtype=torch.uint8), memory, 0, NUM_LINKS))
    sender.start()
    sender.join(0.2)
    assert sender.is_alive()
    out = torch.zeros(NUM_SLOTS * 128, dtype=torch.uint8)
    twin.receive(out, memory, 0, NUM_LINKS)
    sender.join(10)
    assert not sender.is_alive()
    assert out.all()
    twin.receive(out[:1], memory, 0, NUM_LINKS)
    assert out[0] == 7


@pytest.mark.parametrize("is_sender", [True, False])
def test_who_waits_shows_it_and_leaves_at_once_when_it_is_aborted(product_kernels, meeting, is_sender):
    memory = memory_of(meeting)
    x = torch.ones(NUM_SLOTS * 128 + 1, dtype=torch.uint8)
    waiting = threading.Thread(target=kernels.send if is_sender else kernels.receive, args=(x, memory, 0, NUM_LINKS))
    waiting.start()
    stage = 0 if is_sender else 1
    while not meeting.is_waiting(stage, 3):
        waiting.join(0.01)
    assert not meeting.is_waiting(1 - stage, 3)
    meeting.abort()
    waiting.join(1)
    assert not waiting.is_alive()


def test_what_is_no_link_is_refused(product_kernels, meeting):
    memory = memory_of(meeting)
    with pytest.raises(RuntimeError, match="link 2 of 2"):
        product_kernels.send(torch.ones(4), memory, 2, NUM_LINKS)
    with pytest.raises(RuntimeError, match="slots for each link"):
        product_kernels.send(torch.ones(4), memory[:8192], 0, NUM_LINKS)
