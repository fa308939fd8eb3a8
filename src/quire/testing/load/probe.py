"""`python -m quire.testing.load.probe PORT`: asks for /health/live ten times a second until its standard input closes.

A process of its own: a client that is busy with streams would measure itself. Prints the seconds of each answer.
"""

from __future__ import annotations

import http.client
import json
import select
import sys
import time

_PAUSE_SECONDS = 0.1


def main() -> None:
    waits = []
    while True:
        began = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
        connection.request("GET", "/health/live")
        assert connection.getresponse().read() is not None
        waits.append(time.monotonic() - began)
        connection.close()
        if select.select([sys.stdin], [], [], _PAUSE_SECONDS)[0]:
            print(json.dumps(waits))
            return


if __name__ == "__main__":
    main()
