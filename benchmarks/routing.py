"""How requests are shared out over copies of the engine: what a decision takes, what caches are worth, how even it is.

    python benchmarks/routing.py [--only PART_OF_NAME] [--quick]

Parts: a decision among 64 replicas; a hot prefix in a simulation; sessions of five turns on real engines (the embedded
model), one engine against two under each policy; a hot prefix on two real engines; one of two killed under load. Ends
in one line of JSON. The acceptance: a decision takes at most 50 us, two engines have 95 % of the hits of one, and the
one with most of the load of a hot prefix has at most 1.3 times the mean.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from quire import AsyncLLM, SamplingParams
from quire.errors import EngineError
from quire.routing import Router

BLOCK = 16
POLICIES = ("least_time", "least_loaded", "round_robin")
ENGINE = {"max_model_len": 1024, "num_gpu_blocks_override": 2000, "device": "cpu"}
NUM_SESSIONS, NUM_TURNS = 20, 5
HOT_SHARE = 10 / 11


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts whose name contains this")
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    arguments = parser.parse_args()
    size = 4 if arguments.quick else 1
    parts: dict[str, Callable[[], Any]] = {
        "decision": lambda: decision(20_000 // size),
        "hot prefix, simulated": lambda: hot_simulated(20_000 // size),
        "sessions": lambda: asyncio.run(sessions()),
        "hot prefix, two engines": lambda: asyncio.run(hot(440 // size)),
        "killed": lambda: asyncio.run(killed(200 // size)),
    }
    results = {}
    for name, part in parts.items():
        if arguments.only in name:
            results[name] = part()
            print(f"{name}: {results[name]}", flush=True)
    print(json.dumps(results))


# ------------------------------------------------------------------------------------------ the library alone


def decision(num: int) -> dict[str, float]:
    """Microseconds among 64 replicas, for prompts of 2,048 tokens of which several hold different parts."""
    router = Router("least_time", BLOCK)
    rng = random.Random(1)
    for number in range(64):
        router.add(number, seconds_per_token=1e-4, seconds_per_step=0.01)
    prompts = [[rng.getrandbits(64) for _ in range(128)] for _ in range(300)]
    for prompt in prompts:
        for _ in range(3):
            router.stored(rng.randrange(64), prompt[: rng.randrange(1, 129)])
    took = []
    for name in range(num):
        prompt = prompts[rng.randrange(len(prompts))]
        began = time.perf_counter()
        choice = router.choose(prompt, 2050)
        took.append((time.perf_counter() - began) * 1e6)
        router.begin(name, choice, prompt, 2050)
        router.end(name - 300)
    took.sort()
    return {"median_us": round(statistics.median(took), 1), "p95_us": round(took[int(0.95 * num)], 1)}


def hot_simulated(num: int, size: int = 8) -> dict[str, float]:
    """A prefix that ten of eleven requests begin with. Each request takes the same time once it is begun; 128 are open.
    The largest load of a replica over the mean, on average and over all requests, and the hits."""
    found = {}
    for policy in POLICIES:
        router = Router(policy, BLOCK)
        rng = random.Random(1)
        for number in range(size):
            router.add(number, seconds_per_token=1e-4, seconds_per_step=0.01)
        prefix = list(range(1, 65))
        open_names: deque[int] = deque()
        ratios, num_cached, num_tokens = [], 0, 0
        for name in range(num):
            own = [rng.getrandbits(64) for _ in range(4)]
            blocks = [*prefix, *own] if rng.random() < HOT_SHARE else [rng.getrandbits(64) for _ in range(68)]
            choice = router.choose(blocks, 68 * BLOCK + 1)
            router.begin(name, choice, blocks, 68 * BLOCK + 1)
            router.stored(choice.replica, blocks)
            router.first_token(name)
            num_cached += choice.num_cached_tokens
            num_tokens += 68 * BLOCK + 1
            open_names.append(name)
            if len(open_names) > 128:
                router.end(open_names.popleft())
                loads = [replica.num_sequences for replica in router.replicas()]
                ratios.append(max(loads) * size / sum(loads))
        begun = [replica.num_begun for replica in router.replicas()]
        found[policy] = {
            "max_over_mean_in_flight": round(statistics.fmean(ratios), 3),
            "max_over_mean_served": round(max(begun) * size / sum(begun), 3),
            "hit_rate": round(num_cached / num_tokens, 3),
        }
    return found


# ------------------------------------------------------------------------------------------ real engines


async def sessions() -> dict[str, float]:
    """Chats of five turns that send all that was said, twenty at once: the share of their prompt tokens that were
    found in a cache."""
    rates = {"one engine": await hit_rate({})}
    for policy in POLICIES:
        rates[policy] = await hit_rate({"data_parallel_size": 2, "routing_policy": policy})
    rates["least_time, of one engine's"] = round(rates["least_time"] / rates["one engine"], 3)
    return rates


async def hit_rate(options: dict[str, Any]) -> float:
    async with AsyncLLM(**ENGINE, **options) as engine:
        counts: Counter[str] = Counter()

        async def session(number: int) -> None:
            rng = random.Random(number)
            said = [rng.randrange(3, 250) for _ in range(60)]
            for _ in range(NUM_TURNS):
                output = await whole(engine, said, 24)
                counts["prompt"] += len(said)
                counts["cached"] += output.num_cached_tokens or 0
                said = [*said, *output.outputs[0].token_ids, *(rng.randrange(3, 250) for _ in range(40))]
                await asyncio.sleep(rng.random() * 0.05)

        await asyncio.gather(*map(session, range(NUM_SESSIONS)))
        return round(counts["cached"] / counts["prompt"], 3)


async def hot(num: int) -> dict[str, float]:
    """A prefix at ten times the load of all others together, 32 requests at a time."""
    async with AsyncLLM(**ENGINE, data_parallel_size=2) as engine:
        prefix = [random.Random(0).randrange(3, 250) for _ in range(320)]
        gate = asyncio.Semaphore(32)
        ratios: list[float] = []

        async def request(number: int) -> None:
            rng = random.Random(number)
            own = [rng.randrange(3, 250) for _ in range(40)]
            async with gate:
                await whole(engine, [*prefix, *own] if rng.random() < HOT_SHARE else own * 9, 24)
                loads = [v for name, v in engine.client_statistics().items() if name.endswith("_sequences")]
                # while all 32 are open: at the end they run out
                if sum(loads) >= 28:
                    ratios.append(max(loads) * 2 / sum(loads))

        await asyncio.gather(*map(request, range(num)))
        state = await engine.statistics()
        hits = state["num_prefix_hit_tokens_total"] / state["num_prefix_queried_tokens_total"]
        return {"max_over_mean_in_flight": round(statistics.fmean(ratios), 3), "hit_rate": round(hits, 3)}


async def killed(num: int) -> dict[str, float]:
    """One of two engines is killed while requests run, and started again."""
    async with AsyncLLM(**ENGINE, data_parallel_size=2) as engine:
        ends: Counter[str] = Counter()

        async def request(number: int) -> None:
            rng = random.Random(number)
            await asyncio.sleep(number * 0.005)
            try:
                await whole(engine, [rng.randrange(3, 250) for _ in range(100)], 60)
                ends["served"] += 1
            except EngineError:
                ends["failed"] += 1

        running = [asyncio.create_task(request(number)) for number in range(num)]
        await asyncio.sleep(num * 0.0025)
        engine.processes[0].kill()
        began = time.perf_counter()
        while not (losses := engine.take_losses()):
            await asyncio.sleep(0.001)
        seen = time.perf_counter() - began
        await asyncio.gather(*running)
        await engine.restart_replica(losses[0].replica)
        await asyncio.gather(*(whole(engine, [number, 4, 5], 4) for number in range(20)))
        state = engine.client_statistics()
        return {
            **ends,
            "retried": state["num_requests_retried_total"],
            "seen_after_seconds": round(seen, 3),
            "serving_again": state["num_replicas_serving"],
        }


async def whole(engine: AsyncLLM, prompt: list[int], max_tokens: int) -> Any:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    outputs = [one async for one in engine.generate({"prompt_token_ids": prompt}, sampling)]
    return outputs[-1]


if __name__ == "__main__":
    main()
