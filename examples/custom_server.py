"""A server of your own on the engine client: token ids in, token ids out, one line of JSON each, no text at all.

python examples/custom_server.py --port 9100
echo '{"tokens": [10, 20, 30], "count": 5}' | nc 127.0.0.1 9100
"""

import argparse
import asyncio
import itertools
import json

from quire import SamplingParams
from quire.config import EngineOptions, resolve
from quire.engine_client import AsyncEngineClient, open_link
from quire.messages import EngineRequest


async def serve(port: int, model: str) -> None:
    config, _ = resolve(EngineOptions(model=model))
    client = AsyncEngineClient(open_link(config, in_own_process=True, is_async=True))
    await client.wait_ready()
    numbers = itertools.count()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for line in reader:
            asked = json.loads(line)
            sampling = SamplingParams(temperature=0, max_tokens=asked["count"], ignore_eos=True)
            request = EngineRequest(request_id=next(numbers), prompt_token_ids=asked["tokens"], sampling=sampling)
            async for delta in client.generate(request):
                writer.write(json.dumps({"tokens": delta.token_ids, "end": delta.finish_reason}).encode() + b"\n")
                await writer.drain()
        writer.close()

    try:
        async with await asyncio.start_server(answer, "127.0.0.1", port) as server:
            print(f"listening on 127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
            await server.serve_forever()
    finally:
        client.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=9100)
    parser.add_argument("--model", default="embedded")
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.port, arguments.model))
