"""Paged attention against the machine's limits, against contiguous memory, and against attention of torch.

    python benchmarks/kernels_attention.py [--threads N] [--kv-dtypes bfloat16,fp8] [--only decode] [--seconds S]

Heads are those of Qwen3-0.6B: 16 over 8 of 128. A step of single tokens is measured in bytes of keys and values against
the bandwidth of reading memory in order; the caches of several layers take turns, so that they come from memory as in
a model. A prompt is measured in operations, of which only the lower triangle counts, against the rate of arithmetic;
codes of eight bits are multiplied as bfloat16. Columns:

    of limit     share of the bandwidth, or of the peak; in brackets that of the best run
    contiguous   time over that of the same call with one block for each sequence: what paging costs
    torch        time of scaled_dot_product_attention on contiguous tensors over that of paged attention, for types that
                 it knows; heads of a group are folded into rows where no mask is needed

All that is compared takes turns in one loop, so whatever else the machine does hits each of them. `us` is the median,
and `best` the best, because other work only ever adds. With --threads 1, times are processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# Threads of torch that wait for their next call would take the processors from whoever's turn it is.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.interfaces.cli.bench_limits import MachineLimits, measure_limits
from quire.worker.attention import Attention
from quire.worker.kernels import cpu, paged_attention, write_kv
from quire.worker.kernels.cache_format import DTYPE_BY_NAME
from quire.worker.kv_cache import KVCache

HEADS, KV_HEADS, DIM, BLOCK = 16, 8, 128, 16
CACHE_BYTES = 256 << 20  # more than any cache of a processor holds


@dataclass(frozen=True)
class Case:
    name: str
    num_sequences: int
    length: int
    num_rows: int = 1
    num_shared: int = 0  # tokens that all sequences have in the same blocks

    @property
    def operations(self) -> float:
        pairs = self.num_rows * self.length - self.num_rows * (self.num_rows - 1) / 2
        return 4.0 * HEADS * DIM * pairs * self.num_sequences


CASES = (
    Case("decode 16 x 512", 16, 512),
    Case("decode 64 x 300", 64, 300),
    Case("decode 1 x 4096", 1, 4096),
    Case("decode 1 x 32768", 1, 32768),
    Case("drafts 16 x 512, 5 each", 16, 512, 5),
    Case("prompt 8 x 512", 8, 512, 512),
    Case("prompt 2048", 1, 2048, 2048),
    Case("prompt 4096", 1, 4096, 4096),
    Case("chunk 256 of 2048", 1, 2048, 256),
    Case("shared 32 x 560, 512 the same", 32, 560, 1, 512),
    Case("shared 8 x 288, 256 the same", 8, 288, 1, 256),
)


def caches(case: Case, dtype: torch.dtype, block_size: int, copies: int) -> tuple[list[Attention], Tensor]:
    """Layers with filled caches, and block tables whose blocks are scattered."""
    blocks_of_one = -(-case.length // block_size)
    num_blocks = blocks_of_one * case.num_sequences
    layers = {}
    for index in range(copies):
        layer = layers[str(index)] = Attention(HEADS, KV_HEADS, DIM, DIM**-0.5, name=str(index))
        layer.cache_dtype = dtype
    KVCache().allocate(layers, [list(layers)], num_blocks, block_size, torch.device("cpu"))
    tables_SM = torch.randperm(num_blocks).int().view(case.num_sequences, blocks_of_one)
    tables_SM[:, : case.num_shared // block_size] = tables_SM[:1, : case.num_shared // block_size]
    slots = torch.arange(num_blocks * block_size)
    rows = torch.randn(len(slots), KV_HEADS, DIM).bfloat16()
    for layer in layers.values():
        assert layer.k_cache is not None
        assert layer.v_cache is not None
        write_kv(rows, rows, layer.k_cache, layer.v_cache, slots)
    return list(layers.values()), tables_SM


def calls(case: Case, dtype: torch.dtype, block_size: int, copies: int) -> Iterator[Callable[[], None]]:
    """The call for one layer after the other, for ever."""
    layers, tables_SM = caches(case, dtype, block_size, copies)
    lengths_S = torch.full((case.num_sequences,), case.length, dtype=torch.int32)
    starts_S1 = torch.arange(case.num_sequences + 1, dtype=torch.int32) * case.num_rows
    query_THD = torch.randn(case.num_sequences * case.num_rows, HEADS, DIM).bfloat16()
    out_THD = torch.empty_like(query_THD)

    def call(layer: Attention) -> None:
        arguments = (layer.k_cache, layer.v_cache, tables_SM, lengths_S, starts_S1, out_THD)
        paged_attention(query_THD, *arguments, scale=DIM**-0.5)  # type: ignore[arg-type]

    index = 0
    while True:
        yield lambda index=index: call(layers[index % copies])
        index += 1


def torch_calls(case: Case, dtype: torch.dtype, copies: int) -> Iterator[Callable[[], object]] | None:
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    sequences, rows, length = case.num_sequences, case.num_rows, case.length
    kept = [torch.randn(2, sequences, KV_HEADS, length, DIM).to(dtype) for _ in range(copies)]
    query = torch.randn(sequences, HEADS, rows, DIM).to(dtype)
    mask = torch.arange(length - rows, length)[:, None] >= torch.arange(length)

    def call(index: int) -> Tensor:
        key, value = kept[index % copies]
        if rows == 1:
            return F.scaled_dot_product_attention(query.view(sequences, KV_HEADS, -1, DIM), key, value)
        if rows == length:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    return ((lambda index=index: call(index)) for index in range(10**9))


def measure(
    sources: list[Iterator[Callable[[], object]] | None], seconds: float, clock: Callable[[], float]
) -> list[list[float]]:
    """Seconds of each, taking turns. The second of two calls counts: threads that slept have woken up by then."""
    times: list[list[float]] = [[] for _ in sources]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for source, found in zip(sources, times, strict=True):
            if source is not None:
                next(source)()
                call = next(source)
                start = clock()
                call()
                found.append(clock() - start)
    return times


def run(case: Case, kind: str, limits: MachineLimits, seconds: float) -> dict[str, object]:
    """A line of the table, printed and returned."""
    dtype = DTYPE_BY_NAME[kind]
    layer = Attention(HEADS, KV_HEADS, DIM, 1.0, name="")
    layer.cache_dtype = dtype
    num_bytes = layer.spec.bytes_per_token * case.length * case.num_sequences
    copies = max(1, min(12, CACHE_BYTES // num_bytes)) if case.num_rows < 64 else 1
    clock = time.process_time if limits.threads == 1 else time.perf_counter
    contiguous = calls(case, dtype, case.length, copies) if not case.num_shared else None
    rivals = [calls(case, dtype, BLOCK, copies), contiguous, torch_calls(case, dtype, copies)]
    times = measure(rivals, seconds, clock)
    used, best = statistics.median(times[0]), min(times[0])
    is_decode = case.num_rows < 64
    work, limit = (num_bytes, limits.bandwidth) if is_decode else (case.operations, peak_for(dtype, limits))
    paging = statistics.median(times[1]) if times[1] else None
    other = statistics.median(times[2]) if times[2] else None
    line = {
        "case": case.name,
        "kv_dtype": kind,
        "us": round(used * 1e6, 1),
        "best_us": round(best * 1e6, 1),
        "rate": round(work / used / 1e9, 1),
        "of_limit": round(work / used / limit, 3) if limit else None,
        "best_of_limit": round(work / best / limit, 3) if limit else None,
        "paged_over_contiguous": round(used / paging, 3) if paging else None,
        "torch_over_paged": round(other / used, 2) if other else None,
    }
    unit = "GB/s" if is_decode else "GFLOP/s"
    share = f"{work / used / limit:6.0%} ({work / best / limit:4.0%})" if limit else ""
    ratios = (f"{used / paging:.2f}" if paging else "", f"{other / used:.2f}" if other else "")
    print(
        f"{case.name:30} {kind:9}{used * 1e6:11.1f}{best * 1e6:11.1f}{work / used / 1e9:8.1f} {unit:8}{share:15}"
        f"{ratios[0]:>11}{ratios[1]:>7}",
        flush=True,
    )
    return line


def peak_for(dtype: torch.dtype, limits: MachineLimits) -> float:
    # float16 is widened, and so is everything where the processor has no products of bfloat16
    is_narrow = dtype not in (torch.float32, torch.float16) and cpu.statistics().get("isa") in ("avx512_bf16", "amx")
    return limits.peaks.get("bfloat16" if is_narrow else "float32", 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--kv-dtypes", default="bfloat16,int8,fp8")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--isa")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each line")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    cpu.load()
    cpu.set_crew(options.threads)
    if options.isa and not cpu.select_isa(options.isa):
        parser.error(f"--isa {options.isa}: not on this processor")
    limits = measure_limits(options.threads)
    print(f"{cpu.statistics().get('isa')}, {limits.as_dict()}")
    print(
        f"{'case':30} {'cache':9}{'us':>11}{'best':>11}{'rate':>8} {'':8}{'of limit (best)':15}"
        f"{'contiguous':>11}{'torch':>7}"
    )
    lines = [
        run(case, kind, limits, options.seconds)
        for case in CASES
        if options.only in case.name
        for kind in options.kv_dtypes.split(",")
    ]
    print(json.dumps({"limits": limits.as_dict(), "lines": lines}))


if __name__ == "__main__":
    main()
