"""The whole HTTP server on a core that answers at once: `python -m tests.support.null_server [--port N]`.

For measuring and loading the front end alone. Prints one line of JSON when it is ready: port, process ids, and the text
of each token that the core says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys

from tests.support.null_core import FIRST, NUM

from quire.interfaces.gateway.app import http_server
from quire.interfaces.server.life.process import set_aside
from quire.interfaces.server.options import ServerOptions
from quire.interfaces.server.transport.listener import listen
from quire.observability.logging import configure_logging, flush_log
from quire.testing.fake_llm import fake_async_llm


async def serve(port: int, max_num_seqs: int, options: ServerOptions) -> None:
    engine = fake_async_llm(own_process=True, core="tests.support.null_core:build", max_num_seqs=max_num_seqs)
    with listen("127.0.0.1", port) as listener:
        http = http_server(options, listener, None)
        http.start()
        await engine.start()
        http.attach(engine)
        texts = [engine.renderer.token_text(token_id) for token_id in range(FIRST, FIRST + NUM)]
        ready = {"port": listener.getsockname()[1], "pid": os.getpid(), "texts": texts}
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        with set_aside():
            # one write: the log may share the pipe
            sys.stdout.write(json.dumps(ready) + "\n")
            sys.stdout.flush()
            await ended.wait()
        await http.close()
        engine.shutdown()


def main() -> None:
    import uvloop

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--max-num-seqs", type=int, default=4096)
    parser.add_argument("--max-queued", type=int, default=10**6)
    parser.add_argument("--keep-alive-seconds", type=int, default=75)
    parser.add_argument("--first-byte-seconds", type=float, default=10.0)
    parser.add_argument("--log", action="store_true", help="write the log that `quire serve` writes")
    arguments = parser.parse_args()
    if arguments.log:
        configure_logging(in_background=True)
    options = ServerOptions(
        max_num_queued_requests=arguments.max_queued,
        max_num_queued_tokens=10**9,
        keep_alive_seconds=arguments.keep_alive_seconds,
        first_byte_seconds=arguments.first_byte_seconds,
    )
    uvloop.run(serve(arguments.port, arguments.max_num_seqs, options))
    flush_log()


if __name__ == "__main__":
    main()
