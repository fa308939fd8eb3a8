"""Prompts in pieces through a real server process with the embedded model: WebSockets, and bodies in chunks."""

import http.client
import json
import os
import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest
from tests.support.server_process import ServerProcess
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

SERVE = ["-m", "quire.interfaces.cli", "serve", "--port", "0", "--max-num-seqs", "8"]
PATH = "/v1/completions/stream"
PROMPT = "Once upon a time there was a little engine, and it said: gr\u00fc\u00dfe \U0001f600"
FIELDS = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def url():
    with ServerProcess([*SERVE, "--api-key", "secret", "--allowed-origin", "http://good.test"]) as server:
        yield server.wait_ready(300)
        server.signal()
        assert server.wait() == 0
        assert "Traceback" not in server.output, server.output
        assert " ERROR " not in server.output, server.output


HEADERS = {"Authorization": "Bearer secret"}


def opened(url: str, path: str = PATH, **options):
    return connect(
        url.replace("http", "ws", 1) + path, additional_headers={**HEADERS, **options.pop("headers", {})}, **options
    )


def answer(connection) -> list[dict]:
    """What the server says until it closes; the last entry is how it closed."""
    said = []
    try:
        while True:
            said.append(json.loads(connection.recv(timeout=30)))
    except ConnectionClosed as closed:
        said.append({"code": closed.rcvd.code if closed.rcvd else None})
    return said


def stripped(chunk: dict) -> dict:
    return {name: value for name, value in chunk.items() if name not in ("id", "created", "usage")}


def whole_answer(url: str, prompt=PROMPT, **fields) -> list[dict]:
    body = {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}, **FIELDS, **fields}
    response = httpx.post(url + "/v1/completions", json=body, headers=HEADERS, timeout=30)
    return [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]


def text_of(chunks: list[dict], index: int = 0) -> str:
    parts = [choice["text"] for chunk in chunks for choice in chunk.get("choices", ()) if choice["index"] == index]
    return "".join(parts)


def is_idle(url: str) -> bool:
    text = httpx.get(url + "/metrics", headers=HEADERS, timeout=30).text
    values = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith("quire:num_requests_running{")]
    return values == ["0.0"]


def wait_idle(url: str) -> None:
    while not is_idle(url):
        pass


# ---------------------------------------------------------------------------------------------- WebSocket


