"""`quire serve`: the HTTP server."""

from __future__ import annotations

import argparse
import math
import os
from typing import Any

from quire.errors import OptionError
from quire.interfaces.cli.engine_flags import add_engine_flags, add_model_argument, engine_options_of

_KEY_VARIABLE = "QUIRE_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [options]"
    add_model_argument(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", default="8000", metavar="N", help="port; 0 means any free one (default: %(default)s)")
    group.add_argument(
        "--api-key", dest="api_keys", action="append", default=[], metavar="KEY",
        help=f"key that clients must send; may be given several times. {_KEY_VARIABLE} in the environment "
        "does the same and is not seen in the list of processes",
    )  # fmt: skip
    group.add_argument(
        "--allowed-origin", dest="allowed_origins", action="append", default=[], metavar="URL",
        help="web page that may call this server from a browser; may be given several times",
    )  # fmt: skip
    group.add_argument("--strict", action="store_true", help="refuse requests with unknown fields")
    group.add_argument(
        "--shutdown-timeout", default="0", metavar="SECONDS",
        help="how long running requests may go on after a first signal (default: %(default)s)",
    )  # fmt: skip
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    from quire.interfaces.server import run_server

    engine_options, server_options = engine_options_of(arguments), _server_options_of(arguments)
    return run_server(engine_options, arguments.host, _port_of(arguments.port), **server_options)


def _server_options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    keys = [("--api-key", key) for key in arguments.api_keys]
    if _KEY_VARIABLE in os.environ:
        keys.append((_KEY_VARIABLE, os.environ[_KEY_VARIABLE]))
    for name, key in keys:
        if not key.strip():
            raise OptionError(f"{name}: the key is empty. Give one, or leave it out for a server without keys.")
    return {
        "api_keys": [key for _, key in keys],
        "allowed_origins": arguments.allowed_origins,
        "strict": arguments.strict,
        "shutdown_timeout": _seconds_of(arguments.shutdown_timeout),
    }


def _port_of(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) > 65535:
        raise OptionError(f"--port {text}: must be a whole number between 0 and 65535.")
    return int(text)


def _seconds_of(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise OptionError(f"--shutdown-timeout {text}: must be a number of seconds, 0 or more.")
    return seconds
