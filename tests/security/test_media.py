"""Media and places in requests (SEC-09, SEC-10): nothing is served that takes them. Each is refused by name or is text
like any other, nothing is decoded, and nothing is fetched, looked up or opened: a guard in this process hears of every
connection, name and file."""

import asyncio
import base64
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from quire.interfaces.gateway import create_app
from quire.testing.fake_engine import fake_engine

from .bad_inputs.media import URLS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, EMBEDDINGS = "/v1/responses", "/v1/messages", "/v1/embeddings"
# whatever reads pictures, sounds or films
DECODERS = {"PIL", "cv2", "av", "imageio", "soundfile", "librosa", "torchvision", "torchaudio", "decord", "pydub"}
_CONNECTING = (
    "socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.sendto",
    "urllib.Request", "http.client.connect", "ftplib.connect", "subprocess.Popen", "os.system", "os.exec",
)  # fmt: skip
_NAMED = ("/etc/passwd", "environ", "win.ini")


class Guard:
    """Hears what the interpreter does, as long as it listens. An audit hook cannot be taken away again."""

    def __init__(self) -> None:
        self.is_listening = False
        self.heard: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_listening:
            return
        if event == "subprocess.Popen" and "checking_process" in repr(args):
            return  # forms are compiled there (a reference elsewhere is refused: bad_inputs/grammars.py)
        is_named = event == "open" and isinstance(args[0], str | bytes) and str(args[0]).endswith(_NAMED)
        if is_named or event in _CONNECTING:
            self.heard.append(f"{event} {args[:2]!r}"[:200])


_GUARD = Guard()


@pytest.fixture
def guard() -> Iterator[Guard]:
    loaded = DECODERS & set(sys.modules)
    _GUARD.heard.clear()
    _GUARD.is_listening = True
    yield _GUARD
    _GUARD.is_listening = False
    assert _GUARD.heard == []
    assert DECODERS & set(sys.modules) == loaded, "something was decoded"


class Client:
    """Of a server on a fake engine, whose tokens are the bytes of the prompt."""

    def __init__(self, http: httpx.AsyncClient, engine: Any) -> None:
        self._http = http
        self._engine = engine

    async def ask(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        answer = await self._http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        return answer.status_code, answer.json()

    def prompts(self) -> list[str]:
        """What reached the engine."""
        return [
            bytes(token for token in request.prompt_token_ids if token < 256).decode(errors="replace")
            for request in self._engine.fake.requests
        ]


def play(tmp_path: Path, test: Any) -> None:
    async def main() -> None:
        engine = await fake_engine(tmp_path / "model", max_model_len=8192)
        app = create_app(engine, files_folder=str(tmp_path / "files"))
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://quire.test") as http:
                await test(Client(http, engine))
        finally:
            await app.state.services.stop()
            app.state.services.close()
            engine.shutdown()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_the_guard_hears_what_it_is_for() -> None:
    import socket

    _GUARD.heard.clear()
    _GUARD.is_listening = True
    try:
        with socket.socket() as one:
            one.settimeout(0.2)
            with pytest.raises(OSError, match="refused"):
                one.connect(("127.0.0.1", 1))
        socket.getaddrinfo("127.0.0.1", 80)
        Path("/etc/passwd").read_bytes()
    finally:
        _GUARD.is_listening = False
    assert [line.split()[0] for line in _GUARD.heard] == ["socket.connect", "socket.getaddrinfo", "open"]


# ---------------------------------------------------------------------------------------------- parts

URL = "http://169.254.169.254/latest/meta-data/"
DATA = "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(64)).decode()
PARTS: list[dict[str, Any]] = [
    part
    for place in (URL, DATA, "file:///etc/passwd", "/etc/passwd")
    for part in (
        {"type": "image_url", "image_url": {"url": place}},
        {"type": "image_url", "image_url": place},
        {"type": "input_image", "image_url": place},
        {"type": "input_image", "file_id": "file-" + "0" * 32},
        {"type": "image", "image": place},
        {"type": "image", "source": {"type": "url", "url": place}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": place}},
        {"type": "image_pil", "image_pil": place},
        {"type": "image_embeds", "image_embeds": place},
        {"type": "audio_url", "audio_url": {"url": place}},
        {"type": "input_audio", "input_audio": {"data": place, "format": "wav"}},
        {"type": "video_url", "video_url": {"url": place}},
        {"type": "video", "video": place},
        {"type": "file", "file": {"file_data": place, "filename": "/etc/passwd"}},
        {"type": "file", "file": {"file_id": "file-" + "0" * 32}},
        {"type": "input_file", "file_url": place},
        {"type": "input_file", "file_data": place, "filename": "../x"},
        {"type": "document", "source": {"type": "url", "url": place}},
        {"type": "search_result", "source": place, "title": "x", "content": []},
        {"type": "container_upload", "file_id": "x"},
        {"image_url": {"url": place}},
        {"type": "text", "text": "What is this?", "image_url": {"url": place}},
        {"type": "input_text", "text": "What is this?", "image": place},
    )
]  # fmt: skip


def test_no_part_of_a_message_is_anything_but_text(tmp_path: Path, guard: Guard) -> None:
    async def test(client: Client) -> None:
        for part in PARTS:
            hi = {"type": "text", "text": "Hi"}
            for path, body, where in (
                (CHAT, {"messages": [{"role": "user", "content": [hi, part]}]}, "messages[0].content[1]"),
                (CHAT, {"messages": [{"role": "system", "content": [part]}]}, "messages[0].content[0]"),
                ("/tokenize", {"messages": [{"role": "user", "content": [part]}]}, "messages[0].content[0]"),
                (RESPONSES, {"input": [{"role": "user", "content": [part]}]}, "input[0].content[0]"),
                (MESSAGES, {"max_tokens": 4, "messages": [{"role": "user", "content": [part]}]}, "messages[0]"),
                (EMBEDDINGS, {"input": [part]}, "input"),
                (COMPLETIONS, {"prompt": [part]}, "prompt"),
            ):
                status, answer = await client.ask(path, body)
                if status == 200:
                    # a dialect whose text blocks may hold other fields reads the text alone
                    assert part.get("type") in ("text", "input_text"), (path, part)
                    assert path in (RESPONSES, MESSAGES), (path, part)
                    continue
                assert status == 400, (path, part, answer)
                error = answer["error"]
                assert (error.get("param") or error["message"]).startswith(where), (path, part, error)
                assert len(json.dumps(answer)) < 1024
        assert not any("169.254" in prompt or "PNG" in prompt for prompt in client.prompts())

    play(tmp_path, test)


WHOLE: dict[str, Any] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"prompt": "Hi"},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
}


