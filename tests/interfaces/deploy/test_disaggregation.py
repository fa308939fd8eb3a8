"""One request in two halves: what a client sees is what one server answers, and each half computes its own."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import msgspec
import pytest

from quire import AsyncLLM
from quire.interfaces import handover
from quire.interfaces.assembly import OutputDelta
from quire.interfaces.deploy.front import Front, Request
from quire.interfaces.deploy.http_copy import HttpCopy
from quire.interfaces.deploy.split_front import SplitFront
from quire.interfaces.gateway import create_app
from quire.interfaces.handover import FirstToken, unseal
from quire.interfaces.server.openai.kv_transfer import HandsOver
from quire.outputs import Logprob

BLOCK_SIZE = 16
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": 128,
    "max_model_len": 512,
    "engine_process": False,
}
QUESTION = [{"role": "user", "content": "What is seven plus five? Say it in words, and then say why that is so."}]
TEXT = "Once upon a time there was a king who had three daughters, and each of them had a garden of her own where"


class Server:
    """An engine behind its application, in this process."""

    def __init__(self, runner: asyncio.Runner, **options: Any) -> None:
        self.engine = AsyncLLM(**OPTIONS, **options)
        runner.run(self.engine.start())
        self.copy = copy_of(create_app(self.engine))

    async def numbers(self) -> dict[str, float]:
        return await self.engine.statistics()


class Halves:
    """A prefill and a decode server behind a front, and one that does all alone."""

    def __init__(self, folder: Path) -> None:
        self.runner = asyncio.Runner()
        store = f"file://{folder}"
        self.prefill = Server(self.runner, role="prefill", kv_store=store)
        self.decode = Server(self.runner, role="decode", kv_store=store)
        self.alone = Server(self.runner)
        self.front = SplitFront(front_of(self.prefill.copy), front_of(self.decode.copy))

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    def through(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        return self.run(said(self.front, path, body))

    def by_one(self, path: str, body: dict[str, Any], server: Server | None = None) -> tuple[int, str]:
        return self.run(said(front_of((server or self.alone).copy), path, body))

    def close(self) -> None:
        for server in (self.prefill, self.decode, self.alone):
            server.engine.shutdown()
        self.runner.close()


def copy_of(app: Any) -> HttpCopy:
    return HttpCopy("http://server.test", httpx.ASGITransport(app=app, raise_app_exceptions=False))


def front_of(*copies: Any) -> Front:
    by_name = {str(number): copy for number, copy in enumerate(copies)}
    front = Front(by_name.__getitem__)
    front.copies_are(by_name)
    return front


async def said(front: Any, path: str, body: dict[str, Any], key: str = "") -> tuple[int, str]:
    headers = [("content-type", "application/json"), *([("authorization", f"Bearer {key}")] if key else [])]
    head, parts = await front.answer(Request("POST", path, headers, json.dumps(body).encode()))
    return head.status, b"".join([part async for part in parts]).decode()


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Halves]:
    opened = Halves(tmp_path_factory.mktemp("store"))
    yield opened
    opened.close()


CHATS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 12},
    "sampled": {"seed": 5, "max_tokens": 12, "temperature": 1.0},
    "stream": {"temperature": 0, "max_tokens": 12, "stream": True, "stream_options": {"include_usage": True}},
    "log-probabilities": {"temperature": 0, "max_tokens": 6, "logprobs": True, "top_logprobs": 3},
    "stop": {"temperature": 0, "max_tokens": 40, "stop": ["e"]},
    "n": {"seed": 3, "max_tokens": 6, "n": 3},
    "penalties": {"temperature": 0, "max_tokens": 20, "frequency_penalty": 1.5, "min_tokens": 8},
    "form": {"temperature": 0, "max_tokens": 20, "structured_outputs": {"regex": "[a-z]{8}"}},
    "one token": {"temperature": 0, "max_tokens": 1},
    "length of the model": {"temperature": 0},
}


@pytest.mark.parametrize("fields", CHATS.values(), ids=CHATS)
def test_a_chat_is_that_of_one_server(halves: Halves, fields: dict[str, Any]) -> None:
    body = {"messages": QUESTION, **fields}
    path = "/v1/chat/completions"
    assert comparable(halves.through(path, body)) == comparable(halves.by_one(path, body))


TEXTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 12},
    "log-probabilities": {"temperature": 0, "max_tokens": 6, "logprobs": 2},
    "echo": {"temperature": 0, "max_tokens": 6, "logprobs": 2, "echo": True},
    "several": {"prompt": [TEXT, "A", TEXT[:60]], "temperature": 0, "max_tokens": 6},
    "stream": {"temperature": 0, "max_tokens": 12, "stream": True, "logprobs": 1},
    "beams": {"use_beam_search": True, "n": 3, "max_tokens": 6},
    "a mistake": {"temperature": -1},
}


@pytest.mark.parametrize("fields", TEXTS.values(), ids=TEXTS)
def test_a_completion_is_that_of_one_server(halves: Halves, fields: dict[str, Any]) -> None:
    body = {"prompt": TEXT, **fields}
    path = "/v1/completions"
    assert comparable(halves.through(path, body)) == comparable(halves.by_one(path, body))


MESSAGES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 12},
    "stream": {"temperature": 0, "max_tokens": 12, "stream": True},
    "stop": {"temperature": 0, "max_tokens": 40, "stop_sequences": ["e"]},
}


@pytest.mark.parametrize("fields", MESSAGES.values(), ids=MESSAGES)
def test_a_message_is_that_of_one_server(halves: Halves, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": f"What is eleven plus {len(fields)}? " * 3}], **fields}
    before = halves.run(halves.decode.numbers())["fetched_tokens_total"]
    status, answer = halves.through("/v1/messages", body)
    assert halves.run(halves.decode.numbers())["fetched_tokens_total"] > before
    status_of_one, of_one = halves.by_one("/v1/messages", body)
    assert status == status_of_one == 200
    assert message_of(answer) == message_of(of_one)


def message_of(answer: str) -> tuple[str, str]:
    """Its text, and why it ended."""
    if not answer.startswith("event: "):
        message = json.loads(answer)
        return message["content"][0]["text"], message["stop_reason"]
    events = [json.loads(event.partition("data: ")[2]) for event in answer.split("\n\n") if event]
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    return text, next(event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta")


def comparable(answer: tuple[int, str]) -> Any:
    """Without what differs from one answer to the next, and what tells where tokens of the prompt came from."""
    status, text = answer
    if not text.startswith("data: "):
        return status, _without_names(json.loads(text))
    *events, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    fields = [_without_names(json.loads(event.removeprefix("data: "))) for event in events]
    # which tokens come together depends on how busy everybody is
    return status, fields[-1].get("usage"), [_joined(fields, key) for key in ("delta", "text", "logprobs")]


def _without_names(fields: dict[str, Any]) -> dict[str, Any]:
    for name in ("id", "created"):
        fields.pop(name, None)
    (fields.get("usage") or {}).pop("prompt_tokens_details", None)
    return fields


def _joined(events: list[dict[str, Any]], key: str) -> list[Any]:
    """What all events say under this key, one behind the other."""
    said = [choice[key] for event in events for choice in event["choices"] if choice.get(key) is not None]
    if key == "logprobs":
        return [entry for one in said for entry in zip(one["tokens"], one["token_logprobs"], strict=True)]
    return ["".join(one if isinstance(one, str) else one.get("content", "") for one in said)]


def test_each_half_computes_its_own(halves: Halves) -> None:
    """Computed are L in all, and total is L + 1 where the decode server begins (A116)."""
    prompt = [(7 * place) % 90 + 40 for place in range(75)]
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 8}
    before = halves.run(halves.decode.numbers())
    status, answer = halves.through("/v1/completions", body)
    assert status == 200
    after = halves.run(halves.decode.numbers())
    assert after["fetched_tokens_total"] - before["fetched_tokens_total"] == 75
    # moved are the blocks of what is not there
    assert after["fetched_blocks_total"] - before["fetched_blocks_total"] == -(-75 // BLOCK_SIZE)
    # none is computed twice
    usage = json.loads(answer)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] == 75
    assert usage["completion_tokens"] == 8
    # what is here is not moved: four blocks are, and the one that has changed
    longer = {**body, "prompt": [*prompt, *range(50, 70)]}
    status, answer = halves.through("/v1/completions", longer)
    last = halves.run(halves.decode.numbers())
    num_here = 75 // BLOCK_SIZE
    assert last["fetched_blocks_total"] - after["fetched_blocks_total"] == -(-95 // BLOCK_SIZE) - num_here
    assert comparable((status, answer)) == comparable(halves.by_one("/v1/completions", longer))


# ---- kv_transfer_params, as proxies of others send them


def two_requests(halves: Halves, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], tuple[int, str]]:
    """Those of vLLM's example of a proxy (toy_proxy_server.py), and what it passes on."""
    first = dict(body)
    first["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    first["stream"] = False
    first["max_tokens"] = 1
    if "max_completion_tokens" in first:
        first["max_completion_tokens"] = 1
    first.pop("stream_options", None)
    first.pop("min_tokens", None)
    status, answer = halves.by_one(path, first, halves.prefill)
    assert status == 200, answer
    params = json.loads(answer).get("kv_transfer_params", {})
    second = {**body, "kv_transfer_params": params} if params else body
    return params, halves.by_one(path, second, halves.decode)


@pytest.mark.parametrize("name", ["greedy", "stream", "n", "penalties"])
def test_a_proxy_of_others_works(halves: Halves, name: str) -> None:
    body = {"messages": [{"role": "user", "content": f"Is {name} a number? " * 3}], **CHATS[name]}
    path = "/v1/chat/completions"
    before = halves.run(halves.decode.numbers())
    params, answer = two_requests(halves, path, body)
    after = halves.run(halves.decode.numbers())
    assert comparable(answer) == comparable(halves.by_one(path, body))
    assert {*params} == {"do_remote_decode", "do_remote_prefill", "handover", *PLACES}
    assert params["do_remote_prefill"] is True
    assert after["fetched_tokens_total"] > before["fetched_tokens_total"]


PLACES = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")


def refusal(answer: tuple[int, str]) -> str:
    status, text = answer
    assert status == 400, text
    error = json.loads(text)["error"]
    assert error["param"] == "kv_transfer_params"
    return error["message"]


def sealed_in_another_form() -> str:
    """By who has the secret, and another version of this."""
    content = msgspec.msgpack.encode({"version": 2, "tokens": [1]})
    return base64.urlsafe_b64encode(handover._tag(content) + content).decode()


@pytest.mark.parametrize("text", ["", "é", "AAA", "{}", sealed_in_another_form()])
def test_a_handover_of_another_kind_is_the_mistake_of_who_sends_it(halves: Halves, text: str) -> None:
    body = {"prompt": TEXT, "max_tokens": 2, "kv_transfer_params": {"do_remote_prefill": True, "handover": text}}
    assert "not what a server of this deployment" in refusal(halves.by_one("/v1/completions", body, halves.decode))


def test_a_handover_that_nobody_takes_holds_nothing(halves: Halves) -> None:
    """What the prefill server has computed lies in its cache and in the store, and leaves as anything else there."""
    first = {"prompt": f"Nobody asks for this. {TEXT}", "max_tokens": 1, "kv_transfer_params": HALF}
    assert halves.by_one("/v1/completions", first, halves.prefill)[0] == 200
    counts = halves.run(halves.prefill.engine.control("observe_blocks"))["counts_by_state"]
    assert not any(counts[state] for state in ("own", "shared", "kept", "pinned")), counts


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"do_remote_prefill": True, "remote_host": "10.0.0.9"}, "from no place that a request names"),
        ({"do_remote_prefill": True, "remote_port": 5600}, "from no place that a request names"),
        ({"do_remote_prefill": True, "remote_block_ids": [1, 2]}, "from no place that a request names"),
        ({"remote_engine_id": "of somebody else"}, "from no place that a request names"),
        ({"do_remote_prefill": True, "handover": "AAAA"}, "not what a server of this deployment has answered"),
        ({"do_remote_prefill": True, "handover": "%"}, "not what a server of this deployment has answered"),
        ({"do_remote_prefill": True, "handover": "A" * 300_000}, "more than"),
        ({"do_remote_prefill": "yes"}, "Expected `bool`"),
        ({"remote_addr": "10.0.0.9"}, "unknown field `remote_addr`"),
        ({"do_remote_prefill": True, "do_remote_decode": True}, "has one half here"),
        ({"do_remote_decode": True}, "this server is for the other half (role=decode)"),
    ],
)
def test_what_a_client_may_not_say(halves: Halves, params: dict[str, Any], reason: str) -> None:
    body = {"prompt": TEXT, "max_tokens": 2, "kv_transfer_params": params}
    assert reason in refusal(halves.by_one("/v1/completions", body, halves.decode))


