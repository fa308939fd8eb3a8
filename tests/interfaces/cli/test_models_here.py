"""quire pull, list and rm against a hub of our own: a small server with the addresses that the hub's client asks."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

COMMIT = "a" * 40
# the hub's client counts in pieces of 10 MiB
WEIGHTS = b"weights." * 3_000_000
FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": WEIGHTS, "README.md": b"not fetched"}


class Hub(ThreadingHTTPServer):
    """One model, `org/small`. Cuts a download of its weights short once, or refuses it, when told to."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.is_cutting = False
        self.is_refusing = False
        self.ranges = []
        self.fetched = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(sends_body=False)

    def do_GET(self):
        self.answer(sends_body=True)

    def answer(self, sends_body):
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/small"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            info = {"id": "org/small", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
            return self.send(json.dumps(tree if "/tree/" in path else info).encode(), sends_body=sends_body)
        name = path.rpartition("/")[2]
        if not path.startswith("/org/small/resolve/") or name not in FILES:
            return self.send(b"{}", status=404, headers={"X-Error-Code": "RepoNotFound"}, sends_body=sends_body)
        data = FILES[name]
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = 0
        if sends_body and self.server.is_refusing and name == "model.safetensors":
            return self.send(b"", status=403, sends_body=True)
        if span := self.headers.get("Range"):
            start = int(span.removeprefix("bytes=").partition("-")[0])
            self.server.ranges.append((name, start))
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if sends_body:
            self.server.fetched.append(name)
        is_cut = sends_body and self.server.is_cutting and name == "model.safetensors"
        return self.send(data[start:], status=206 if start else 200, headers=headers, sends_body=sends_body, cut=is_cut)

    def send(self, data, *, status=200, headers=None, sends_body, cut=False):
        self.send_response(status)
        for name, value in {"Content-Type": "application/octet-stream", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if sends_body:
            self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.wfile.flush()
            self.server.is_cutting = False
            self.close_connection = True


@pytest.fixture
def hub():
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def quire(hub, tmp_path):
    """quire(*words): (exit status, what it said)."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}",
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DOWNLOAD_TIMEOUT": "5",
        "NO_PROXY": "127.0.0.1",
    }
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HUGGINGFACE_HUB_CACHE"):
        environment.pop(name, None)

    def call(*words, **changes):
        command = [sys.executable, "-m", "quire", *words]
        done = subprocess.run(
            command,
            env={**environment, **changes},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout + done.stderr

    return call


def test_a_model_comes_is_listed_and_goes(hub, quire, tmp_path):
    status, said = quire("pull", "org/small")
    assert status == 0, said
    assert "quire run org/small" in said
    assert sorted(hub.fetched) == ["config.json", "model.safetensors"]
    status, said = quire("list")
    assert status == 0, said
    (row,) = (line for line in said.splitlines() if line.startswith("org/small"))
    assert "24.0 MB" in row
    assert "embedded" in said
    # a second time there is nothing to fetch
    assert quire("pull", "org/small")[0] == 0
    assert len(hub.fetched) == 2
    status, said = quire("rm", "org/small")
    assert (status, "--yes" in said) == (2, True)
    assert quire("rm", "org/small", "--yes")[0] == 0
    assert "org/small" not in quire("list")[1]
    assert not list((tmp_path / "hub").rglob("model.safetensors"))


def test_a_copy_under_another_name_stays(quire, tmp_path):
    """A fork has the history of what it was made of, so the same names of revisions."""
    assert quire("pull", "org/small")[0] == 0
    models = tmp_path / "hub" / "hub"
    names = [f"fork{number}/small" for number in range(4)]
    for name in names:
        shutil.copytree(models / "models--org--small", models / f"models--{name.replace('/', '--')}", symlinks=True)
    while names:
        assert quire("rm", names.pop(), "--yes")[0] == 0
        listed = [line.split()[0] for line in quire("list")[1].splitlines()]
        assert [name for name in listed if name.endswith("/small")] == sorted([*names, "org/small"])


def test_a_download_goes_on_where_the_connection_broke(hub, quire, tmp_path):
    hub.is_cutting = True
    status, said = quire("pull", "org/small")
    assert status == 0, said
    assert not hub.is_cutting
    assert hub.ranges == [("model.safetensors", 10 * 2**20)]
    (weights,) = {path.resolve() for path in (tmp_path / "hub").rglob("model.safetensors")}
    assert weights.read_bytes() == WEIGHTS


def test_files_that_came_are_not_fetched_again(hub, quire):
    hub.is_refusing = True
    status, said = quire("pull", "org/small")
    assert status == 2, said
    assert "Traceback" not in said
    hub.is_refusing = False
    hub.fetched.clear()
    assert quire("pull", "org/small")[0] == 0
    assert hub.fetched == ["model.safetensors"]


def test_mistakes_are_one_line(quire, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    for words, part in (
        (("pull", "org/missing"), "org/missing"),
        (("pull", "../etc/passwd"), "no name of the hub"),
        (("pull", str(folder)), "here already"),
        (("rm", str(folder), "--yes"), "no such model was fetched"),
        (("rm", "embedded", "--yes"), "no such model was fetched"),
    ):
        status, said = quire(*words)
        assert status == 2, said
        assert part in said
        assert "Traceback" not in said
    assert folder.is_dir()
