"""Channels between machines: who has the key is heard, and nobody else gets as far as a message."""

import os
import pickle
import random
import socket

import psutil
import pytest
import zmq

from quire.engine_core.executor.keyed_channel import KeyedAddress, KeyedChannel, KeyedListener, connected
from quire.engine_core.executor.rank_channel import Call, CallDone, encode_message

HOST = "127.0.0.1"
LISTENER = b"\xff" + b"\x00" * 8 + b"\x7f"


@pytest.fixture
def listener():
    listener = KeyedListener(HOST)
    yield listener
    listener.close()


@pytest.fixture
def pair(listener):
    ours, address = listener.invite(zmq.DEALER)
    theirs = KeyedChannel(connected(zmq.DEALER, address))
    yield KeyedChannel(ours), theirs, address
    theirs.close()


def greeting(mechanism):
    return LISTENER + b"\x03\x01" + mechanism.ljust(20, b"\x00") + b"\x00" * 32


def exchange(ours, theirs):
    theirs.send(encode_message(CallDone("here")))
    assert ours.receive(20) == CallDone("here")
    ours.send(encode_message(Call("load", [1])))
    assert theirs.receive(20) == Call("load", [1])


def test_both_ends_hear_each_other(pair):
    ours, theirs, _ = pair
    exchange(ours, theirs)
    assert ours.receive(0) is None


def test_it_listens_at_the_one_address(pair):
    _, _, address = pair
    port = int(address.endpoint.rpartition(":")[2])
    found = [one.laddr.ip for one in psutil.Process().net_connections("tcp") if one.laddr and one.laddr.port == port]
    assert set(found) == {HOST}


def test_a_stranger_is_not_heard(listener, pair, tmp_path):
    ours, theirs, address = pair

    class Canary:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "canary"),)

    public, secret = zmq.curve_keypair()
    _, other = listener.invite(zmq.DEALER)
    strangers = [
        KeyedAddress(endpoint=address.endpoint, server_key=address.server_key, public_key=public, secret_key=secret),
        # a rank, at the door of another one
        KeyedAddress(
            endpoint=address.endpoint,
            server_key=address.server_key,
            public_key=other.public_key,
            secret_key=other.secret_key,
        ),
    ]
    sockets = [connected(zmq.DEALER, stranger) for stranger in strangers]
    without_key = zmq.Context.instance().socket(zmq.DEALER)
    without_key.connect(address.endpoint)
    for stranger in (*sockets, without_key):
        for said in (encode_message(CallDone("let me in")), pickle.dumps(Canary())):
            stranger.send(said)
    assert ours.receive(1.0) is None
    exchange(ours, theirs)
    assert ours.receive(0) is None
    assert not (tmp_path / "canary").exists()
    for stranger in (*sockets, without_key):
        stranger.close(0)


def test_noise_does_no_harm(pair):
    ours, theirs, address = pair
    drawn = random.Random(7)
    host, _, port = address.endpoint.removeprefix("tcp://").rpartition(":")
    huge = b"\x06" + (2**40).to_bytes(8, "big") + b"\x05HELLO"
    said = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + drawn.randbytes(200),
        greeting(b"NULL") + b"\x04\x05READY",
        greeting(b"CURVE") + huge,
        greeting(b"CURVE") + b"\x04\xc8\x05HELLO" + drawn.randbytes(194),
        *(drawn.randbytes(1024) for _ in range(50)),
        *(greeting(b"CURVE") + drawn.randbytes(300) for _ in range(50)),
    ]
    before = psutil.Process().memory_info().rss
    for noise in said:
        with socket.create_connection((host, int(port)), 5) as stranger:
            stranger.sendall(noise)
    exchange(ours, theirs)
    assert psutil.Process().memory_info().rss - before < 256 << 20
