"""Where ranks of several machines listen, and what becomes of noise that comes there (SEC-01, SEC-02, SEC-03)."""

import os
import pickle
import random
import socket

import psutil
import zmq
from tests.support.ray_servers import PROMPTS, far_ranks, serving
from tests.support.streams import answers

SEEDS = 60


def listening(pid):
    """(address, port) of each socket."""
    connections = psutil.Process(pid).net_connections("tcp")
    return [(one.laddr.ip, one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN]


def core_of(server):
    """The one that has found Ray: all of its ranks but the first are elsewhere."""
    (core,) = [
        child.pid
        for child in psutil.Process(server.pid).children(recursive=True)
        if any("engine_core.process" in word for word in child.cmdline())
    ]
    return core


def noises(drawn, canary):
    pickled = pickle.dumps(canary)
    greeting = b"\xff" + b"\x00" * 8 + b"\x7f\x03\x01"
    yield b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + drawn.randbytes(200)
    yield greeting + b"NULL".ljust(20, b"\x00") + b"\x00" * 32 + b"\x04\x05READY" + b"\x00\x40" + pickled
    yield greeting + b"CURVE".ljust(20, b"\x00") + b"\x00" * 32 + drawn.randbytes(300)
    yield pickled
    for _ in range(SEEDS):
        yield drawn.randbytes(1024)


class Canary:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_sockets_and_noise(cluster, checkpoint, tmp_path):

    with serving(checkpoint, "--tensor-parallel-size", "") as server:
        url = server.wait_ready()
        expected = answers(url, PROMPTS)
        core, (rank,) = core_of(server), far_ranks()
        machine = cluster.head_node.node_ip_address
        own = [one for one in listening(core) if one[0] == "127.0.0.1"]
        # two channels and gloo; what is left is Ray's, which listens where its machine is
        assert len(own) == 3
        assert len(listening(core)) == len(own) + 1
        assert {address for address, _ in listening(rank)} == {machine}
        drawn = random.Random(11)
        for address, port in [*own, *listening(rank)]:
            for noise in noises(drawn, Canary(tmp_path / "canary")):
                with socket.create_connection((address, port), 5) as stranger:
                    stranger.sendall(noise)
            without_key = zmq.Context.instance().socket(zmq.DEALER)
            without_key.connect(f"tcp://{address}:{port}")
            without_key.send(pickle.dumps(Canary(tmp_path / "canary")))
            assert answers(url, PROMPTS) == expected
            without_key.close(0)
        assert not (tmp_path / "canary").exists()
        assert core_of(server) == core
        assert far_ranks() == [rank]
