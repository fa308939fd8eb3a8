"""The core's process: its birth, its deaths, and bytes that are no messages."""

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from tests.support.blocking_client import BlockingClient

from quire.engine_client import AsyncEngineClient
from quire.engine_client.socket_link import Incoming, SocketLink, fresh_folder
from quire.engine_core.launch_document import LaunchDocument
from quire.engine_core.unread_frames import answer_to_no_message
from quire.errors import EngineDeadError
from quire.message_encoding import decode_to_client, encode
from quire.messages import (
    ControlCall,
    ControlReply,
    EngineOutputs,
    EngineRequest,
    split_sequence_id,
)
from quire.processes.child_process import ChildProcess
from quire.processes.documents import encode_document, read_document
from quire.sampling_params import SamplingParams
from quire.testing.fake_llm import fake_config, fake_link

PARENT = """
import os, signal, sys
from quire.testing.fake_llm import fake_link
from tests.support.blocking_client import BlockingClient
link = fake_link(own_process=True, core="quire.testing.fake_core:{builder}")
client = BlockingClient(link)
{end}
"""


def request(number: int = 1, **sampling) -> EngineRequest:
    params = SamplingParams(temperature=0.0, **sampling)
    return EngineRequest(request_id=number, prompt_token_ids=[5, 6], sampling=params)


def parent_that(end: str, tmp_path, builder: str = "build") -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", PARENT.format(builder=builder, end=end)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os._exit(3)", 3),
        ("sys.exit(4)", 4),  # without close(): the guard at exit does it
        ("client.close()", 0),
    ],
)
def test_the_core_dies_with_its_parent(end: str, status: int, tmp_path):
    parent = parent_that(end, tmp_path)
    # The core inherits the pipe of stderr, so this returns only when both are gone.
    _, errors = parent.communicate(timeout=60)
    assert (parent.returncode, errors) == (status, "")
    assert os.listdir(tmp_path) == []


def test_a_core_that_still_loads_dies_with_its_parent_and_cleans_up(tmp_path):
    parent = parent_that("", tmp_path, builder="build_for_ever")
    assert parent.stderr is not None
    assert parent.stderr.readline() == "building\n"
    parent.kill()
    parent.communicate(timeout=60)
    assert os.listdir(tmp_path) == []


def test_a_link_that_is_forgotten_ends_its_core(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    link = fake_link(own_process=True, core="quire.testing.fake_core:build_for_ever")
    assert isinstance(link, SocketLink)
    child = link._child
    assert child is not None
    del link
    gc.collect()
    assert child.has_ended
    assert os.listdir(tmp_path) == []


def test_a_core_that_dies_before_it_reads_is_closed_in_order(monkeypatch):
    monkeypatch.setattr("quire.processes.child_process._BOOTSTRAP", "raise SystemExit(5)")
    child = ChildProcess(b"x" * 1_000_000, [])  # more than a pipe holds
    child._keeper.join()
    assert child.how_it_ended() == "exit status 5"
    child.close()


def test_ctrl_c_while_the_model_loads_leaves_no_process(tmp_path):
    parent = parent_that("", tmp_path, builder="build_for_ever")
    assert parent.stderr is not None
    assert parent.stderr.readline() == "building\n"
    parent.send_signal(signal.SIGINT)
    _, errors = parent.communicate(timeout=60)
    assert errors.strip().endswith("KeyboardInterrupt")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("number", "words"), [(signal.SIGKILL, "signal SIGKILL"), (signal.SIGTERM, "exit status 0")])
def test_a_killed_core_ends_every_stream(number: int, words: str):
    async def main() -> None:
        link = fake_link(own_process=True)
        assert isinstance(link, SocketLink)
        client = AsyncEngineClient(link)
        await client.wait_ready()

        streams = [client.generate(request(number, max_tokens=50)) for number in (1, 2)]
        async with asyncio.timeout(60):
            await client.control("hold", {"at": 3})
            for stream in streams:
                await anext(stream)
            os.kill(link.pid, number)
            for stream in streams:
                with pytest.raises(EngineDeadError, match=words):
                    async for _ in stream:
                        pass
        client.close()

    asyncio.run(main())


def test_a_dead_core_is_noticed_by_a_client_that_waits():
    link = fake_link(own_process=True)
    assert isinstance(link, SocketLink)
    client = BlockingClient(link)
    os.kill(link.pid, signal.SIGKILL)
    try:
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            client.control("echo")
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            client.add(request())
    finally:
        client.close()


def test_a_core_that_exits_by_itself_is_noticed():
    client = BlockingClient(fake_link(own_process=True))
    try:
        with pytest.raises(EngineDeadError, match="exit status 9"):
            client.control("exit", {"status": 9})
    finally:
        client.close()


def test_a_fork_of_the_parent_does_not_end_the_core():
    client = BlockingClient(fake_link(own_process=True))
    link = client._link
    assert isinstance(link, SocketLink)
    child = os.fork()
    if child == 0:
        link.close()  # as a finalizer would do there
        os._exit(0)
    os.waitpid(child, 0)
    try:
        assert client.control("echo") == {}
    finally:
        client.close()


# ---------------------------------------------------------------------------------------------- bytes from elsewhere

