"""A server of your own on the engine client: token ids in, token ids out, one line of JSON each, no text at all.

python examples/custom_server.py --port 9100
echo '{"tokens": [10, 20, 30], "count": 5}' | nc 127.0.0.1 9100
"""

import argparse
import asyncio
import json
import sys

from quire import RequestError, SamplingParams
from quire.config import EngineOptions, resolve
from quire.engine_client import AsyncEngineClient, open_link
from quire.errors import EngineDeadError
from quire.interfaces.requests import Limits, RequestMaker
from quire.messages import EngineRequest


def request_of(line: bytes, maker: RequestMaker) -> EngineRequest:
    try:
        asked = json.loads(line)
        tokens, count = list(asked["tokens"]), asked["count"]
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(f'must be like {{"tokens": [10, 20], "count": 5}} ({error!r})') from error
    return maker.make(tokens, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))


async def serve(port: int, model: str) -> None:
    config, _ = resolve(EngineOptions(model=model))
    client = AsyncEngineClient(open_link(config, in_own_process=True))
    ready = await client.wait_ready()
    sizes = {"max_model_len": ready.max_model_len, "max_num_seqs": ready.max_num_seqs}
    limits = Limits(vocab_size=config.facts.vocab_size, max_logprobs=config.max_logprobs, **sizes)
    maker = RequestMaker(limits, bad_words_token_ids=lambda words: [])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for line in reader:
            try:
                async for delta in client.generate(request_of(line, maker)):
                    said = {"tokens": delta.token_ids, "end": delta.finish_reason, "error": delta.error}
                    writer.write(json.dumps(said).encode() + b"\n")
                    await writer.drain()
            except (RequestError, EngineDeadError) as error:
                writer.write(json.dumps({"tokens": [], "end": "error", "error": str(error)}).encode() + b"\n")
        writer.close()

    try:
        async with await asyncio.start_server(answer, "127.0.0.1", port) as server:
            print(f"listening on 127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
            while client.failure is None:
                await asyncio.sleep(0.1)
            sys.exit(f"the engine died: {client.failure}")
    finally:
        client.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=9100)
    parser.add_argument("--model", default="embedded")
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.port, arguments.model))
