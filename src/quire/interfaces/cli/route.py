"""`quire route`: one address in front of servers that compute prompts and servers that go on from them."""

from __future__ import annotations

import argparse

from quire.config.engine_options import EngineOptions
from quire.interfaces.cli.config_file import add_config
from quire.interfaces.cli.engine_flags import add_log_level
from quire.interfaces.cli.option_flags import add_flags, typed_options
from quire.interfaces.cli.serve import port_of, with_keys_of_environment
from quire.interfaces.deploy.route_options import RouteOptions
from quire.routing import POLICIES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefill", action="append", required=True, metavar="URL", help="a server with --role prefill; may be repeated"
    )
    parser.add_argument(
        "--decode", action="append", required=True, metavar="URL", help="a server with --role decode; may be repeated"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", default="8000", metavar="N", help="port; 0 means any free one (default: %(default)s)")
    parser.add_argument(
        "--routing-policy",
        default=EngineOptions.routing_policy,
        choices=list(POLICIES),
        help="which of several servers of a kind gets a request (default: %(default)s)",
    )
    add_config(parser)
    add_flags(parser, RouteOptions, "front")
    add_log_level(parser)


def run(arguments: argparse.Namespace) -> int:
    from quire.interfaces.deploy.route import run_route

    typed = with_keys_of_environment(typed_options(vars(arguments), RouteOptions))
    return run_route(
        arguments.prefill,
        arguments.decode,
        RouteOptions(**typed),
        host=arguments.host,
        port=port_of(arguments.port),
        policy=arguments.routing_policy,
    )
