"""Images by URL (SEC-09, SEC-16): from named hosts and below a named folder. A trap on this machine counts hits."""

from __future__ import annotations

import asyncio
import gzip
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.security.bad_inputs.media import URLS

from quire.config.images import ImageConfig
from quire.errors import RequestError
from quire.interfaces.media_fetch import MOST_BYTES_OF_REQUEST, MediaFetcher, Place
from quire.renderer.images import MOST_BYTES

PLACE = "messages[2].content[1].image_url"
HOST = "images.test"
PUBLIC = "93.184.216.34"


class _Trap(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server = self.server
        server.hits.append((self.path, self.headers["Host"]))
        kind, _, argument = self.path.partition("?")[0].strip("/").partition("/")
        try:
            getattr(self, f"_{kind}")(argument)
        except (BrokenPipeError, ConnectionResetError):
            server.num_broken_off += 1

    def _answer(self, content: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _bytes(self, argument: str) -> None:
        self._answer(b"x" * int(argument))

    def _whole(self, argument: str) -> None:
        """Until the connection ends, without a length."""
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(b"whole")
        self.close_connection = True

    def _endless(self, argument: str) -> None:
        self.send_response(200)
        self.end_headers()
        while True:
            self.wfile.write(b"x" * 65536)

    def _slow(self, argument: str) -> None:
        self.send_response(200)
        self.end_headers()
        while True:
            self.wfile.write(b"x")
            time.sleep(0.02)

    def _cookie(self, argument: str) -> None:
        self._answer((self.headers["Cookie"] or "none").encode(), Set_Cookie="a=b")

    def _claims(self, argument: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", argument)
        self.end_headers()

    def _breaks(self, argument: str) -> None:
        self._claims("5")
        self.close_connection = True

    def _nothing(self, argument: str) -> None:
        self.wfile.write(b"hello\r\n\r\n")
        self.close_connection = True

    def _gzip(self, argument: str) -> None:
        self._answer(gzip.compress(bytes(50 << 20)), Content_Encoding="gzip")

    def _status(self, argument: str) -> None:
        self._answer(b"no", int(argument))

    def _to(self, argument: str) -> None:
        self._answer(b"", 302, Location=argument)

    def _around(self, argument: str) -> None:
        self._answer(b"", 307, Location=f"/around/{int(argument) + 1}")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def trap() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Trap)
    server.daemon_threads = True
    server.hits = []
    server.num_broken_off = 0
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


class Names:
    """A resolver that leads each name to addresses of its own, and counts."""

    def __init__(self, *answers: list[str]) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        return self._answers[min(len(self.asked), len(self._answers)) - 1]


def fetch(urls: list[str], names: Names | None = None, kind: str = "image", **options: Any) -> list[bytes]:
    options = {"hosts": (HOST,), "networks": ("127.0.0.1/32",), **options}
    fetcher = MediaFetcher(ImageConfig(**options), names or Names(["127.0.0.1"]))
    fetched = asyncio.run(fetcher.fetch(dict.fromkeys(urls, Place(PLACE, kind))))
    return [fetched[url] for url in urls]


def refused(urls: list[str], names: Names | None = None, **options: Any) -> str:
    with pytest.raises(RequestError) as caught:
        fetch(urls, names, **options)
    text = str(caught.value)
    assert text.startswith(PLACE), text
    assert (caught.value.param, caught.value.code) == (PLACE, "invalid_image_url")
    assert len(text) < 300
    assert "\n" not in text
    return text


def url(trap: ThreadingHTTPServer, path: str, host: str = HOST) -> str:
    return f"http://{host}:{trap.server_address[1]}/{path}"


def test_a_named_host_at_a_named_address(trap: ThreadingHTTPServer) -> None:
    names = Names(["127.0.0.1"])
    assert fetch([url(trap, "bytes/7"), url(trap, "whole")], names) == [b"x" * 7, b"whole"]
    assert fetch([url(trap, "bytes/3?a=b#c", "127.0.0.1")]) == [b"xxx"]
    port = trap.server_address[1]
    assert sorted(trap.hits) == [
        ("/bytes/3?a=b", f"127.0.0.1:{port}"), ("/bytes/7", f"{HOST}:{port}"), ("/whole", f"{HOST}:{port}"),
    ]  # fmt: skip


@pytest.mark.parametrize("options", [{"hosts": (), "networks": ()}, {"networks": ()}, {"networks": ("10.0.0.0/8",)}])
@pytest.mark.parametrize("given", URLS)
def test_nobody_is_asked(given: str, options: dict[str, Any], trap: ThreadingHTTPServer) -> None:
    """By default nothing; and with a host, no address of this machine or of a private network, however it is written.
    Names lead to this machine."""
    if given.startswith("data:"):
        return
    refused([given.replace("{trap}", f"127.0.0.1:{trap.server_address[1]}")], **options)
    assert trap.hits == []


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "100.64.0.1", "224.0.0.1",
        "255.255.255.255", "::1", "::", "fd00::1", "fe80::1", "fe80::1%eth0", "ff02::1", "::ffff:127.0.0.1",
        "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:0:0:0:0:80ff:fffe", "nonsense",
    ],
)  # fmt: skip
def test_names_lead_to_no_private_address(address: str) -> None:
    """Not even if one of several is public."""
    for addresses in ([address], [PUBLIC, address]):
        assert "leads to an address" in refused([f"http://{HOST}/"], Names(addresses), networks=())


