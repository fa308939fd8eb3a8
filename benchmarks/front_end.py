"""Microseconds per token in the front end: from the bytes of a step's output to the deltas of every stream's reader.

    python benchmarks/front_end.py [--streams 256] [--steps 400]

No core and no socket: encoded outputs with one token for each stream are fed in, and the next one comes when every
reader has its delta, so nothing is merged. Counts decoding, mailboxes, waking, detokenising; not the server's JSON. The
last line is one line of JSON.
"""

import argparse
import asyncio
import json
import os
import time

from quire.engine_client import AsyncEngineClient
from quire.interfaces.async_llm import AsyncLLM
from quire.message_encoding import decode_to_client, encode
from quire.messages import (
    EngineOutputs,
    EngineReady,
    EngineRequest,
    int_array,
    sequence_id_of,
)
from quire.sampling_params import SamplingParams
from quire.testing.fake_llm import fake_config, fake_renderer


class FedLink:
    """A link whose messages are put into `arrived` by hand."""

    def __init__(self, ready: EngineReady) -> None:
        self.arrived = [ready]
        self.request_ids: list[int] = []
        self._bell_out, self._bell_in = os.pipe()

    def send(self, message) -> None:
        if isinstance(message, EngineRequest):
            self.request_ids.append(message.request_id)

    def ring(self) -> None:
        os.write(self._bell_in, b"!")

    def receive(self, timeout=None) -> list:
        arrived, self.arrived = self.arrived, []
        if arrived and not isinstance(arrived[0], EngineReady):
            os.read(self._bell_out, 1)
        return [decode_to_client(one) if isinstance(one, bytes) else one for one in arrived]

    def descriptors(self) -> tuple[int, ...]:
        return (self._bell_out,)

    def statistics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        os.close(self._bell_in)
        os.close(self._bell_out)


async def microseconds_per_token(num_streams: int, num_steps: int) -> float:
    link = FedLink(EngineReady(max_model_len=1024, max_num_seqs=num_streams, num_blocks=1024, block_size=16))
    engine = AsyncLLM.from_config(fake_config(), renderer=fake_renderer(), client=AsyncEngineClient(link))
    await engine.start()
    num_read = 0

    async def read() -> None:
        nonlocal num_read
        async for _ in engine.stream("Hello", SamplingParams(max_tokens=None)):
            num_read += 1

    readers = [asyncio.create_task(read()) for _ in range(num_streams)]
    while len(link.request_ids) < num_streams:
        await asyncio.sleep(0)
    columns = int_array([sequence_id_of(request_id, 0) for request_id in link.request_ids])
    tokens = fake_renderer().encode("The quick brown fox jumps over the lazy dog. ")
    token_ids = int_array([tokens[number % len(tokens)] for number in range(num_streams)])
    frame = encode(EngineOutputs(step=1, sequence_ids=columns, token_ids=token_ids))
    start = time.process_time()
    for step in range(1, num_steps + 1):
        link.arrived.append(frame)
        link.ring()
        while num_read < step * num_streams:
            await asyncio.sleep(0)
    seconds = time.process_time() - start
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    engine.shutdown()
    return seconds * 1e6 / num_read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    import uvloop

    results = {}
    for name, run in (("asyncio", asyncio.run), ("uvloop", uvloop.run)):
        results[name] = round(run(microseconds_per_token(options.streams, options.steps)), 2)
        print(f"{name:<8} {results[name]:6.2f} us per token, {1e6 / results[name]:,.0f} tokens/s on one core")
    print(json.dumps({"benchmark": "front_end", "streams": options.streams, "us_per_token": results}))


if __name__ == "__main__":
    main()
