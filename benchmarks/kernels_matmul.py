"""Products with packed weights against the machine's limits and against oneDNN inside torch.

    python benchmarks/kernels_matmul.py --threads 2
    python benchmarks/kernels_matmul.py --formats bfloat16,int8 --shapes qkv,down --rows 1,8,2048

Shapes are those of Qwen3-0.6B. Weights take turns until they are larger than every cache, as in a model. Quire and its
rival alternate in one process, each with the same rows; the time is the median of the rounds, and the best one beside
it, because other work on the machine only ever adds. With one thread it is processor time, which other work changes
less. The limit of a product is the larger of the time to read the packed weight and the time of its arithmetic. oneDNN
gets activations that are already quantised, with one scale for all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

# Threads of torch that wait for their next call would take the processors from whoever's turn it is.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor

from quire.interfaces.cli.bench_limits import MachineLimits, measure_limits
from quire.worker import kernels
from quire.worker.kernels import cpu

SHAPES = {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072), "head": (151936, 1024)}
CACHE_BYTES = 320 << 20
LARGEST_HEAD_ROWS = 64


@dataclass(frozen=True)
class Format:
    """How weights are stored, and what multiplies them: a name of the machine's peaks."""

    arithmetic: str
    dtype: torch.dtype = torch.bfloat16
    bits: int = 0
    group: int = 0
    weight_only: bool = False

    def pack(self, num_rows: int, num_columns: int) -> Tensor:
        """A random weight."""
        if self.bits == 0:
            return kernels.pack_weight((torch.randn(num_rows, num_columns) * 0.02).to(self.dtype))
        most = 2 ** (self.bits - 1)
        low, high, kind = (0, 16, torch.uint8) if self.bits == 4 else (-most, most, torch.int8)
        values = torch.randint(low, high, (num_rows, num_columns), dtype=kind)
        scales = torch.rand(num_rows, num_columns // self.group if self.group else 1) * 0.001 + 0.001
        offsets = -8 * scales if self.bits == 4 else None
        return kernels.pack_quantized(values, scales, offsets, bits=self.bits, weight_only=self.weight_only)


FORMATS = {
    "float32": Format("float32", torch.float32),
    "bfloat16": Format("bfloat16"),
    "int8": Format("int8", bits=8),
    "int8-g32": Format("int8", bits=8, group=32),
    "int6-g32": Format("int8", bits=6, group=32),
    "int4-g32": Format("int8", bits=4, group=32),
    "int4-g128": Format("int8", bits=4, group=128),
    "int8-weight-only": Format("bfloat16", bits=8, weight_only=True),
    "int4-g32-weight-only": Format("bfloat16", bits=4, group=32, weight_only=True),
}


def rival(form: Format, num_rows: int, num_columns: int, x: Tensor) -> Callable[[], Tensor] | None:
    """oneDNN with a weight in its own layout, or None where it has nothing of the kind."""
    if form.bits == 0:
        weight = torch.ops.mkldnn._reorder_linear_weight((torch.randn(num_rows, num_columns) * 0.02).to(x.dtype), 64)
        return lambda: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    if form.bits != 8 or form.group or form.weight_only:
        return None
    codes = torch.randint(-128, 128, (num_rows, num_columns), dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(codes, None)
    quantized = torch.randint(0, 256, x.shape, dtype=torch.uint8)
    scale, zero = torch.rand(num_rows) * 0.001, torch.zeros(num_rows, dtype=torch.int64)
    return lambda: torch.ops.onednn.qlinear_pointwise(
        quantized, 0.02, 128, packed, scale, zero, None, 1.0, 0, torch.bfloat16, "none", [], ""
    )


def measure(
    form: Format, shape: tuple[int, int], rows: int, rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds a product, ours and the rival's, by round."""
    num_rows, num_columns = shape
    x = torch.randn(rows, num_columns).to(form.dtype)
    first = form.pack(num_rows, num_columns)
    turns = max(1, CACHE_BYTES // first.numel()) if rows <= LARGEST_HEAD_ROWS else 2
    weights = [first, *(form.pack(num_rows, num_columns) for _ in range(turns - 1))]
    ours = [lambda packed=packed: kernels.packed_linear(x, packed, None, num_rows) for packed in weights]
    theirs = [call for _ in range(turns) if (call := rival(form, num_rows, num_columns, x)) is not None]
    times: dict[str, list[float]] = {"quire": [], "onednn": []}
    for _ in range(rounds):
        for name, calls in (("quire", ours), ("onednn", theirs)):
            if not calls:
                continue
            calls[-1]()  # wakes the threads up
            start = clock()
            for call in calls:
                call()
            times[name].append((clock() - start) / len(calls))
    times["bytes"] = [float(first.numel())]
    return times


def report(name: str, shape: str, rows: int, times: dict[str, list[float]], limits: MachineLimits) -> dict[str, object]:
    """One line to read, one row for the JSON."""
    num_rows, num_columns = SHAPES[shape]
    operations = 2 * rows * num_rows * num_columns
    peak = limits.peaks.get(FORMATS[name].arithmetic, 0.0)
    least = max(times["bytes"][0] / limits.bandwidth, operations / peak if peak else 0.0)
    median, best = statistics.median(times["quire"]), min(times["quire"])
    row: dict[str, object] = {
        "format": name,
        "shape": shape,
        "rows": rows,
        "us": round(median * 1e6, 1),
        "best_us": round(best * 1e6, 1),
        "of_limit": round(least / median, 3),
        "best_of_limit": round(least / best, 3),
    }
    rates = f"{times['bytes'][0] / best / 1e9:6.1f} GB/s {operations / best / 1e9:7.0f} Gop/s"
    line = f"{name:>20} {shape:>8} {rows:>5} rows  {median * 1e6:9.1f} us (best {best * 1e6:9.1f})  {rates}"
    line += f"  of the limit {least / median:5.2f} (best {least / best:5.2f})"
    if times["onednn"]:
        row["onednn_us"] = round(statistics.median(times["onednn"]) * 1e6, 1)
        row["onednn_best_us"] = round(min(times["onednn"]) * 1e6, 1)
        line += f"  oneDNN takes {min(times['onednn']) / best:5.2f} times as long"
    print(line, flush=True)
    return row


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", default="1,8,64,2048")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bandwidth", type=float, help="GB/s, where the machine is too busy to measure it")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if not cpu.load():
        raise SystemExit(f"no C++ kernels: {cpu.statistics()['reason']}")
    cpu.set_crew(arguments.threads)
    limits = measure_limits(arguments.threads)
    if arguments.bandwidth:
        limits = replace(limits, bandwidth=arguments.bandwidth * 1e9)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    print(json.dumps({"isa": cpu.statistics()["isa"], **limits.as_dict()}))
    rows = []
    for name in arguments.formats.split(","):
        for shape in arguments.shapes.split(","):
            for count in map(int, arguments.rows.split(",")):
                if shape == "head" and count > LARGEST_HEAD_ROWS:
                    continue  # a step computes logits of the last tokens alone
                times = measure(FORMATS[name], SHAPES[shape], count, arguments.rounds, clock)
                rows.append(report(name, shape, count, times, limits))
    print(json.dumps({"threads": arguments.threads, "limits": limits.as_dict(), "products": rows}))


if __name__ == "__main__":
    main()
