"""`python -m conformance`: the table of checks, the score, and exit status 0 if all of them passed."""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import openai

from conformance.clients import run_clients
from conformance.registry import all_checks
from conformance.run import FAILED, Result, run_checks, score, table
from conformance.target import Target

_EMBEDDED = Path(__file__).parents[1] / "src" / "quire" / "embedded"


def main() -> int:
    arguments = _parser().parse_args()
    with _server(arguments) as (url, key):
        if not arguments.only_clients:
            target = Target(url, api_key=key, model=arguments.model)
            checks = [one for one in all_checks() if arguments.match in f"{one.group}.{one.name}"]
            results = list(run_checks(target, checks))
            target.close()
            print(table(results))
            num_passed, num = score(results)
            num_skipped = len(results) - num
            print(f"\nopenai {openai.__version__}: {num_passed}/{num} passed, {num_skipped} skipped, at {url}")
            if arguments.json:
                Path(arguments.json).write_text(json.dumps([_row(result) for result in results], indent=1))
        else:
            results = []
        has_failed = any(result.outcome == FAILED for result in results)
        tokenizer = arguments.tokenizer or ("" if arguments.url else str(_EMBEDDED))
        if arguments.clients or arguments.only_clients:
            has_failed |= not run_clients(url, key, arguments.model, tokenizer)
    return int(has_failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__)
    parser.add_argument("--url", help="of the server; without it Quire's embedded model is served")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--model", default="", help="its name; by default the first that the server lists")
    parser.add_argument("--match", default="", help="only checks whose group.name holds this")
    parser.add_argument("--json", help="a file for the results")
    parser.add_argument("--tokenizer", default="", help="folder or name of the model's tokenizer, for --clients")
    parser.add_argument(
        "--clients", action="store_true", help="also the clients in conformance/clients (installs them)"
    )
    parser.add_argument("--only-clients", action="store_true", help="nothing but these")
    return parser


@contextlib.contextmanager
def _server(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Base URL and key; a server of its own ends with the block."""
    if arguments.url:
        yield arguments.url, arguments.api_key
        return
    from conformance.own_server import own_server

    with own_server(arguments.api_key or secrets.token_urlsafe(16)) as (server, key):
        yield server.wait_ready(300), key
        server.signal()
        server.wait()
        if "Traceback" in server.output:
            print(server.output, file=sys.stderr)
            raise SystemExit("the server logged a traceback")


def _row(result: Result) -> dict[str, object]:
    return {
        "group": result.check.group,
        "name": result.check.name,
        "text": result.check.text,
        "outcome": result.outcome,
        "reason": result.reason,
        "seconds": round(result.seconds, 3),
    }


if __name__ == "__main__":
    raise SystemExit(main())