def test_nor_is_anything_beside_the_content(tmp_path: Path, guard: Guard) -> None:
    async def test(client: Client) -> None:
        names = ("images", "image", "image_url", "audio", "videos", "video_url", "input_audio")
        for role, name in itertools.product(("user", "assistant", "tool"), names):
            message = {"role": role, "content": "Hi", "tool_call_id": "a", name: [URL]}
            status, answer = await client.ask(CHAT, {"messages": [*WHOLE[CHAT]["messages"], message]})
            assert status == 400
            assert answer["error"]["param"] == f"messages[1].{name}"
            # as the official client sends back what it got
            message[name] = None
            assert (await client.ask(CHAT, {"messages": [*WHOLE[CHAT]["messages"], message]}))[0] == 200

    play(tmp_path, test)


FIELDS: list[tuple[str, dict[str, Any]]] = [
    *((path, {name: [URL]}) for path in (CHAT, COMPLETIONS) for name in ("images", "videos", "multi_modal_data")),
    *((path, {name: URL}) for path in (CHAT, COMPLETIONS) for name in ("image", "image_url", "audio_url", "video_url")),
    *((path, {"mm_processor_kwargs": {"num_frames": 10**9}}) for path in (CHAT, COMPLETIONS)),
    *((path, {"media_io_kwargs": {"video": {"num_frames": -1}}}) for path in (CHAT, COMPLETIONS)),
    (COMPLETIONS, {"prompt_embeds": base64.b64encode(bytes(1000)).decode()}),
    (CHAT, {"modalities": ["text", "audio"], "audio": {"voice": "x", "format": "wav"}}),
    (CHAT, {"web_search_options": {}}),
    (RESPONSES, {"image": URL}),
    (RESPONSES, {"tools": [{"type": "web_search"}]}),
    (RESPONSES, {"tools": [{"type": "mcp", "server_label": "x", "server_url": URL}]}),
    (RESPONSES, {"tools": [{"type": "file_search", "vector_store_ids": ["x"]}]}),
    (RESPONSES, {"tools": [{"type": "image_generation"}]}),
    (RESPONSES, {"prompt": {"id": "x"}}),
    (MESSAGES, {"mcp_servers": [{"type": "url", "url": URL, "name": "x"}]}),
    (MESSAGES, {"tools": [{"type": "web_fetch_20250910", "name": "web_fetch"}]}),
    *(
        (path, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": place}}}})
        for path in (CHAT, COMPLETIONS)
        for place in (URL, "file:///etc/passwd")
    ),
]  # fmt: skip


def test_no_field_names_a_place_or_a_medium(tmp_path: Path, guard: Guard) -> None:
    async def test(client: Client) -> None:
        for path, body in WHOLE.items():
            assert (await client.ask(path, body))[0] == 200
        for path, fields in FIELDS:
            status, answer = await client.ask(path, {**WHOLE[path], **fields})
            assert status == 400, (path, fields, answer)
        assert len(client.prompts()) == len(WHOLE)

    play(tmp_path, test)


# ---------------------------------------------------------------------------------------------- texts

TEXTS = [
    f"![a picture]({URL})",
    f"![]({DATA})",
    f'<img src="{URL}"> <video src="{URL}"></video>',
    f"[link]({URL}) and {URL} and file:///etc/passwd",
    DATA,
    "data:video/jpeg;base64," + "AAAA," * 500,
    "<|image_pad|><image><|vision_start|><|video_pad|>[IMG]<audio>",
    "{{ url }} {% include '/etc/passwd' %} {{ open('/etc/passwd').read() }}",
    *(url.replace("{trap}", "127.0.0.1:1") for url in URLS[::3] if 0 < len(url) < 4000),
]


def test_a_place_in_a_text_is_text(tmp_path: Path, guard: Guard) -> None:
    """Pictures of Markdown among them: the model reads the letters, nobody else does."""

    async def test(client: Client) -> None:
        for number, text in enumerate(TEXTS):
            for path, body in (
                (CHAT, {"messages": [{"role": "user", "content": text}]}),
                (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}),
                (COMPLETIONS, {"prompt": text}),
                (RESPONSES, {"input": text, "store": False}),
                (MESSAGES, {"max_tokens": 4, "messages": [{"role": "user", "content": text}]}),
            ):
                status, answer = await client.ask(path, {"stream": False, **body})
                assert status == 200, (number, path, answer)
                assert text in client.prompts()[-1], (number, path)
            status, _ = await client.ask(EMBEDDINGS, {"input": text})
            assert status == 200

    play(tmp_path, test)


