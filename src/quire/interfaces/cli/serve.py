"""`quire serve`: the HTTP server."""

from __future__ import annotations

import argparse
import os
from typing import Any

from quire.config.option import options_of
from quire.errors import OptionError
from quire.interfaces.cli.engine_flags import add_engine_flags, add_model_argument, engine_options_of
from quire.interfaces.cli.option_flags import add_flags, typed_options
from quire.interfaces.server.options import ServerOptions

# the second one is vLLM's: a server that somebody meant to have a key must not start without
_KEY_VARIABLES = ("QUIRE_API_KEY", "VLLM_API_KEY")
# secrets that need not be seen in the list of processes
_SECRETS = {"QUIRE_ADMIN_API_KEY": "admin_api_key", "QUIRE_TENANT_SECRET": "tenant_secret"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [options]"
    add_model_argument(parser)
    group = parser.add_argument_group("server: address")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", default="8000", metavar="N", help="port; 0 means any free one (default: %(default)s)")
    add_flags(parser, ServerOptions, "server")
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    from quire.interfaces.gateway import run_server

    # answers are read while they are made, unlike those of a batch
    engine_options = {"target_inter_token_latency": None, **engine_options_of(arguments)}
    server_options = server_options_of(arguments)
    return run_server(engine_options, arguments.host, port_of(arguments.port), **server_options)


def server_options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Those that were typed, and the secrets of the environment."""
    typed = with_keys_of_environment(typed_options(vars(arguments), ServerOptions))
    for variable, name in _SECRETS.items():
        if variable in os.environ:
            if name in typed:
                raise OptionError(f"{name}: {variable} is set, and it was typed as well. Give one of them.")
            typed[name] = options_of(ServerOptions)[name].check(os.environ[variable])
    return typed


def with_keys_of_environment(typed: dict[str, Any]) -> dict[str, Any]:
    variable = next((name for name in _KEY_VARIABLES if name in os.environ), None)
    if variable is None:
        return typed
    key = os.environ[variable]
    if not key.strip():
        raise OptionError(f"{variable}: the key is empty. Give one, or unset it for a server without keys.")
    return {**typed, "api_keys": (*typed.get("api_keys", ()), *key.split())}


def port_of(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) > 65535:
        raise OptionError(f"--port {text}: must be a whole number between 0 and 65535.")
    return int(text)
