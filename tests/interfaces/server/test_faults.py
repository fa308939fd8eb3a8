"""Faults in one request of 32, over HTTP, with the engine in its own process: F6, F7 and F8 as a client sees them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from quire.testing.server_process import ServerProcess

NUM_CLIENTS = 32
# Tokens that a prompt may have and that nobody says, and what each of them does to its request.
FAULTS = {
    301: "in_forward:raise:when=301",
    302: "nan_row:corrupt:when=302",
    303: "before_sample:oom:when=303",
    304: "in_forward:oom:when=304",
}
NEVER_SAID = {str(token): -100 for token in FAULTS}


class Client:
    """One connection a request, so that all are open at once."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = str(parts.hostname), int(parts.port or 0)

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection(*self._address, timeout=120)
        try:
            headers = {"content-type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def answers(self, poison: dict[int, int]) -> list[tuple[int, str]]:
        """All clients at once; `poison`: a token for the prompts of some of them. Of a stream, all its text."""

        def ask(number: int) -> tuple[int, str]:
            prompt = [5, 6, 7, 8 + number, poison.get(number, 9), 10]
            body = {"model": "quire-embedded", "prompt": prompt, "max_tokens": 16, "seed": number}
            body |= {"temperature": 0.7 * (number % 3 == 0), "logit_bias": NEVER_SAID, "stream": number % 2 == 0}
            status, text = self.call("POST", "/v1/completions", body)
            if status != 200 or not body["stream"]:
                return status, json.loads(text)["choices"][0]["text"] if status == 200 else text
            events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            error = next((event["error"]["message"] for event in events if "error" in event), None)
            return status, error or "".join(event["choices"][0]["text"] for event in events)

        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            return list(pool.map(ask, range(NUM_CLIENTS)))

    def metric(self, name: str) -> float:
        lines = self.call("GET", "/metrics")[1].splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"quire:{name}{{"))


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_FAIL", ",".join(FAULTS.values()))
        process = ServerProcess(["-m", "quire.interfaces.cli", "serve", "--port", "0", "--device", "cpu"])
    with process:
        process.wait_ready()
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Client:
    return Client(server.wait_ready())


@pytest.fixture(scope="module")
def expected(client: Client) -> list[tuple[int, str]]:
    answers = client.answers({})
    assert [status for status, _ in answers] == [200] * NUM_CLIENTS
    return answers


def engines_of(process: ServerProcess) -> list[int]:
    """Child processes, by id."""
    tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
    return sorted(int(child) for file in tasks for child in file.read_text().split())


def assert_one_of_all_fails(
    server: ServerProcess, client: Client, expected: list[tuple[int, str]], poison: dict[int, int]
) -> None:
    engines = engines_of(server)
    answers = client.answers(poison)
    for number, answer in enumerate(answers):
        if number in poison:
            assert answer[0] == 500 or "failed" in answer[1], f"request {number} said {answer}"
        else:
            assert answer == expected[number], f"request {number} noticed"
    assert engines
    assert engines_of(server) == engines, "nothing was started again"
    assert client.call("GET", "/health")[0] == 200
    assert client.metric("kv_cache_blocks_held") == client.metric("num_requests_running") == 0


@pytest.mark.parametrize("token", FAULTS)
def test_the_others_have_the_right_text(
    server: ServerProcess, client: Client, expected: list[tuple[int, str]], token: int
) -> None:
    """The poisoned one streams or does not, is greedy or draws."""
    before = client.metric("failed_requests_total")
    assert_one_of_all_fails(server, client, expected, {token % 8 + 5: token})
    assert client.metric("failed_requests_total") == before + 1


def test_several_at_once(server: ServerProcess, client: Client, expected: list[tuple[int, str]]) -> None:
    nans = client.metric("nan_logits_total")
    assert_one_of_all_fails(server, client, expected, {7 * k + 1: token for k, token in enumerate(FAULTS)})
    assert client.metric("nan_logits_total") == nans + 1
    assert client.metric("divided_steps_total") > 0


@pytest.mark.nightly
@pytest.mark.parametrize("repetition", range(20))
@pytest.mark.parametrize("token", FAULTS)
def test_again_and_again(
    server: ServerProcess, client: Client, expected: list[tuple[int, str]], token: int, repetition: int
) -> None:
    assert_one_of_all_fails(server, client, expected, {(repetition * 5 + token) % NUM_CLIENTS: token})