@pytest.mark.parametrize(
    "given",
    [
        "http://{host}.evil.test/", "http://evil.test/{host}", "http://evil.test#{host}", "http://a@{host}/",
        "http://a:b@{host}/", "http://evil.test\\@{host}/", "http://{host}\\@evil.test/", "http://{host}%00.evil.test/",
        "http://{host} .evil.test/", "http://{host}./", "ftp://{host}/", "http:/{host}/", "{host}/x.png", "http://\u24d8mages.test/",
        "http://{host}:99999/", "https://{host}\t/", "http://[{host}]/", "gopher://{host}/", "http://{host}:a/",
    ],
)  # fmt: skip
def test_only_the_host_itself(given: str) -> None:
    names = Names([PUBLIC])
    refused([given.format(host=HOST)], names)
    assert names.asked == []


def test_the_name_is_asked_for_once(trap: ThreadingHTTPServer) -> None:
    """Who answers otherwise the second time (rebinding) is not asked a second time."""
    names = Names(["127.0.0.1"], ["10.0.0.1"])
    fetch([url(trap, "bytes/1")], names)
    assert names.asked == [HOST]


def test_redirections_stay_on_the_list(trap: ThreadingHTTPServer) -> None:
    assert fetch([url(trap, "to//bytes/5")]) == [b"xxxxx"]
    assert "not among the hosts" in refused([url(trap, "to/http://evil.test/")])
    assert "begins with http" in refused([url(trap, "to/file:///etc/passwd")])
    assert "redirected more than" in refused([url(trap, "around/0")])
    assert len(trap.hits) == 2 + 1 + 1 + 4
    names = Names(["127.0.0.1"], ["169.254.169.254"])
    assert "leads to an address" in refused([url(trap, f"to/http://{HOST}/latest/meta-data")], names)


def test_bytes_are_bounded(trap: ThreadingHTTPServer) -> None:
    for path in ("endless", f"claims/{MOST_BYTES + 1}"):
        assert f"more than {MOST_BYTES} bytes" in refused([url(trap, path)], fetch_seconds=60)
    many = [url(trap, f"bytes/{MOST_BYTES - number}") for number in range(3)]
    assert f"{MOST_BYTES_OF_REQUEST} bytes together" in refused(many, fetch_seconds=60)


def test_what_is_compressed_stays_so(trap: ThreadingHTTPServer) -> None:
    (content,) = fetch([url(trap, "gzip")])
    assert len(content) < 1 << 20


def test_time_is_bounded(trap: ThreadingHTTPServer) -> None:
    start = time.monotonic()
    assert "did not come within 0.3 seconds" in refused([url(trap, "slow"), url(trap, "bytes/1")], fetch_seconds=0.3)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("status/404", "status 404"),
        ("status/206", "status 206"),
        ("breaks", "broke off"),
        ("nothing", "did not answer"),
    ],
)
def test_a_host_that_answers_something_else(path: str, words: str, trap: ThreadingHTTPServer) -> None:
    assert words in refused([url(trap, path)])


