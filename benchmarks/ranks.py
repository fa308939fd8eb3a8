"""Workers that share a model: what a sum over two of them takes, and what a step does beside one worker's.

    python benchmarks/ranks.py [--rounds 5] [--output-length 64] [--only PART_OF_A_NAME]

1. Two processes add 2,048 numbers of each, over and over: the time of one sum, as both see it, as a recorded forward
   pass has it, and as an operator that is called from Python; beside it a sum over gloo (torch.distributed) by the same
   two.
2. Random weights in the shape of Qwen3-0.6B in bfloat16, turn about, each in a process of its own: one worker with two
   threads, two workers with one thread each, and both with `rank_invariant`; and two stages of a pipeline with one
   thread each, which have a step under way each as soon as there are two requests. One stream, and 24 requests at once:
   milliseconds between the tokens of a stream, and tokens a second of all.

`--only stages` measures the pipeline beside one worker. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from quire.engine_core.executor.shared_memory import SharedMeeting
from quire.testing.tiny_checkpoints import shape_0_6b_config, write_tokenizer
from quire.worker import kernels
from quire.worker.kernels.cpu.program import Program

NUM_FLOATS, NUM_SUMS, SUMS_OF_A_PROGRAM = 2048, 4000, 100
# a file beside the model
INVARIANT = ("--config", "invariant.yaml")
ENGINES = {
    "one worker": ("--num-threads", "2"),
    "two workers": ("--num-threads", "1", "--tensor-parallel-size", "2"),
    "one worker, invariant": ("--num-threads", "2", *INVARIANT),
    "two workers, invariant": ("--num-threads", "1", "--tensor-parallel-size", "2", *INVARIANT),
    "two stages": ("--num-threads", "1", "--pipeline-parallel-size", "2"),
}
BASE = "one worker"
LOADS = {"one stream": ("1", "2"), "24 requests": ("24", "24")}


def sum_up(rank: int, descriptor: int, num_bytes: int, port: int) -> None:
    """What each of the two processes does: microseconds of a sum in shared memory, and of one by gloo."""
    torch.set_num_threads(1)
    memory = torch.frombuffer(SharedMeeting(num_bytes, descriptor).memory, dtype=torch.uint8)
    x = torch.randn(1, NUM_FLOATS)

    def add() -> None:
        kernels.all_reduce(x, None, memory, rank, 2, torch.float32)

    program = Program()
    with program.recording(1):
        for _ in range(SUMS_OF_A_PROGRAM):
            add()
    recorded = timed(lambda: program.run(1, 0), NUM_SUMS // SUMS_OF_A_PROGRAM) / SUMS_OF_A_PROGRAM
    called = timed(add, NUM_SUMS)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    gloo = timed(lambda: torch.distributed.all_reduce(x), NUM_SUMS // 10)
    torch.distributed.destroy_process_group()
    print(json.dumps({"in a program": recorded, "called": called, "gloo": gloo}))


def timed(call: Any, count: int) -> float:
    for _ in range(count // 10):
        call()
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return 1e6 * statistics.median(seconds)


def measure_sums() -> dict[str, float]:
    num_bytes = kernels.meeting_bytes(2)
    meeting = SharedMeeting(num_bytes)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert meeting.descriptor is not None
    children = [
        subprocess.Popen(
            [sys.executable, __file__, "--sum", str(rank), str(meeting.descriptor), str(num_bytes), str(port)],
            pass_fds=(meeting.descriptor,),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    found = [json.loads(child.communicate(timeout=300)[0].splitlines()[-1]) for child in children]
    meeting.close_descriptor()
    return {way: max(one[way] for one in found) for way in found[0]}


def bench(folder: Path, *options: str) -> tuple[float, float]:
    """Milliseconds between two tokens of a stream, and tokens a second of all, as `quire bench` measures them in a
    process of its own."""
    command = [
        sys.executable, "-m", "quire", "bench", "--model", str(folder), "--load-format", "dummy", "--dtype", "bfloat16",
        "--max-model-len", "1024", "--kv-cache-memory-bytes", str(2**29), "--input-length", "32", "--json", *options,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=folder)
    found = json.loads(done.stdout.splitlines()[-1])
    return float(found["inter_token_latency_ms"]["p50"]), float(found["output_tokens_per_second"])


def measure_engines(engines: dict[str, tuple[str, ...]], rounds: int, output_length: int) -> dict[str, Any]:
    gaps: dict[str, dict[str, list[float]]] = {load: {engine: [] for engine in engines} for load in LOADS}
    rates: dict[str, dict[str, list[float]]] = {load: {engine: [] for engine in engines} for load in LOADS}
    with tempfile.TemporaryDirectory() as name:
        folder = shape_0_6b_config(Path(name))
        write_tokenizer(folder)
        (folder / INVARIANT[1]).write_text("rank_invariant: true\n")
        for _ in range(rounds):
            for load, (at_once, count) in LOADS.items():
                for engine, more in engines.items():
                    sizes = ("--concurrency", at_once, "--num-requests", count)
                    gap, rate = bench(folder, *sizes, "--output-length", str(output_length), *more)
                    gaps[load][engine].append(gap)
                    rates[load][engine].append(rate)
    for load in LOADS:
        for engine in engines:
            print(f"{load:12} {engine:24} {_beside(gaps[load], engine)} ms, {_beside(rates[load], engine)} tokens/s")
    return {"milliseconds between tokens": gaps, "tokens a second": rates}


def _beside(found: dict[str, list[float]], engine: str) -> str:
    """The median, and round by round what it is of one worker's."""
    ratios = [own / base for own, base in zip(found[engine], found[BASE], strict=True)]
    return (
        f"{statistics.median(found[engine]):8.2f} ({statistics.median(ratios):.2f} of one worker's, "
        f"{min(ratios):.2f} to {max(ratios):.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output-length", type=int, default=64)
    parser.add_argument("--only", default="", help="engines whose name contains this, beside one worker")
    parser.add_argument("--sum", type=int, nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sum:
        return sum_up(*options.sum)
    result: dict[str, Any] = {}
    if options.only in "sum":
        sums = [measure_sums() for _ in range(options.rounds)]
        result["microseconds of a sum"] = {way: [one[way] for one in sums] for way in sums[0]}
        for way, times in result["microseconds of a sum"].items():
            print(
                f"sum of {NUM_FLOATS}, {way:14} {statistics.median(times):8.1f} us "
                f"({min(times):.1f} to {max(times):.1f})"
            )
    engines = {name: more for name, more in ENGINES.items() if name == BASE or options.only in name}
    if len(engines) > 1:
        result |= measure_engines(engines, options.rounds, options.output_length)
    print(json.dumps(result))
    return None


if __name__ == "__main__":
    main()