@pytest.mark.parametrize("fields", [{}, {"n": 2, "echo": True}, {"logprobs": 2}, {"use_beam_search": True, "n": 2}])
@pytest.mark.parametrize("size", [1, 9, 1000])
def test_the_answer_is_that_of_the_whole_prompt(url, fields, size):
    with opened(url) as connection:
        connection.send(json.dumps({**FIELDS, **fields}))
        for at in range(0, len(PROMPT), size):
            connection.send(json.dumps({"text": PROMPT[at : at + size]}))
        connection.send(json.dumps({"is_final": True}))
        *chunks, closed = answer(connection)
    whole = whole_answer(url, **fields)
    assert closed == {"code": 1000}
    for index in range(fields.get("n", 1)):
        assert text_of(chunks, index) == text_of(whole, index) != ""
    assert chunks[0].keys() == whole[0].keys()
    usage, wanted = chunks[-1]["usage"], whole[-1]["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == wanted[name]
    assert chunks[-1]["choices"] == []


def test_tokens(url):
    ids = httpx.post(url + "/tokenize", json={"prompt": PROMPT}, headers=HEADERS, timeout=30).json()["tokens"]
    with opened(url) as connection:
        connection.send(json.dumps({**FIELDS, "prompt": ids[:3]}))
        connection.send(json.dumps({"token_ids": ids[3:], "is_final": True}))
        *chunks, closed = answer(connection)
    assert closed == {"code": 1000}
    assert text_of(chunks) == text_of(whole_answer(url))


def test_two_at_once_and_others_between(url):
    with opened(url) as first, opened(url) as second:
        for connection in (first, second):
            connection.send(json.dumps(FIELDS))
        for at in range(0, len(PROMPT), 8):
            first.send(json.dumps({"text": PROMPT[at : at + 8]}))
            second.send(json.dumps({"text": PROMPT[::-1][at : at + 8]}))
        wanted = text_of(whole_answer(url)), text_of(whole_answer(url, PROMPT[::-1]))
        for connection in (second, first):
            connection.send(json.dumps({"is_final": True}))
        assert (text_of(answer(first)), text_of(answer(second))) == wanted


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (["{"], "The message is not valid JSON"),
        (["[]"], "The message must be a JSON object"),
        (['{"max_token": 5}'], "Unknown field"),
        (['{"temperature": -1}'], "temperature"),
        (['{"model": "other"}'], "does not exist"),
        (['{"stream": false}'], "always streams"),
        (['{"stream_options": {"include_usage": false}}'], "always comes"),
        (['{"prompt_logprobs": 1}'], "prompt_logprobs"),
        (["{}", '{"tex": "a"}'], "Unknown field"),
        (["{}", '{"text": 5}'], "must be a string"),
        (["{}", '{"text": "\\ud83d"}'], "The message holds \\ud83d, a lone surrogate"),
        (["{}", '{"text": ' + "[" * 100 + "]" * 100 + "}"], "The message is nested more than"),
        (["{}", "{}"], "A piece has"),
        (['{"text": "a"}', '{"is_final": true}'], "text: the first message holds the parameters"),
        (['{"prompt": "a", "is_final": true}'], "is_final: the first message"),
        (["{}", '{"is_final": true}'], "prompt: no piece came. Send at least one"),
        (["{}", b"\x00\x01"], "must be texts"),
        (["{}", '{"token_ids": [1, 99999999999999999999]}'], None),
        (["{}", '{"token_ids": [99999]}'], "99999"),
        (["[" * 5000], "The message is nested more than 64 levels"),
        ([json.dumps({"prompt": "word " * 5000}), '{"is_final": true}'], "maximum context length"),
        (['{"max_tokens": 2000, "prompt": "a"}', '{"is_final": true}'], "maximum context length"),
    ],
)
def test_mistakes(url, messages, words):
    with opened(url) as connection:
        for message in messages:
            with suppress(ConnectionClosed):  # the server may have closed at the first mistake
                connection.send(message)
        *chunks, closed = answer(connection)
    assert closed == {"code": 1008}
    assert words is None or words in chunks[-1]["error"]["message"]
    assert chunks[-1]["error"].keys() == {"message", "type", "param", "code"}
    wait_idle(url)


def test_a_message_that_is_too_large(url):
    with opened(url) as connection:
        connection.send(json.dumps(FIELDS))
        try:
            connection.send(json.dumps({"text": "a" * 2**21}))
            assert answer(connection)[-1] in ({"code": 1009}, {"code": None})
        except ConnectionClosed:
            pass  # the server had closed before all of it was sent
    wait_idle(url)


def test_words_after_the_end(url):
    with opened(url) as connection:
        connection.send(json.dumps({**FIELDS, "max_tokens": 500, "prompt": "Hello"}))
        connection.send(json.dumps({"is_final": True}))
        connection.send(json.dumps({"text": "one thing more"}))
        *chunks, closed = answer(connection)
    assert closed == {"code": 1008}
    assert "nothing may follow" in chunks[-1]["error"]["message"]
    wait_idle(url)


@pytest.mark.parametrize("has_answer", [False, True])
def test_a_client_that_leaves(url, has_answer):
    with opened(url) as connection:
        connection.send(json.dumps({**FIELDS, "max_tokens": 500, "prompt": "Hello, hello"}))
        if has_answer:
            connection.send(json.dumps({"is_final": True}))
            connection.recv(timeout=30)
        # without a word: the connection is simply gone
        connection.socket.shutdown(socket.SHUT_RDWR)
    wait_idle(url)


def test_doors_that_stay_closed(url):
    for headers, path, status in (
        ({"Authorization": "Bearer wrong"}, PATH, 401),
        ({"Origin": "http://evil.test"}, PATH, 403),
        ({}, "/v1/chat/completions", 404),
        ({}, "/nowhere", 404),
    ):
        with pytest.raises(InvalidStatus) as caught, opened(url, path, headers=headers):
            pass
        assert caught.value.response.status_code == status
        assert "error" in json.loads(caught.value.response.body)
        assert caught.value.response.headers["x-request-id"]
    with opened(url, headers={"Origin": "http://good.test", "x-request-id": "mine"}) as connection:
        assert connection.response.headers["x-request-id"] == "mine"
    wait_idle(url)