def test_a_host_that_speaks_something_else(trap: ThreadingHTTPServer) -> None:
    """No certificate at all."""
    assert "cannot be reached" in refused([url(trap, "bytes/1").replace("http:", "https:")])
    assert trap.hits == []
    trap.shutdown()
    trap.server_close()
    assert "cannot be reached" in refused([url(trap, "bytes/1")])


def test_no_cookies_are_kept(trap: ThreadingHTTPServer) -> None:
    fetcher = MediaFetcher(ImageConfig(hosts=(HOST,), networks=("127.0.0.1",)), Names(["127.0.0.1"]))

    async def twice() -> list[bytes]:
        return [(await fetcher.fetch({url(trap, "cookie"): Place(PLACE)}))[url(trap, "cookie")] for _ in range(2)]

    assert asyncio.run(twice()) == [b"none", b"none"]


def test_a_proxy_of_the_environment_hears_nothing(trap: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    assert fetch([url(trap, "bytes/2")]) == [b"xx"]


# ---------------------------------------------------------------------------------------------- files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "in side"
    (inside / "deeper").mkdir(parents=True)
    (inside / "deeper" / "a.png").write_bytes(b"a picture")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "in side too").mkdir()
    (tmp_path / "in side too" / "b.png").write_bytes(b"secret")
    (inside / "out.png").symlink_to(tmp_path / "secret")
    (inside / "over.png").symlink_to("deeper/a.png")
    (inside / "circle").symlink_to("circle")
    os.mkfifo(inside / "pipe")
    return inside


def test_files_below_the_folder(folder: Path) -> None:
    given = [(folder / name).as_uri() for name in ("deeper/a.png", "over.png")]
    given.append(given[0].replace("file://", "file://localhost"))
    assert fetch(given, hosts=(), networks=(), folder=str(folder)) == [b"a picture"] * 3


@pytest.mark.parametrize(
    "name",
    [
        "out.png", "../secret", "deeper/../../secret", "%2e%2e/secret", "..%2fsecret", "circle", "pipe", "deeper", "",
        "nothing", "%00", "a" * 5000, "../in%20side%20too/b.png", "deeper/a.png%00.png",
    ],
)  # fmt: skip
def test_no_file_elsewhere(name: str, folder: Path) -> None:
    """Each in the same words, whether it is there or not."""
    text = refused([folder.as_uri() + "/" + name], folder=str(folder))
    assert text == refused([folder.as_uri() + "/nothing"], folder=str(folder))


@pytest.mark.parametrize(
    "given", ["file:///etc/passwd", "file:///proc/self/environ", "file://evil.test/etc/passwd", "file:etc/passwd",
              "FILE:///etc/passwd", "file:///dev/zero"],
)  # fmt: skip
def test_no_file_of_this_machine(given: str, folder: Path) -> None:
    refused([given], folder=str(folder))
    assert "no files are read here" in refused([given])


@pytest.mark.parametrize(
    ("given", "option"),
    [("https://host/a.png", "allowed_media_domains"), ("file:///a.png", "allowed_local_media_path")],
)
def test_the_option_has_the_name_that_its_user_writes(given: str, option: str) -> None:
    """As a keyword of LLM, and at a command line."""
    assert f"{option} (--{option.replace('_', '-')})" in refused([given], hosts=(), networks=())


def test_a_file_that_is_too_large(folder: Path) -> None:
    with (folder / "large.png").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    assert f"more than {MOST_BYTES} bytes" in refused([(folder / "large.png").as_uri()], folder=str(folder))


def test_a_path_is_no_url() -> None:
    assert "this is no URL, and a path alone is not opened" in refused(["cat.png"], networks=(), hosts=())


def test_what_is_refused_is_called_what_it_is(trap: ThreadingHTTPServer) -> None:
    for kind in ("image", "video"):
        with pytest.raises(RequestError) as caught:
            fetch([url(trap, "slow")], kind=kind, fetch_seconds=0.3)
        assert f"the {kind} did not come within" in str(caught.value)
        assert f"Send the {kind} itself as a data URL (data:{kind}/" in str(caught.value)
        assert caught.value.code == f"invalid_{kind}_url"
        with pytest.raises(RequestError, match=f"not among the hosts that {kind}s are fetched from"):
            fetch(["http://other.test/"], kind=kind)