def test_a_server_is_for_its_own_half(halves: Halves) -> None:
    body = {"prompt": TEXT, "max_tokens": 2, "kv_transfer_params": {"do_remote_prefill": True}}
    assert "(role=prefill)" in refusal(halves.by_one("/v1/completions", body, halves.prefill))
    assert "has no kv_store" in refusal(halves.by_one("/v1/completions", body))
    body = {"prompt": TEXT, "stream": True, "kv_transfer_params": {"do_remote_decode": True}}
    assert "not with stream=true" in refusal(halves.by_one("/v1/completions", body, halves.prefill))


def test_what_was_sampled_for_another_prompt_is_not_taken(halves: Halves) -> None:
    """Nor is anything found that was not computed for this one."""
    first = {"prompt": TEXT, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    params = json.loads(halves.by_one("/v1/completions", first, halves.prefill)[1])["kv_transfer_params"]
    other = {"prompt": f"Another {TEXT}", "max_tokens": 5, "temperature": 0}
    before = halves.run(halves.decode.numbers())
    answer = halves.by_one("/v1/completions", {**other, "kv_transfer_params": params}, halves.decode)
    assert comparable(answer) == comparable(halves.by_one("/v1/completions", other))
    after = halves.run(halves.decode.numbers())
    assert after["fetched_tokens_total"] == before["fetched_tokens_total"]
    # nor by somebody with another salt
    salted = {**first, "max_tokens": 5, "temperature": 0, "cache_salt": "other", "kv_transfer_params": params}
    assert halves.by_one("/v1/completions", salted, halves.decode)[0] == 200
    assert halves.run(halves.decode.numbers())["fetched_tokens_total"] == before["fetched_tokens_total"]


@pytest.mark.parametrize(
    "rules",
    [{"structured_outputs": {"regex": "[0-9]{8}"}}, {"logit_bias": {"70": 100}}, {"temperature": 1.0, "seed": 4}],
    ids=["form", "bias", "sampled"],
)
def test_a_first_token_of_other_rules_is_not_taken(halves: Halves, rules: dict[str, Any]) -> None:
    path = "/v1/completions"
    body = {"prompt": TEXT, "max_tokens": 5, "temperature": 0}
    first = {**body, "logit_bias": {"65": 100}, "max_tokens": 1, "kv_transfer_params": HALF}
    params = json.loads(halves.by_one(path, first, halves.prefill)[1])["kv_transfer_params"]
    asked = {**body, **rules}
    answer = halves.by_one(path, {**asked, "kv_transfer_params": params}, halves.decode)
    assert comparable(answer) == comparable(halves.by_one(path, asked))


def test_the_last_of_several_tokens_is_no_first_one(halves: Halves) -> None:
    path = "/v1/completions"
    body = {"prompt": TEXT, "max_tokens": 5, "temperature": 0}
    first = {**body, "max_tokens": 3, "kv_transfer_params": HALF}
    params = json.loads(halves.by_one(path, first, halves.prefill)[1])["kv_transfer_params"]
    [sealed] = unseal(params["handover"])
    assert sealed.token_id is None
    answer = halves.by_one(path, {**body, "kv_transfer_params": params}, halves.decode)
    assert comparable(answer) == comparable(halves.by_one(path, body))


def test_log_probabilities_of_all_tokens_are_no_reason_to_refuse(halves: Halves) -> None:
    """However many they are: what is too long to hand over is computed again."""
    scores = {token_id: Logprob(-1.0, 1) for token_id in range(40_000)}
    half = HandsOver("of a test")
    half._has_first = True
    half._tokens = [FirstToken(b"0" * 16) for _ in range(9_000)]
    for number in range(9_000):
        half.see(number, OutputDelta(0, [5], logprobs=[scores], finish_reason="length"))
    assert all(first.logprobs is None for first in half._tokens), "they are not kept in memory either"
    sealed = half.params().handover
    assert len(sealed) <= 2**18
    assert all(first.token_id is None for first in unseal(sealed))


def test_a_tenant_gets_nothing_of_another(halves: Halves, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a: one\nb: two\n")
    keys.chmod(0o600)
    options = {"api_key_file": str(keys), "tenant_secret": "of both servers"}
    prefill, decode = (
        front_of(copy_of(create_app(server.engine, **options))) for server in (halves.prefill, halves.decode)
    )
    front = SplitFront(prefill, decode)
    path = "/v1/completions"
    body = {"prompt": f"What one tenant said. {TEXT}", "max_tokens": 4, "temperature": 0}

    def num_fetched() -> float:
        return halves.run(halves.decode.numbers())["fetched_tokens_total"]

    before = num_fetched()
    _, answer = halves.run(said(prefill, path, {**body, "max_tokens": 1, "kv_transfer_params": HALF}, "one"))
    params = json.loads(answer)["kv_transfer_params"]
    # with all that the other one was answered, too
    taken = {**body, "kv_transfer_params": params}
    assert halves.run(said(decode, path, taken, "two"))[0] == 200
    assert num_fetched() == before
    assert halves.run(said(decode, path, taken, "one"))[0] == 200
    assert num_fetched() > before
    before = num_fetched()
    assert halves.run(said(front, path, {**body, "prompt": f"Another. {TEXT}"}, "two"))[0] == 200
    assert num_fetched() > before
    assert halves.run(said(front, path, body, "three"))[0] == 401


HALF = {"do_remote_decode": True}