FRAMES = [
    b"",
    b"\x00" * 1024,
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x91" * 100_000,  # deeper than any decoder goes
    b"\xdd\xff\xff\xff\xff",  # an array of four thousand million
    encode(EngineOutputs(step=1)),  # a message, but of the other direction
    encode(ControlCall(call_id=1, name="echo"))[:-1],
    encode(request(max_tokens=5)).replace(b"prompt_token_ids", b"prompt_token_idz"),
    b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",  # a pickle
]


def test_frames_that_are_no_messages_do_not_hurt_the_core(capfd):
    link = fake_link(own_process=True)
    assert isinstance(link, SocketLink)
    client = BlockingClient(link)
    try:
        for frame in FRAMES:
            link._socket.send(frame)
        assert client.control("echo", {"still": "here"}) == {"still": "here"}
    finally:
        client.close()
    log = capfd.readouterr().err
    assert log.count("no message") == len(FRAMES)
    # as every line of the server's log
    assert len(re.findall(r"^\d\d:\d\d:\d\d WARNING quire\.", log, re.MULTILINE)) >= len(FRAMES)


@pytest.mark.parametrize("num_outputs", [1, 3])
def test_a_request_that_the_core_cannot_read_ends_with_an_error(num_outputs: int, capfd):
    client = BlockingClient(fake_link(own_process=True))
    broken = request(number=7, n=num_outputs, max_tokens=5)
    broken.sampling.ignore_eos = None  # type: ignore[assignment]
    try:
        client.add(broken)
        ends: dict[int, str] = {}
        while len(ends) < num_outputs:
            for number, delta in client.receive():
                assert (number, delta.finish_reason) == (7, "error")
                ends[delta.index] = str(delta.error)
        assert set(ends) == set(range(num_outputs))
        assert all("cannot read" in text and "ignore_eos" in text for text in ends.values())
        assert client.control("echo", {"still": "here"}) == {"still": "here"}
    finally:
        client.close()
    assert "answered with an error a frame of" in capfd.readouterr().err


def test_a_call_that_the_core_cannot_read_fails():
    client = BlockingClient(fake_link(own_process=True))
    try:
        with pytest.raises(Exception, match="cannot read"):
            client.control(5)  # type: ignore[arg-type]
        assert client.control("echo") == {}
    finally:
        client.close()


def test_what_a_frame_that_is_no_message_is_answered_with():
    def answer(**content):
        return answer_to_no_message(msgspec.msgpack.encode(content), ValueError("no"))

    def indices(**content):
        return [split_sequence_id(end.sequence_id) for end in answer(**content).ends]

    assert indices(type="EngineRequest", request_id=4, sampling={"n": 2}) == [(4, 0), (4, 1)]
    assert indices(request_id=4, sampling={}) == [(4, 0)]
    # who does not say how many gets the end of as many as there may be
    assert len(indices(type="ExtendRequest", request_id=4)) == len(indices(request_id=4, sampling={"n": "x"})) == 128
    assert answer(call_id=3, name=None) == ControlReply(
        call_id=3, error="The engine core cannot read this message: no."
    )
    for request_id in (-1, 2**60, True, "1", None):
        assert answer(request_id=request_id) is None
    assert answer_to_no_message(b"\x01", ValueError("no")) is None


def test_frames_that_are_no_messages_do_not_hurt_the_client(caplog):
    link = fake_link(own_process=True)
    assert isinstance(link, SocketLink)
    client = BlockingClient(link)
    frames = [*FRAMES[:5], encode(request(max_tokens=5)), encode(EngineOutputs(step=1))]
    link._end.incoming = Incoming(FakeSocket(frames))
    try:
        [message] = link.receive(0)
        assert isinstance(message, EngineOutputs)
        assert client.statistics()["garbage_frames_dropped"] == 6
        # whoever sends many does not fill the log with them
        assert len([one for one in caplog.records if "no message" in one.getMessage()]) == 1
    finally:
        client.close()


class FakeSocket:
    def __init__(self, frames: list[bytes]) -> None:
        self.frames = frames

    def recv(self, flags: int) -> bytes:
        if not self.frames:
            raise zmq.Again
        return self.frames.pop(0)


@given(st.binary(max_size=64), st.integers(0, 80), st.integers(0, 255))
def test_no_bytes_make_the_decoder_do_more_than_raise(noise: bytes, place: int, value: int):
    frame = bytearray(encode(EngineOutputs(step=3)))
    frame[place % len(frame)] = value
    for data in (noise, bytes(frame), bytes(frame) + noise):
        try:
            message = decode_to_client(data)
        except Exception:
            continue
        assert type(message).__module__ == "quire.messages"


def test_the_sockets_folder_is_private_and_its_name_fits(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    folder = Path(fresh_folder())
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(str(folder / "core")) < 104
    folder.rmdir()


def test_the_launch_document_tells_everything():
    config = fake_config()
    config.facts.hf_config["rope_limit"] = float("inf")  # JSON has no infinity
    told = encode_document(LaunchDocument(config=config, endpoint="ipc:///x", folder="/x"))
    read, write = os.pipe()
    with os.fdopen(write, "wb") as file:
        file.write(told[:60_000])
        assert len(told) < 60_000  # a pipe holds no more
    with os.fdopen(read, "rb") as file:
        assert read_document(file, LaunchDocument).config == config
