"""Faults in one request of 32, over HTTP, with the engine in its own process: F6, F7 and F8 as a client sees them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.support.completion_clients import Answer, CompletionClients, children_of
from tests.support.server_process import ServerProcess

NUM_CLIENTS = 32
# Tokens that a prompt may have and that nobody says, and what each of them does to its request.
FAULTS = {
    301: "in_forward:raise:when=301",
    302: "nan_row:corrupt:when=302",
    303: "before_sample:oom:when=303",
    304: "in_forward:oom:when=304",
}
STANDS_STILL = 305
POINTS = [*FAULTS.values(), f"in_forward:slow:when={STANDS_STILL}:count=1:seconds=4"]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_FAIL", ",".join(POINTS))
        # no more memory than the clients need: committing it keeps a fresh engine busy beside its steps
        seats = ["--max-num-seqs", str(NUM_CLIENTS)]
        process = ServerProcess(["-m", "quire.interfaces.cli", "serve", "--port", "0", "--device", "cpu", *seats])
    with process:
        process.wait_ready()
        yield process


@pytest.fixture(scope="module")
def clients(server: ServerProcess) -> CompletionClients:
    never_said = {str(token): -100.0 for token in (*FAULTS, STANDS_STILL)}
    return CompletionClients(server.wait_ready(), NUM_CLIENTS, logit_bias=never_said)


@pytest.fixture(scope="module")
def expected(clients: CompletionClients) -> list[Answer]:
    answers = clients.ask_all()
    assert all(answer.status == 200 and answer.error is None and answer.text for answer in answers)
    return answers


def assert_these_fail_alone(
    server: ServerProcess, clients: CompletionClients, expected: list[Answer], poison: dict[int, int]
) -> None:
    engines = children_of(server.pid)
    answers = clients.ask_all(poison)
    for number, answer in enumerate(answers):
        if number in poison:
            assert answer.error is not None, f"client {number} was told {answer}"
            assert answer.status == 500 or number % 2 == 0, f"client {number} was told {answer}"
        else:
            assert answer == expected[number], f"client {number} noticed"
    assert engines
    assert children_of(server.pid) == engines, "nothing was started again"
    assert clients.call("GET", "/health")[0] == 200
    assert clients.metric("kv_cache_blocks_held") == clients.metric("num_requests_running") == 0


@pytest.mark.parametrize("token", FAULTS)
def test_the_others_have_the_right_text(
    server: ServerProcess, clients: CompletionClients, expected: list[Answer], token: int
) -> None:
    """The poisoned one streams or does not, is greedy or draws."""
    before = clients.metric("failed_requests_total")
    assert_these_fail_alone(server, clients, expected, {token % 8 + 5: token})
    assert clients.metric("failed_requests_total") == before + 1


def test_several_at_once(server: ServerProcess, clients: CompletionClients, expected: list[Answer]) -> None:
    nans = clients.metric("nan_logits_total")
    assert_these_fail_alone(server, clients, expected, {7 * k + 1: token for k, token in enumerate(FAULTS)})
    assert clients.metric("nan_logits_total") == nans + 1
    assert clients.metric("divided_steps_total") > 0


def test_an_engine_that_stands_still_is_not_ready_until_it_goes_on(
    server: ServerProcess, clients: CompletionClients
) -> None:
    restarts = clients.metric("engine_restarts_total")
    body = {"prompt": [STANDS_STILL], "max_tokens": 4}
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(clients.call, "POST", "/v1/completions", body)
        while (answer := clients.call("GET", "/health/ready"))[0] == 200:
            assert not asked.done(), "the probe has seen nothing"
            time.sleep(0.02)
        assert answer[0] == 503
        assert "has work and does nothing" in str(answer[1])
        assert clients.call("GET", "/health/live")[0] == 200
        assert asked.result()[0] == 200
    while clients.call("GET", "/health/ready")[0] != 200:
        time.sleep(0.02)
    assert clients.metric("engine_restarts_total") == restarts


@pytest.mark.nightly
@pytest.mark.parametrize("repetition", range(20))
@pytest.mark.parametrize("token", FAULTS)
def test_again_and_again(
    server: ServerProcess, clients: CompletionClients, expected: list[Answer], token: int, repetition: int
) -> None:
    assert_these_fail_alone(server, clients, expected, {(repetition * 5 + token) % NUM_CLIENTS: token})