def test_a_large_one_is_refused_before_anything_is_made_of_it(tmp_path: Path, guard: Guard) -> None:
    async def test(client: Client) -> None:
        for kind, content in (
            ("video_url", "data:video/jpeg;base64," + "," * 4_000_000),
            ("image_url", "data:image/png;base64," + "A" * 6_000_000),
            ("input_audio", "data:audio/opus;base64," + "T2dn" * 1_500_000),
        ):
            value = {"data": content, "format": "wav"} if kind == "input_audio" else {"url": content}
            body = {"messages": [{"role": "user", "content": [{"type": kind, kind: value}]}]}
            status, answer = await client.ask(CHAT, body)
            assert (status, answer["error"]["param"]) == (400, "messages[0].content[0].type")
            assert len(json.dumps(answer)) < 1024
            # as a text it is longer than the model
            status, answer = await client.ask(CHAT, {"messages": [{"role": "user", "content": content}]})
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")

    play(tmp_path, test)


def test_lines_of_batches_go_the_same_way(tmp_path: Path, guard: Guard) -> None:
    async def test(client: Client) -> None:
        lines = [
            {"custom_id": str(number), "method": "POST", "url": CHAT, "body": {"messages": [
                {"role": "user", "content": [part]}]}}
            for number, part in enumerate(PARTS[:20])
        ]  # fmt: skip
        files = {"file": ("in.jsonl", "\n".join(map(json.dumps, lines)).encode())}
        uploaded = await client._http.post("/v1/files", data={"purpose": "batch"}, files=files)
        asked = {"input_file_id": uploaded.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
        _, batch = await client.ask("/v1/batches", asked)
        while batch["status"] not in ("completed", "failed"):
            await asyncio.sleep(0.01)
            batch = (await client._http.get(f"/v1/batches/{batch['id']}")).json()
        assert batch["request_counts"] == {"total": 20, "completed": 0, "failed": 20}
        told = await client._http.get(f"/v1/files/{batch['error_file_id']}/content")
        answers = [json.loads(line)["response"] for line in told.text.splitlines()]
        assert {answer["status_code"] for answer in answers} == {400}
        refused = await client._http.post("/v1/files", data={"purpose": "vision"}, files=files)
        assert refused.status_code == 400
        assert client.prompts() == []

    play(tmp_path, test)


# ---------------------------------------------------------------------------------------------- what could fetch

# a socket that two processes of the server share leads nowhere else
OWN_CLIENTS = ("interfaces/cli/", "interfaces/deploy/")
CLIENTS = re.compile(
    r"import (httpx|requests|aiohttp|ftplib)|urllib\.request|http\.client|huggingface_hub|create_connection"
    r"|open_connection\((?!sock=)"
)


def test_nothing_that_reads_requests_can_fetch() -> None:
    """Whatever the loop: no module between a socket and the engine knows a client of anything."""
    import quire

    root = Path(quire.__file__).parent
    wrong = [
        (str(file.relative_to(root)), found[0])
        for folder in ("interfaces/server", "renderer", "structured_output", "engine_core")
        for file in sorted((root / folder).rglob("*.py"))
        if (found := CLIENTS.search(file.read_text(encoding="utf-8")))
    ]
    assert wrong == []


def test_one_module_fetches_what_requests_name() -> None:
    """Beside the command line's own client, which asks the servers that its user names, and the front of a deployment,
    which asks the copies that it has started. The hub is asked for models that an operator names, by its own client."""
    import quire

    root = Path(quire.__file__).parent
    files = [str(file.relative_to(root)) for file in sorted(root.rglob("*.py")) if "httpx2" in file.read_text("utf-8")]
    assert [name for name in files if not name.startswith(OWN_CLIENTS)] == [
        "config/model_source.py",
        "interfaces/media_fetch.py",
    ]
