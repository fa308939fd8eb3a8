"""The process of a copy's server. Started by `ServedCopy` and never by hand; it dies with its parent."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from quire.errors import QuireError
from quire.interfaces.deploy.served_copy import ServerDocument
from quire.processes.documents import read_document
from quire.processes.parent_watch import die_with_parent, watch_parent

_HOST = "127.0.0.1"
_USER_MISTAKE = 2


def main() -> NoReturn:
    document = read_document(sys.stdin.buffer, ServerDocument)
    watch_parent()
    die_with_parent()
    from quire.interfaces.gateway import run_server

    try:
        status = run_server(document.engine_options, _HOST, document.port, **document.server_options)
    except QuireError as error:
        print(f"quire: error: {error}", file=sys.stderr)
        status = _USER_MISTAKE
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
