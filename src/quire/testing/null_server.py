"""The whole HTTP server on a core that answers at once: `python -m quire.testing.null_server [--port N]`.

For measuring and loading the front end alone. Prints one line of JSON when it is ready: port, process ids, and the text
of each token that the core says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal

from quire.interfaces.server.options import ServerOptions
from quire.interfaces.server.transport.http import HttpServer
from quire.interfaces.server.transport.listener import listen
from quire.testing.fake_llm import fake_async_llm
from quire.testing.null_core import FIRST, NUM


async def serve(port: int, max_num_seqs: int, max_queued: int) -> None:
    engine = fake_async_llm(own_process=True, core="quire.testing.null_core:build", max_num_seqs=max_num_seqs)
    with listen("127.0.0.1", port) as listener:
        options = ServerOptions(max_num_queued_requests=max_queued, max_num_queued_tokens=10**9)
        http = HttpServer(options, listener, None)
        http.start()
        await engine.start()
        http.attach(engine)
        texts = [engine.renderer.token_text(token_id) for token_id in range(FIRST, FIRST + NUM)]
        ready = {"port": listener.getsockname()[1], "pid": os.getpid(), "texts": texts}
        print(json.dumps(ready), flush=True)
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        await ended.wait()
        await http.close()
        engine.shutdown()


def main() -> None:
    import uvloop

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--max-num-seqs", type=int, default=4096)
    parser.add_argument("--max-queued", type=int, default=10**6)
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.port, arguments.max_num_seqs, arguments.max_queued))


if __name__ == "__main__":
    main()
