"""`quire api-key NAME`: makes a key, and the line that lets it into a server's key file.

The key goes to standard error, where it is read once, and the line, which holds its hash alone, to standard output:

    quire api-key reports >> keys.txt && chmod 600 keys.txt
    quire serve --api-key-file keys.txt
"""

from __future__ import annotations

import argparse
import secrets
import sys

from quire.errors import OptionError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="whose key it is: 1 to 64 letters, digits or . _ -")


def run(arguments: argparse.Namespace) -> int:
    # here, so that --help need not wait for the server's modules
    from quire.interfaces.gateway.access.api_keys import TENANT_NAME, hash_of

    name = arguments.name
    if not TENANT_NAME.fullmatch(name):
        raise OptionError(f"NAME {name[:80]!r}: must be 1 to 64 letters, digits or . _ -, such as team-a.")
    key = "qk-" + secrets.token_urlsafe(32)
    print(f"The key of {name}, which is shown only now:\n\n  {key}\n", file=sys.stderr)
    print(f"{name}: {hash_of(key.encode()).hex()}")
    return 0
