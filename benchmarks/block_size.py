"""The block size trade-off (3.7.2): small blocks waste few slots and share more, large ones are read faster.

    python benchmarks/block_size.py [--requests 200]

For each size: the share of KV slots that hold tokens while a mix of short and long requests runs (real scheduler and
manager, no model), the share of prompt tokens that the prefix cache served, and the time of one decode of attention
over 16 sequences of 512 tokens (CPU kernel, one thread, CPU time). Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

import torch

from quire.testing.core import CoreUnderTest
from quire.worker.kernels import paged_attention

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
POOL_TOKENS = 8192


def slots_in_use(block_size: int, num_requests: int) -> tuple[float, float]:
    """(share of held slots that hold tokens, share of prompt tokens from the cache)."""
    chance = random.Random(1)
    core = CoreUnderTest(
        num_blocks=POOL_TOKENS // block_size, block_size=block_size, budget=512, max_num_seqs=64, max_model_len=1024
    )
    core.core._check_invariants = False
    stems = [[chance.randrange(50) for _ in range(100)] for _ in range(4)]
    for number in range(num_requests):
        # log-normal lengths, as conversations have them; a third begin with a common text
        prompt = stems[number % 4] if number % 3 == 0 else []
        prompt = prompt + [chance.randrange(50) for _ in range(min(600, int(chance.lognormvariate(4.0, 0.9)) + 1))]
        core.add(number, prompt, max_tokens=min(300, int(chance.lognormvariate(4.0, 0.9)) + 1))
    held = used = 0
    while core.core.has_work:
        core.step()
        held += core.pool.num_held * block_size
        blocks: dict[int, int] = {}
        for sequence in core.scheduler.running.living_sequences():
            for index, block in enumerate(sequence.block_tables[0]):
                blocks[block] = min(block_size, sequence.num_computed_tokens - index * block_size)
        used += sum(max(0, filled) for filled in blocks.values())
    manager = core.manager
    return used / held, manager.num_hit_tokens / manager.num_queried_tokens


def attention_seconds(block_size: int) -> float:
    """One decode step of one layer: 16 sequences of 512 tokens, 16 heads over 8 of 128, bfloat16."""
    torch.set_num_threads(1)
    sequences, length = 16, 512
    num_blocks = sequences * -(-length // block_size)
    shape = (num_blocks, 8, block_size, 128)
    key, value = (torch.randn(shape).bfloat16() for _ in range(2))
    tables = torch.randperm(num_blocks).to(torch.int32).view(sequences, -1)
    query = torch.randn(sequences, 16, 128).bfloat16()
    lengths = torch.full((sequences,), length, dtype=torch.int32)
    starts = torch.arange(sequences + 1, dtype=torch.int32)
    out = torch.empty_like(query)
    times = []
    for _ in range(30):
        start = time.process_time()
        paged_attention(query, key, value, tables, lengths, starts, out, scale=128**-0.5)
        times.append(time.process_time() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    count = parser.parse_args().requests
    rows = {}
    print("block size   slots that hold tokens   prompt from cache   attention")
    for size in SIZES:
        used, hit = slots_in_use(size, count)
        seconds = attention_seconds(size)
        rows[size] = {"used": used, "hit": hit, "attention_s": seconds}
        print(f"{size:>10}   {used:>22.1%}   {hit:>17.1%}   {seconds * 1e3:>6.2f} ms", flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
