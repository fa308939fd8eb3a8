"""The pulse of a process: what it counts, and how its stacks are had."""

import asyncio
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from quire.engine_client import AsyncEngineClient
from quire.engine_client.socket_link import SocketLink
from quire.engine_core.pulse import NO_PAGE, Pulse, PulsePage, PulseWriter
from quire.errors import EngineDeadError
from quire.messages import EngineRequest, SchedulerOutput
from quire.processes.child_process import ChildProcess
from quire.sampling_params import SamplingParams
from quire.testing.fake_llm import fake_link


def request(number: int = 1, **sampling) -> EngineRequest:
    return EngineRequest(
        request_id=number, prompt_token_ids=[5, 6], sampling=SamplingParams(temperature=0.0, **sampling)
    )


def decision(step: int, num_tokens: list[int]) -> SchedulerOutput:
    counts = np.array(num_tokens, dtype=np.int64)
    return SchedulerOutput(step=step, rows=np.arange(len(counts)), num_tokens=counts, released=[5])


def test_what_is_written_is_read():
    page = PulsePage()
    writer = PulseWriter(os.dup(page.descriptor))
    assert page.read().is_busy
    writer.serves()
    writer.receives()
    writer.begins(decision(1, [3, 4]), 12)
    writer.has_done()
    writer.rests()
    pulse = page.read()
    assert pulse._replace(beats=0, step_began=0) == Pulse(
        is_serving=True, is_busy=False, num_done=1, num_received=1, num_tokens=12
    )
    assert pulse.step_began > 0
    page.close()
    page.close()
    assert (page.read(), page.stacks(), page.last_steps()) == (Pulse(), "", [])


def test_the_last_hundred_steps_are_kept():
    page = PulsePage()
    writer = PulseWriter(os.dup(page.descriptor))
    assert page.last_steps() == []
    for step in range(1, 251):
        writer.begins(decision(step, [step, 1, 1]), 1000)
    found = page.last_steps()
    assert [one["step"] for one in found] == list(range(151, 251))
    last = found[-1]
    assert 0 <= last.pop("seconds_ago") < 60
    assert {name: number for name, number in last.items() if number} == {
        "step": 250,
        "num_rows": 3,
        "num_tokens": 252,
        "most_tokens_of_a_row": 250,
        "num_released": 1,
    }
    # what faulthandler writes lies behind them: of a hundred threads, so that the oldest, this one, may be left out
    page.ask_for_stacks(os.getpid())
    while "most recent call first" not in page.stacks():
        pass
    assert len(page.last_steps()) == 100
    page.close()


def test_of_very_many_stacks_the_last_are_read():
    page = PulsePage()
    for number in range(6):
        os.write(page.descriptor, b"%d" % number * 100_000)
    assert page.num_stack_bytes == 600_000
    text = page.stacks()
    assert len(text) < 300_000
    assert text.endswith("5" * 100_000)
    assert page.stacks(599_990) == "5" * 10
    page.close()
    assert page.num_stack_bytes == 0


def test_a_writer_without_a_page_writes_to_nobody():
    num_threads = threading.active_count()
    PulseWriter(NO_PAGE).has_done()
    assert threading.active_count() == num_threads


@pytest.fixture
def serving():
    """Runs `test(client, process)` on an engine's process with a fake core."""

    def run(test) -> None:
        async def main() -> None:
            link = fake_link(own_process=True)
            client = AsyncEngineClient(link)
            try:
                async with asyncio.timeout(60):
                    await client.wait_ready()
                    await test(client, link.process)
            finally:
                client.close()

        asyncio.run(main())

    return run


def test_an_engine_counts_what_it_does(serving):
    async def test(client, process):
        async for _ in client.generate(request(max_tokens=20)):
            pass
        await client.control("echo")
        while process.pulse().is_busy:
            await asyncio.sleep(0.01)
        pulse = process.pulse()
        assert pulse.is_serving
        assert pulse.num_received == process.num_sent == 2
        assert pulse.num_done >= 22

    serving(test)


def test_stacks_of_a_running_and_of_a_stopped_process(serving):
    async def test(client, process):
        stacks = await asyncio.to_thread(process.ask_for_stacks)
        assert "process.py" in stacks
        assert "in serve" in stacks
        os.kill(process.pid, signal.SIGSTOP)
        stacks = await asyncio.to_thread(process.ask_for_stacks)
        assert "in serve" in stacks

    serving(test)


def test_the_stacks_of_a_crash_are_left_behind(serving):
    async def test(client, process):
        os.kill(process.pid, signal.SIGSEGV)
        with pytest.raises(EngineDeadError, match="SIGSEGV"):
            await client.control("echo")
        assert "Segmentation fault" in process.stacks()
        assert "in serve" in process.stacks()

    serving(test)


def test_a_killed_engine_leaves_its_last_decisions_behind():
    async def main() -> None:
        link = fake_link(own_process=True, core="tests.support.faults.builders:build")
        client = AsyncEngineClient(link)
        try:
            async with asyncio.timeout(60):
                await client.wait_ready()
                stream = client.generate(request(max_tokens=5000))
                for _ in range(5):
                    await anext(stream)
                os.kill(link.process.pid, signal.SIGKILL)
                with pytest.raises(EngineDeadError, match="SIGKILL"):
                    async for _ in stream:
                        pass
            found = link.process.last_steps()
            # the prompt, then a token a step; the last one may not have been decided to its end
            assert len(found) >= 4
            assert [one["step"] for one in found] == list(range(1, len(found) + 1))
            assert (found[0]["num_admitted"], found[0]["num_tokens"], found[1]["num_tokens"]) == (1, 2, 1)
        finally:
            client.close()

    asyncio.run(main())


def test_a_killed_engine_is_dead_with_the_reason(serving):
    async def test(client, process):
        await client.control("hold", {"at": 3})
        stream = client.generate(request(max_tokens=20))
        await anext(stream)
        client.kill("it stalled")
        with pytest.raises(EngineDeadError, match="it stalled"):
            async for _ in stream:
                pass
        assert client.failure == "it stalled"

    serving(test)


def is_there(pid: int) -> bool:
    try:
        # a zombie has ended
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_the_process_has_started_ends_with_it(tmp_path, monkeypatch):
    # it starts one that would outlive it, and ends
    monkeypatch.setattr(
        "quire.processes.child_process._BOOTSTRAP",
        "import subprocess; child = subprocess.Popen(['sleep', '600']);"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))",
    )
    child = ChildProcess(b"", [])
    child._keeper.join(30)
    assert child.has_ended
    grandchild = int((tmp_path / "pid").read_text())
    while is_there(grandchild):
        pass  # until init has seen it off
    assert child.how_it_ended() == "exit status 0"
    child.close()


def test_no_link_but_that_of_a_process_has_one():
    link = fake_link(own_process=False)
    assert link.processes == ()
    link.close()
    link = fake_link(own_process=True)
    assert isinstance(link, SocketLink)
    assert [process.pid for process in link.processes] == [link.pid]
    link.close()
