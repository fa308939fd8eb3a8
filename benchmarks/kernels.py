"""Time of each small kernel, how close it comes to the machine's limits, and the best that plain PyTorch does instead.

    python benchmarks/kernels.py [--threads N] [--isa avx2|avx512|avx512_bf16] [--only NAME] [--seconds S]

Attention and products with weights have benchmarks of their own (`kernels_attention.py`, `kernels_matmul.py`).
Kernel and alternative take turns within one loop, so whatever else the machine does hits both; figures are medians.
`cpu ms` is processor time of all threads. With --threads 1, rates and ratios are taken from it, because on a busy
machine it says more than `ms`. Limits are measured first, in the same way: reading a large array in order (GB/s;
scattered blocks are slower), and a large matrix product of the dtype (GFLOP/s).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.worker.kernels import (
    add_rms_norm,
    copy_blocks,
    cpu,
    reference,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
    write_kv,
)
from quire.worker.lazy_memory import lazy_zeros

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 16, 8, 128, 16
COLD_BYTES = 256 << 20  # inputs that stand for memory rotate over more than any cache holds


@dataclass
class Row:
    name: str
    kernel: Callable[[], object]
    alternative: Callable[[], object]
    num_bytes: float = 0.0
    flops: float = 0.0
    dtype: torch.dtype = torch.bfloat16


def measure(functions, seconds):
    """(wall, processor) medians in milliseconds for each function, taking turns."""
    times = [([], []) for _ in functions]
    for function in functions:
        function()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0][0]) < 5:
        for function, (wall, processor) in zip(functions, times, strict=True):
            start, start_processor = time.perf_counter(), time.process_time()
            function()
            wall.append(time.perf_counter() - start)
            processor.append(time.process_time() - start_processor)
    return [(statistics.median(wall) * 1e3, statistics.median(processor) * 1e3) for wall, processor in times]


def in_turn(items):
    """A function that yields the items one after the other, for ever."""
    state = iter(range(10**12))
    return lambda: items[next(state) % len(items)]


def huge(shape, dtype):
    """Random values in huge pages, as the worker allocates the KV cache."""
    elements = torch.Size(shape).numel()
    memory = torch.from_numpy(lazy_zeros((elements * dtype.itemsize,), "uint8", use_huge_pages=True))
    return memory.view(dtype).view(shape).copy_(torch.randn(shape))


def cache_rows():
    dtype = torch.bfloat16
    num_blocks = 4096
    caches = [huge((num_blocks, KV_HEADS, BLOCK, HEAD_DIM), dtype) for _ in range(2)]
    for tokens in (16, 2048):
        fused = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)
        key, value = fused[:, HEADS : HEADS + KV_HEADS], fused[:, HEADS + KV_HEADS :]
        slots = torch.randperm(num_blocks * BLOCK)[:tokens]
        arguments = (key, value, *caches, slots)
        moved = 4.0 * key.numel() * dtype.itemsize  # both are read and written
        yield Row(
            f"write_kv {tokens} tokens",
            lambda a=arguments: write_kv(*a),
            lambda a=arguments: reference.write_kv(*a),
            moved,
        )
    pairs = torch.randperm(num_blocks)[:64].view(32, 2)
    moved = 2.0 * 32 * sum(cache[0].nbytes for cache in caches)
    yield Row(
        "copy_blocks 32 pairs", lambda: copy_blocks(caches, pairs), lambda: reference.copy_blocks(caches, pairs), moved
    )


def fused_rows():
    dtype, width, inner = torch.bfloat16, 1024, 3072
    weight = torch.randn(width).to(dtype)
    for tokens in (1, 16, 512):
        x, residual = torch.randn(2, tokens, width).to(dtype)
        gate = torch.randn(tokens, 2 * inner).to(dtype)
        query, key = torch.randn(tokens, HEADS, HEAD_DIM).to(dtype), torch.randn(tokens, KV_HEADS, HEAD_DIM).to(dtype)
        positions, table = torch.randint(0, 4096, (tokens,)), torch.randn(4096, HEAD_DIM) / 100
        cases = {
            "rms_norm": (rms_norm, (x, weight, 1e-6), 2.0 * x.nbytes),
            "add_rms_norm": (add_rms_norm, (x, residual, weight, 1e-6), 4.0 * x.nbytes),
            "silu_and_mul": (silu_and_mul, (gate,), 1.5 * gate.nbytes),
            "rotary_embedding": (rotary_embedding, (positions, query, key, table), 2.0 * (query.nbytes + key.nbytes)),
        }
        for operation, (kernel, arguments, moved) in cases.items():
            other = getattr(reference, operation)
            yield Row(
                f"{operation} {tokens} tokens",
                lambda k=kernel, a=arguments: k(*a),
                lambda o=other, a=arguments: o(*a),
                moved,
            )


def name(dtype):
    return str(dtype).removeprefix("torch.")


def limits(seconds):
    """GB/s of reading memory in order, and GFLOP/s of a matrix product, with the threads that are set."""
    arrays = in_turn([huge((COLD_BYTES // 16,), torch.float32) for _ in range(4)])
    clock = 1 if torch.get_num_threads() == 1 else 0
    read = measure([lambda: arrays().sum()], seconds)[0][clock]
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(2, 1024, 1024).to(dtype)
        rates[dtype] = 2 * 1024**3 / measure([lambda a=a, b=b: a @ b], seconds)[0][clock] / 1e6
    return COLD_BYTES / 4 / read / 1e6, rates


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--isa")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each row")
    options = parser.parse_args()
    cpu.load()
    if options.isa and not cpu.select_isa(options.isa):
        parser.error(f"--isa {options.isa}: not on this processor")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    bandwidth, rates = limits(options.seconds)
    home = cpu.statistics()
    products = ", ".join(f"{name(dtype)} product {rate:.0f} GFLOP/s" for dtype, rate in rates.items())
    print(
        f"{home.get('isa', home['kernels'])}, {options.threads} threads; limits: read {bandwidth:.1f} GB/s, {products}"
    )
    print(f"{'':34}{'dtype':9}{'ms':>9}{'cpu ms':>9}{'rate':>16}{'limit':>7} | torch{'ms':>8}{'cpu ms':>9}{'ratio':>7}")
    results = []
    for make in (cache_rows, fused_rows):
        for row in make():
            if options.only not in row.name:
                continue
            (ms, cpu_ms), (other_ms, other_cpu) = measure([row.kernel, row.alternative], options.seconds)
            used, other_used = (cpu_ms, other_cpu) if options.threads == 1 else (ms, other_ms)
            work, limit = (row.num_bytes, bandwidth) if row.num_bytes else (row.flops, rates[row.dtype])
            rate, unit = work / used / 1e6, "GB/s" if row.num_bytes else "GFLOP/s"
            print(
                f"{row.name:34}{name(row.dtype):9}{ms:9.3f}{cpu_ms:9.3f}{rate:8.1f} {unit:7}{rate / limit:7.0%} |"
                f"{other_ms:14.3f}{other_cpu:9.3f}{other_used / used:6.1f}x",
                flush=True,
            )
            figures = {"ms": ms, "cpu_ms": cpu_ms, "rate": rate, "torch_ms": other_ms, "torch_cpu_ms": other_cpu}
            results.append({"name": row.name, "dtype": name(row.dtype), **figures})
    print(json.dumps({"threads": options.threads, "read_gb_s": round(bandwidth, 1), "rows": results}))


if __name__ == "__main__":
    main()