def test_bytes_that_mean_nothing(url):
    """After a good handshake, and instead of one."""
    parts = urlsplit(url)
    opening = (
        f"GET {PATH} HTTP/1.1\r\nHost: {parts.netloc}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\nAuthorization: Bearer secret\r\n"
    ).encode()
    frames = [b"", os.urandom(400), b"\xff" * 50, b"\x81\xff" + b"\xff" * 8, b"\x81\x83abcd" + b"\xff\xfe\xfd"]
    for head, tail in [(opening, b"\r\n"), (opening.replace(b"13", b"99"), b"\r\n"), (b"", b"")]:
        for frame in frames:
            with socket.create_connection((parts.hostname, parts.port), timeout=30) as raw:
                raw.sendall(head + tail + frame)
                raw.shutdown(socket.SHUT_WR)
                try:
                    while raw.recv(4096):
                        pass
                except ConnectionResetError:
                    pass
    assert httpx.get(url + "/health", timeout=30).status_code == 200
    wait_idle(url)


# ---------------------------------------------------------------------------------------------- bodies in chunks


def post_in_chunks(url: str, chunks, *, leaves: bool = False):
    """A POST with Transfer-Encoding: chunked; (status, body)."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    connection.putrequest("POST", "/v1/completions")
    for name, value in {**HEADERS, "Content-Type": "application/x-ndjson", "Transfer-Encoding": "chunked"}.items():
        connection.putheader(name, value)
    connection.endheaders()
    for chunk in chunks:
        connection.send(b"%x\r\n%b\r\n" % (len(chunk), chunk))
    if leaves:
        connection.close()
        return None
    connection.send(b"0\r\n\r\n")
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, body


def lines_of(prompt: str, size: int, **fields):
    yield json.dumps({**FIELDS, **fields}).encode() + b"\n"
    for at in range(0, len(prompt), size):
        yield json.dumps({"text": prompt[at : at + size]}).encode() + b"\n"


@pytest.mark.parametrize("size", [1, 13])
def test_a_body_in_chunks(url, size):
    wanted = text_of(whole_answer(url))
    status, body = post_in_chunks(url, lines_of(PROMPT, size))
    assert status == 200
    assert json.loads(body)["choices"][0]["text"] == wanted
    status, body = post_in_chunks(url, lines_of(PROMPT, size, stream=True))
    assert text_of([json.loads(line[6:]) for line in body.decode().split("\n\n")[:-2]]) == wanted
    # cut anywhere, also inside a character
    data = b"".join(json.dumps(json.loads(line), ensure_ascii=False).encode() + b"\n" for line in lines_of(PROMPT, 9))
    status, body = post_in_chunks(url, [data[at : at + size] for at in range(0, len(data), size)])
    assert json.loads(body)["choices"][0]["text"] == wanted


def test_bodies_at_once(url):
    wanted = [text_of(whole_answer(url, prompt)) for prompt in (PROMPT, PROMPT[::-1])]
    found = {}

    def post(number: int, prompt: str) -> None:
        found[number] = post_in_chunks(url, lines_of(prompt, 5))

    threads = [threading.Thread(target=post, args=pair) for pair in enumerate((PROMPT, PROMPT[::-1]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [json.loads(found[number][1])["choices"][0]["text"] for number in (0, 1)] == wanted


def test_a_body_that_breaks_off(url):
    assert post_in_chunks(url, lines_of(PROMPT, 7), leaves=True) is None
    wait_idle(url)


def test_a_mistake_in_a_body(url):
    status, body = post_in_chunks(url, [b"{}\n", b'{"text": "a"}\n', b'{"tex": "b"}\n', b'{"text": "c"}\n' * 5000])
    assert (status, json.loads(body)["error"]["param"]) == (400, "tex")
    wait_idle(url)
