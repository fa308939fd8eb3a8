"""A server on a real engine gets hundreds of bad inputs: each is refused with OpenAI's error object, and nobody else
notices. After each group the same process gives a canary the same answer, and no block is held."""

import http.client
import json
import re
import socket
import threading
import time

import pytest

from .bad_inputs import ALL
from .bad_inputs.case import CHAT, JSON

CANARY = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "max_tokens": 12, "temperature": 0}
# No answer shows where the server's files are, where its memory is, or what its code looks like.
LEAKS = re.compile(
    r"Traceback|0x[0-9a-f]{6,}|site-packages|/home/|/root/|/usr/|\.py\b|ipc://|/dev/shm|quire-[a-z0-9_]{8}/"
)


class Trap:
    """A server that must never be asked."""

    def __init__(self):
        self.num_hits = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                self._listener.accept()[0].close()
            except OSError:
                return
            self.num_hits += 1

    def close(self):
        self._listener.close()


@pytest.fixture(scope="module")
def trap():
    trap = Trap()
    yield trap
    trap.close()


@pytest.fixture(scope="module")
def canary(server, ask):
    """The answer before anything bad was sent, and the process that gave it."""
    return answer_of(ask), engine_pids(server)


def engine_pids(server):
    import psutil

    return [child.pid for child in psutil.Process(server.pid).children()]


def answer_of(ask):
    status, _, body = ask("POST", CHAT, json.dumps(CANARY).encode(), JSON)
    assert status == 200, body
    return json.loads(body)["choices"]


def ask_raw(server, request):
    host, _, port = server.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(request)
        response = http.client.HTTPResponse(connection)
        response.begin()
        return response.status, response.headers, response.read()


def check(case, server, ask, trap):
    """What is wrong with the answer, or None."""
    place = trap.address
    began = time.monotonic()
    try:
        if case.raw is not None:
            status, headers, body = ask_raw(server, case.raw)
        else:
            body = case.body.replace(b"{trap}", place.encode())
            status, headers, body = ask(case.method, case.path, body, case.headers)
    except (OSError, http.client.HTTPException) as error:
        return f"no answer: {error!r}"
    seconds = time.monotonic() - began
    if status not in case.allowed:
        return f"status {status}, not {case.allowed}: {body[:300]!r}"
    if seconds > 10:
        return f"took {seconds:.1f} s"
    if len(body) > 4096:
        return f"an answer of {len(body)} bytes"
    if found := LEAKS.search(body.decode("utf-8", "replace")):
        return f"says {found[0]!r}: {body[:300]!r}"
    if case.raw is not None or status == 200:
        return None  # what is no HTTP has no place for the rest
    return wrong_form(headers, body)


def wrong_form(headers, body):
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return f"no error object: {body[:200]!r}"
    if set(error) != {"message", "type", "param", "code"} or not isinstance(error["message"], str):
        return f"not OpenAI's object: {error}"
    if not all(error[name] is None or isinstance(error[name], str) for name in ("param", "code")):
        return f"param and code are texts or null: {error}"
    if not headers.get("x-request-id") or not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", headers["x-request-id"]):
        return "no request id, or one that cannot stand in a log"
    return None


def test_there_are_enough():
    assert sum(len(cases) for cases in ALL.values()) >= 980
    for group, cases in ALL.items():
        names = [case.name for case in cases]
        assert len(names) == len(set(names)), (group, {name for name in names if names.count(name) > 1})


@pytest.mark.parametrize("group", ALL)
def test_each_is_refused_and_nobody_notices(group, server, ask, trap, canary):
    wrong = {case.name: fault for case in ALL[group] if (fault := check(case, server, ask, trap))}
    assert not wrong, f"{len(wrong)} of {len(ALL[group])}:\n" + "\n".join(f"{k}: {v}" for k, v in wrong.items())
    assert trap.num_hits == 0, "something was fetched"
    answer, engines = canary
    assert answer_of(ask) == answer
    assert engine_pids(server)[: len(engines)] == engines, "later ones check forms"
    assert ask("GET", "/health/ready", b"", {})[0] == 200
    metrics = ask("GET", "/metrics", b"", {})[2].decode()
    assert re.search(r"^quire:kv_cache_blocks_held\{.*\} 0(\.0)?$", metrics, re.MULTILINE), "blocks are held"
