"""`quire trace`: the last decisions of a running server as a file that ui.perfetto.dev opens."""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from quire.errors import EngineError, OptionError, one_line

_KEY_VARIABLE = "QUIRE_API_KEY"
_PATH = "/v1/observe/trace"
_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server (default: %(default)s)")
    parser.add_argument(
        "--output", "-o", default="quire.trace.json", metavar="FILE", help="file to write (default: %(default)s)"
    )
    parser.add_argument(
        "--api-key", default=os.environ.get(_KEY_VARIABLE), metavar="KEY",
        help=f"key of the server, if it has some; {_KEY_VARIABLE} in the environment does the same",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    url = _address_of(arguments.url)
    content = _fetch(url, arguments.api_key)
    events = len(json.loads(content)["traceEvents"])
    try:
        Path(arguments.output).write_bytes(content)
    except OSError as error:
        raise OptionError(
            f"--output {arguments.output}: {error.strerror}. Choose a file that can be written."
        ) from None
    print(f"{arguments.output}: {events:,} events. Open it on https://ui.perfetto.dev or in chrome://tracing.")
    return 0


def _address_of(text: str) -> str:
    """The endpoint of a server that is named by its root, or by its /v1 as clients want it."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise OptionError(f"--url {text}: must be an address such as http://127.0.0.1:8000.")
    root = text.rstrip("/").removesuffix("/v1")
    return root + _PATH


def _fetch(url: str, key: str | None) -> bytes:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_SECONDS) as answer:
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        raise EngineError(f"{url}: the server answered {error.code}: {_message_of(error.read())}") from None
    except OSError as error:
        raise EngineError(f"{url}: no answer ({one_line(error)}). Is the server running there?") from None


def _message_of(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "no Quire server of this version is there"
