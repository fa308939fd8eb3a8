"""`quire deploy`: several copies of a server behind one front, on the machines of a Ray cluster."""

from __future__ import annotations

import argparse

from quire.config.engine_options import EngineOptions
from quire.errors import OptionError
from quire.interfaces.cli import serve
from quire.interfaces.cli.engine_flags import engine_options_of
from quire.interfaces.server.options import ServerOptions
from quire.routing import POLICIES

_NOT_BEHIND_A_FRONT = ("admin_port", "admin_host", "api_server_count", "proxy_addresses")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    serve.add_arguments(parser)
    group = parser.add_argument_group("deployment")
    group.add_argument("--replicas", default="1", metavar="N", help="copies of the server (default: %(default)s)")
    group.add_argument(
        "--cpus-per-replica",
        default="1",
        metavar="N",
        help="processors that Ray reserves for each, and its threads (default: 1)",
    )


def run(arguments: argparse.Namespace) -> int:
    from quire.interfaces.deploy.application import run_deployment

    engine_options = engine_options_of(arguments)
    server_options = serve.server_options_of(arguments)
    for name in _NOT_BEHIND_A_FRONT:
        if name in server_options:
            raise OptionError(f"{name}: belongs to one server, and there are several behind a front. Leave it out.")
    num_cpus = _count_of("cpus_per_replica", arguments.cpus_per_replica)
    engine_options.setdefault("num_threads", num_cpus)
    policy = engine_options.pop("routing_policy", EngineOptions.routing_policy)
    assert policy in POLICIES
    return run_deployment(
        engine_options,
        server_options,
        host=arguments.host,
        port=serve.port_of(arguments.port),
        num_replicas=_count_of("replicas", arguments.replicas),
        num_cpus=num_cpus,
        policy=policy,
        most_body_bytes=server_options.get("max_body_bytes", ServerOptions.max_body_bytes),
    )


def _count_of(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) <= 4096:
        raise OptionError(f"{name}={text}: must be a whole number from 1 to 4096.")
    return int(text)
