"""A rank or a stage is killed or stopped, at any moment: who waits has one error at once, nobody a wrong token, and the
group starts again without a trace of the old one."""

import os
import signal
import time
from contextlib import contextmanager

import pytest
from tests.support.rank_processes import ancestors, is_there, ranks_of
from tests.support.server_process import ServerProcess
from tests.support.streams import Client, ServedTime, answers, is_ready, until

from quire.testing.tiny_checkpoints import make_checkpoint

SLOW = "{}:slow:1:0:seconds={}"
STEP = 0.25  # seconds that a step takes, in whatever part of it the signal is to come
# where it comes, and what makes that moment long enough to be met
WITH_WORK = {
    "prefill": SLOW.format("in_forward", STEP),
    "forward": SLOW.format("in_forward", STEP),
    "a sum": SLOW.format("rank_step", STEP),
    "sampling": SLOW.format("before_sample", STEP),
    "deciding": SLOW.format("before_schedule", STEP),
    "sending": SLOW.format("before_execute", STEP),
}
AT_START = {"load": "", "measure": SLOW.format("start_measure", 1.0), "allocate": SLOW.format("start_allocate", 1.0)}
SIGNALS = [signal.SIGKILL, signal.SIGSTOP]
# an answer is due so long after the signal, or where it only stops a rank after the step in flight would have ended
LIMIT = 2.0
PROMPTS = [[3, 4, 5], list(range(20, 50)), [7] * 12]
RANKS, STAGES = "--tensor-parallel-size", "--pipeline-parallel-size"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("losses"), "qwen3")


@contextmanager
def serving(model, fault, division=RANKS):
    """A server with two ranks, or stages; afterwards nothing of it is left."""
    command = [
        "-m", "quire", "serve", str(model), "--port", "0", division, "2", "--num-threads", "1",
        "--kv-cache-memory-bytes", str(16 << 20), "--device", "cpu",
    ]  # fmt: skip
    shared = set(os.listdir("/dev/shm"))
    with ServerProcess(command, {"OMP_NUM_THREADS": "1", "QUIRE_FAIL": fault}) as server:
        server.wait_ready()
        yield server
        left = processes(server)
    until(lambda: not any(map(is_there, left)), 5.0, "a process outlived its server")
    assert set(os.listdir("/dev/shm")) <= shared


def processes(server):
    """Rank 0, which is the core, and the others."""
    others = ranks_of(server.pid)
    return [next(ancestors(others[0])), *others] if others else []


def check_serves_again(server, url, before, expected):
    """A new group, whose answers are those of the old one."""
    until(lambda: is_ready(url), 60.0, "the engine was not started anew")
    now = processes(server)
    assert len(now) == 2
    assert not set(now) & set(before)
    until(lambda: not any(map(is_there, before)), 5.0, "a process outlived its engine")
    assert answers(url, PROMPTS) == expected


def lose_at_work(model, moment, rank, number, division=RANKS):
    with serving(model, WITH_WORK[moment], division) as server:
        url = server.wait_ready()
        expected = answers(url, PROMPTS)
        before = processes(server)
        clients = [Client(url, prompt) for prompt in PROMPTS]
        if moment != "prefill":
            until(lambda: all(client.said for client in clients), 60.0, "no token came")
        concerned = [os.getpid(), server.pid, *before]
        # to the middle of what takes long
        time.sleep(STEP / 2)
        served = ServedTime(concerned)
        os.kill(before[rank], number)
        limit = LIMIT + (STEP if number == signal.SIGSTOP else 0.0)
        until(lambda: not is_ready(url), limit, "it says that it is ready", concerned)
        for client, said in zip(clients, expected, strict=True):
            client.join(30)
            assert "The engine was lost" in client.error
            assert served.until(client.ended_at) < limit
            length = min(len(client.said), len(said))
            assert client.said[:length] == said[:length], "a wrong token"
        check_serves_again(server, url, before, expected)


def lose_while_idle(model, rank, number):
    with serving(model, "") as server:
        url = server.wait_ready()
        expected = answers(url, PROMPTS)
        before = processes(server)
        os.kill(before[rank], number)
        until(lambda: not is_ready(url), LIMIT, "it says that it is ready", [os.getpid(), server.pid, *before])
        check_serves_again(server, url, before, expected)


def lose_at_start(model, moment, rank, number):
    """Of an engine that is started anew: the server lives, and tries again."""
    with serving(model, AT_START[moment]) as server:
        url = server.wait_ready()
        expected = answers(url, PROMPTS)
        first = processes(server)
        os.kill(first[0], signal.SIGKILL)
        until(lambda: set(processes(server)) - set(first), 30.0, "no new group")
        until(lambda: not any(map(is_there, first)), 5.0, "the old group is there")
        if AT_START[moment]:
            time.sleep(2.0)
        second = processes(server)
        os.kill(second[rank], number)
        check_serves_again(server, url, [*first, *second], expected)


def lose_at_shutdown(model, rank, number):
    with serving(model, SLOW.format("end_worker", 0.5)) as server:
        before = processes(server)
        server.signal(signal.SIGTERM)
        time.sleep(0.2)
        os.kill(before[rank], number)
        server.wait(10.0)
        until(lambda: not any(map(is_there, before)), 5.0, "a process outlived its server")


def lose(model, moment, rank, number):
    if moment in WITH_WORK:
        lose_at_work(model, moment, rank, number)
    elif moment in AT_START:
        lose_at_start(model, moment, rank, number)
    elif moment == "idle":
        lose_while_idle(model, rank, number)
    else:
        lose_at_shutdown(model, rank, number)


@pytest.mark.parametrize(
    ("moment", "rank", "number"),
    [("idle", 1, signal.SIGSTOP), ("a sum", 1, signal.SIGKILL)],
)
def test_a_lost_rank(model, moment, rank, number):
    lose(model, moment, rank, number)


def test_a_lost_stage(model):
    lose_at_work(model, "forward", 1, signal.SIGKILL, STAGES)


@pytest.mark.nightly
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moment", ["idle", *WITH_WORK, *AT_START, "shutdown"])
def test_a_rank_that_is_lost_at_any_moment(model, moment, rank, number):
    lose(model, moment, rank, number)
