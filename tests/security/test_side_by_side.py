"""Requests that share a server and nothing else, and what listens besides it (SEC-02, 03, 13, 20, 21, 24, 25)."""

import concurrent.futures
import json
import os
import re
import stat
from pathlib import Path

import psutil
import pytest

from .bad_inputs.case import CHAT, COMPLETIONS, JSON
from .conftest import MAX_MODEL_LEN


@pytest.fixture
def complete(ask):
    """The answer to a completion, whatever it is."""

    def complete(headers=JSON, **fields):
        status, _, body = ask("POST", COMPLETIONS, json.dumps({"temperature": 0, **fields}).encode(), headers)
        return status, json.loads(body)

    return complete


def at_once(function, arguments):
    with concurrent.futures.ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(function, arguments))


def test_a_hundred_requests_with_the_same_id_are_a_hundred_requests(complete):
    headers = JSON | {"X-Request-Id": "same"}
    prompts = [f"The number {number} and" for number in range(100)]
    alone = {prompt: complete(prompt=prompt, max_tokens=6)[1]["choices"][0]["text"] for prompt in prompts[::10]}
    answers = at_once(lambda prompt: complete(headers, prompt=prompt, max_tokens=6, request_id="same"), prompts)
    assert [status for status, _ in answers] == [200] * 100
    assert len({answer["id"] for _, answer in answers}) == 100
    told = dict(zip(prompts, (answer["choices"][0]["text"] for _, answer in answers), strict=True))
    assert {prompt: told[prompt] for prompt in alone} == alone


def test_what_the_cache_can_never_hold_is_refused_at_once(complete):
    status, answer = complete(prompt=[5] * 400, max_tokens=MAX_MODEL_LEN)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    for fields in ({"n": 128, "max_tokens": 500}, {"prompt": [[5] * 300] * 256, "max_tokens": 1}):
        status, answer = complete(**{"prompt": [5] * 300, "max_tokens": 2, **fields})
        assert status in (200, 400, 429), answer


def test_the_largest_log_probabilities_of_the_longest_prompts(complete):
    prompts = [[5 + number] * (MAX_MODEL_LEN - 2) for number in range(8)]
    answers = at_once(lambda prompt: complete(prompt=prompt, max_tokens=1, prompt_logprobs=20, logprobs=20), prompts)
    assert [status for status, _ in answers] == [200] * 8
    assert {len(answer["choices"][0]["prompt_logprobs"]) for _, answer in answers} == {MAX_MODEL_LEN - 2}


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_ids_between_tokenizer_and_vocabulary_are_not_written_behind_the_end(complete, name):
    """2,048 rows, the last of which may have no text."""
    ids = {"logit_bias": {"2047": 5}}.get(name, [2047])
    status, answer = complete(prompt="Hi", max_tokens=3, min_tokens=2, **{name: ids})
    assert status in (200, 400), answer


def descendants(server):
    parent = psutil.Process(server.pid)
    return [parent, *parent.children(recursive=True)]


def test_nothing_listens_but_the_servers_own_port(server, ask):
    ask("POST", CHAT, b'{"messages":[{"role":"user","content":"Hi"}],"max_tokens":1,"guided_regex":"a"}', JSON)
    listening = [
        connection.laddr
        for process in descendants(server)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert [f"{host}:{port}" for host, port in listening] == [server.address]


def test_nobody_can_connect_to_the_sockets_inside(server):
    """Their files are gone since both ends have met."""
    names = {
        connection.laddr
        for process in descendants(server)
        for connection in process.net_connections("unix")
        if connection.laddr
    }
    still_there = [name for name in names if os.path.exists(str(name).lstrip("@\0"))]
    assert not still_there


def test_no_file_of_the_server_is_open_to_others(server):
    for process in descendants(server):
        for file in process.open_files():
            if "quire" in file.path and file.mode not in ("r", "rb") and not file.path.endswith(".log"):
                assert not Path(file.path).stat().st_mode & (stat.S_IWOTH | stat.S_IWGRP), file.path


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/health", "/metrics", "/"])
def test_no_page_of_another_origin_is_invited(ask, method, path):
    headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": method}
    _, answer, _ = ask(method, path, b"", headers)
    assert "access-control-allow-origin" not in answer


def test_a_form_of_another_page_is_no_request(ask):
    """Browsers send these types without asking."""
    body = json.dumps({"prompt": "Hi", "max_tokens": 1}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert ask("POST", COMPLETIONS, body, {"Content-Type": kind})[0] == 415


def test_a_secret_is_said_nowhere(server, ask):
    """Prompts do not reach the log, the metrics or an error."""
    nonces = [f"nonce{number:04d}zq" for number in range(10)]
    for nonce in nonces:
        ask("POST", COMPLETIONS, json.dumps({"prompt": nonce, "max_tokens": 2, "user": nonce}).encode(), JSON)
        ask("POST", COMPLETIONS, json.dumps({"prompt": [nonce], "temperature": 5}).encode(), JSON)
    metrics = ask("GET", "/metrics", b"", {})[2].decode()
    assert not re.search("|".join(nonces), server.output + metrics)
