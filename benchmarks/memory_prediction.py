"""What `quire plan` and an engine's start say that it will take, and what it takes when its cache is full (Linux, CPU).

    python benchmarks/memory_prediction.py [MODEL] [--kv-cache-memory-bytes 256MiB] [--load-format dummy]
                                           [--max-num-batched-tokens 512] [--max-num-seqs 16] [--max-model-len 1024]

The engine runs in a process of its own, whose resident memory (VmRSS) is read once prompts have filled the whole cache.
`plan` knows config.json alone; the start knows what loading took. Both are held against the same number.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from dataclasses import asdict, dataclass
from typing import Any

from quire import AsyncLLM, SamplingParams
from quire.config import EMBEDDED
from quire.interfaces.cli.plan import bytes_in_all

_MIB = 2**20


@dataclass(frozen=True)
class Prediction:
    """In bytes, of one engine."""

    by_plan: int
    by_start: int
    measured: int

    @property
    def errors(self) -> dict[str, float]:
        """In percent of what was measured."""
        pairs = {"plan_error_percent": self.by_plan, "start_error_percent": self.by_start}
        return {name: round(100 * (value / self.measured - 1), 1) for name, value in pairs.items()}


async def predict_and_measure(**options: Any) -> Prediction:
    """Runs an engine with these options until all blocks of its cache were used."""
    engine = AsyncLLM(device="cpu", engine_process=True, **options)
    try:
        await engine.start()
        await _fill(engine)
        statistics = await engine.statistics()
        config = engine.config
    finally:
        engine.shutdown()
    argv = [str(options["model"]), "--dtype", config.worker.dtype]
    for flag in ("max_num_batched_tokens", "max_num_seqs"):
        argv += [f"--{flag.replace('_', '-')}", str(getattr(config, flag))]
    return Prediction(
        by_plan=bytes_in_all(argv, int(statistics["kv_cache_bytes"])),
        by_start=int(statistics["most_resident_bytes"]),
        measured=int(statistics["resident_bytes"]),
    )


async def _fill(engine: AsyncLLM) -> None:
    """As many sequences at once as the engine takes, until all blocks were used."""
    config = engine.config
    source = random.Random(0)
    num_tokens = int((await engine.statistics())["num_blocks"]) * config.block_size
    length = min(config.max_model_len - 8, max(16, num_tokens // config.max_num_seqs - 8))
    sampling = SamplingParams(max_tokens=4, top_p=0.9, logprobs=20, ignore_eos=True, seed=0)
    waiting = [
        [source.randrange(config.facts.vocab_size) for _ in range(length)] for _ in range(2 + num_tokens // length)
    ]

    async def work() -> None:
        while waiting:
            async for _ in engine.generate({"prompt_token_ids": waiting.pop()}, sampling):
                pass

    await asyncio.gather(*(work() for _ in range(config.max_num_seqs)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default=EMBEDDED)
    parser.add_argument("--kv-cache-memory-bytes", default="256MiB")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=None)
    arguments = vars(parser.parse_args())
    prediction = asyncio.run(predict_and_measure(**arguments))
    in_mib = {name: round(value / _MIB) for name, value in asdict(prediction).items()}
    print(json.dumps({"model": arguments["model"], "unit": "MiB", **in_mib, **prediction.errors}))


if __name__ == "__main__":
    main()
