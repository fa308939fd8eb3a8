"""`quire deploy`: several copies of a server behind one front, on the machines of a Ray cluster."""

from __future__ import annotations

import argparse

from quire.config.engine_options import EngineOptions
from quire.errors import OptionError
from quire.interfaces.cli import serve
from quire.interfaces.cli.engine_flags import engine_options_of
from quire.interfaces.deploy.application import Scale, run_deployment
from quire.routing import POLICIES

# of a number of copies that is not fixed
_FURTHER = ("target_ongoing_requests", "upscale_delay", "downscale_delay")
_NOT_BEHIND_A_FRONT = ("admin_port", "admin_host", "api_server_count", "proxy_addresses")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    serve.add_arguments(parser)
    group = parser.add_argument_group("deployment")
    group.add_argument("--replicas", metavar="N", help="copies of the server, always as many (default: 1)")
    group.add_argument(
        "--max-replicas",
        metavar="N",
        help="Ray Serve starts copies up to so many, and ends them again, as requests come and go",
    )
    group.add_argument("--min-replicas", metavar="N", help="the fewest, with --max-replicas (default: 1)")
    group.add_argument(
        "--target-ongoing-requests",
        metavar="N",
        help=f"with --max-replicas: requests in flight for each copy (default: {Scale.target_ongoing_requests:g})",
    )
    group.add_argument(
        "--upscale-delay",
        metavar="SECONDS",
        help=f"how long there must have been more before a copy is started (default: {Scale.upscale_delay:g})",
    )
    group.add_argument(
        "--downscale-delay",
        metavar="SECONDS",
        help=f"how long there must have been fewer before one is ended (default: {Scale.downscale_delay:g})",
    )
    group.add_argument(
        "--cpus-per-replica",
        default="1",
        metavar="N",
        help="processors that Ray reserves for each, and its threads (default: 1)",
    )


def run(arguments: argparse.Namespace) -> int:
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
        scale=_scale_of(arguments),
        num_cpus=num_cpus,
        policy=policy,
    )


def _scale_of(arguments: argparse.Namespace) -> Scale:
    if arguments.max_replicas is None:
        for name in ("min_replicas", *_FURTHER):
            if getattr(arguments, name) is not None:
                raise OptionError(f"{name}: the number of copies is fixed. Give max_replicas too, or leave it out.")
        return Scale(_count_of("replicas", arguments.replicas or "1"))
    if arguments.replicas is not None:
        raise OptionError("replicas, max_replicas: a number that is fixed, and one that is not. Leave one of them out.")
    most = _count_of("max_replicas", arguments.max_replicas)
    least = _count_of("min_replicas", arguments.min_replicas or "1")
    if least > most:
        raise OptionError(f"min_replicas={least}: must not be more than max_replicas={most}.")
    given = {name: getattr(arguments, name) for name in _FURTHER}
    return Scale(least, most, **{name: _number_of(name, text) for name, text in given.items() if text is not None})


def _number_of(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not (0 <= number <= 86400 and (number or name.endswith("delay"))):
        raise OptionError(f"{name}={text}: must be a number above 0 and at most 86,400; a delay may be 0.")
    return number


def _count_of(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) <= 4096:
        raise OptionError(f"{name}={text}: must be a whole number from 1 to 4096.")
    return int(text)
