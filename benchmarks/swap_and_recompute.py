"""What it takes to bring back one preempted sequence (figure 3.19a): swap its KV cache, or compute it again?

    python benchmarks/swap_and_recompute.py [--model 0.6b|embedded|DIR] [--tokens 512] [--rounds 5] [--plot FILE.svg]

For each block size: a sequence of so many tokens leaves for swap space (all its blocks in one step), comes back to
other blocks, and is computed again in one pass. The steps are those that a worker runs in service, on one model whose
cache is made once for each block size; pages have been touched before. One round goes through all block sizes, so that
whatever else the machine does hits all of them. Blocks are scattered. Figures are medians over the rounds, with the
lowest and the highest. Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import quire
from quire.config import WorkerConfig
from quire.messages import AdmittedSequence, SchedulerOutput, int_array
from quire.sampling_params import SamplingParams
from quire.simulation.charts.line_chart import Line, line_chart
from quire.testing.model_harness import worker_config
from quire.testing.tiny_checkpoints import shape_0_6b_config
from quire.worker.attention import attention_layers
from quire.worker.model_loader import load_model
from quire.worker.worker import Worker

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
KINDS = ("swap out", "swap in", "recompute")
ROW = 0


class BlockSize:
    """A worker with one sequence, whose cache has blocks of one size; all share a model."""

    def __init__(self, config: WorkerConfig, model: torch.nn.Module, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._layers = list(attention_layers(model).values())
        self._worker = Worker(config, model_loader=lambda config: model)
        self._worker.load()
        self.num_blocks = -(-num_tokens // config.block_size)
        self._worker.initialize_cache([[layer.name for layer in self._layers]], 2 * self.num_blocks, self.num_blocks)
        runner = self._worker._runner
        assert runner is not None
        self._caches = [(layer.k_cache, layer.v_cache) for layer in self._layers]
        self.num_bytes = runner.cache.swap_arena.num_bytes
        # The sequence goes back and forth between two halves of the cache.
        self._blocks = np.array(random.Random(0).sample(range(2 * self.num_blocks), 2 * self.num_blocks)).reshape(2, -1)
        self._host_blocks = np.array(random.Random(1).sample(range(self.num_blocks), self.num_blocks))
        self._admit()

    def round(self) -> dict[str, float]:
        """Seconds of each kind."""
        for layer, (key, value) in zip(self._layers, self._caches, strict=True):
            layer.bind(0, key, value)
        here, there = self._blocks
        out = SchedulerOutput(step=1, swapped_out=np.stack([here, self._host_blocks]))
        into = SchedulerOutput(
            step=2, swapped_in=np.stack([self._host_blocks, there]), block_writes=self._writes(there)
        )
        again = SchedulerOutput(
            step=3, progress=[(ROW, 0)], rows=int_array([ROW]), num_tokens=int_array([self._num_tokens])
        )
        self._blocks = self._blocks[::-1]
        return {kind: self._seconds(step) for kind, step in zip(KINDS, (out, into, again), strict=True)}

    def _seconds(self, step: SchedulerOutput) -> float:
        start = time.perf_counter()
        self._worker.execute(step)
        self._worker._platform.synchronize()
        return time.perf_counter() - start

    def _admit(self) -> None:
        # Its input is not complete, so that nothing is sampled: the KV cache alone is what is computed again.
        sequence = AdmittedSequence(
            row=ROW,
            sequence_id=0,
            token_ids=int_array(np.arange(self._num_tokens) % 1000),
            num_prompt_tokens=self._num_tokens,
            num_computed_tokens=0,
            sampling=SamplingParams(temperature=0.0),
            seed=0,
            is_final=False,
        )
        step = SchedulerOutput(step=0, admitted=[sequence], block_writes=self._writes(self._blocks[0]))
        self._worker.execute(step)

    def _writes(self, blocks: np.ndarray) -> np.ndarray:
        nothing = np.zeros(self.num_blocks, dtype=np.int64)
        return np.stack([nothing, nothing + ROW, np.arange(self.num_blocks), blocks])


def config_of(arguments: argparse.Namespace, folder: Path) -> Callable[[int], WorkerConfig]:
    """The worker's configuration for a block size."""
    options: dict[str, Any] = {
        "dtype": arguments.dtype,
        "device": arguments.device,
        "attention_backend": "auto",
        "num_threads": arguments.threads,
        "max_model_len": arguments.tokens,
        "max_num_batched_tokens": arguments.tokens,
        "max_num_seqs": 1,
        "swap_directory": arguments.swap_directory,
    }
    if arguments.model == "0.6b":
        path, options["load_format"] = shape_0_6b_config(folder), "dummy"
    else:
        path = Path(quire.__file__).parent / "embedded" if arguments.model == "embedded" else Path(arguments.model)
    return lambda block_size: worker_config(path, block_size=block_size, **options)


def measure(benches: dict[int, BlockSize], num_rounds: int) -> dict[int, dict[str, list[float]]]:
    """Milliseconds by block size and kind, one a round. Two rounds before touch the pages of both halves."""
    times: dict[int, dict[str, list[float]]] = {size: {kind: [] for kind in (*KINDS, "swap both")} for size in benches}
    for number in range(-1, num_rounds + 1):
        for size, bench in benches.items():
            seconds = bench.round()
            if number > 0:
                both = seconds["swap out"] + seconds["swap in"]
                for kind, value in (*seconds.items(), ("swap both", both)):
                    times[size][kind].append(value * 1e3)
        print(f"round {number} of {num_rounds}" if number > 0 else "round to touch the pages", flush=True)
    return times


def table(times: dict[int, dict[str, list[float]]], benches: dict[int, BlockSize]) -> str:
    columns = ("swap out", "swap in", "swap both", "recompute")
    lines = ["block size   blocks" + "".join(f"{name + ', ms':>26}" for name in columns) + "   recompute / swap both"]
    for size, by_kind in times.items():
        cells = "".join(f"{_cell(by_kind[name]):>26}" for name in columns)
        ratio = statistics.median(by_kind["recompute"]) / statistics.median(by_kind["swap both"])
        lines.append(f"{size:>10}{benches[size].num_blocks:>9}{cells}{ratio:>20.1f} x")
    return "\n".join(lines)


def _cell(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def plot(times: dict[int, dict[str, list[float]]], title: str) -> str:
    lines = []
    for name, kind in (("Recompute", "recompute"), ("Swap in + out", "swap both"), ("Swap out", "swap out"),
                       ("Swap in", "swap in")):  # fmt: skip
        values = [times[size][kind] for size in times]
        points = list(zip(times, map(statistics.median, values), strict=True))
        lines.append(Line(name, points, tuple((min(each), max(each)) for each in values)))
    return line_chart(title, "Block size (tokens)", "Time (ms)", lines, log_x=True, log_y=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.6b", help="0.6b: the shape of Qwen3-0.6B; embedded; or a checkpoint")
    parser.add_argument("--tokens", type=int, default=512, help="length of the sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="block sizes")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--swap-directory", help="swap to a file there instead of memory")
    parser.add_argument("--plot", type=Path, help="write the figure to this SVG file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(arguments, Path(folder))
        torch.set_num_threads(arguments.threads)
        model = load_model(config(arguments.sizes[0]))
        benches = {size: BlockSize(config(size), model, arguments.tokens) for size in arguments.sizes}
    times = measure(benches, arguments.rounds)
    place = "a file" if arguments.swap_directory else "memory"
    title = f"One sequence of {arguments.tokens} tokens, {arguments.model}, swapped to {place}"
    print(f"{title}: {next(iter(benches.values())).num_bytes / 2**20:.1f} MiB; median (lowest-highest)")
    print(table(times, benches))
    if arguments.plot:
        arguments.plot.write_text(plot(times, title), encoding="utf-8")
    facts = {key: getattr(arguments, key) for key in ("model", "tokens", "rounds", "threads", "device", "dtype")}
    figures = {size: {kind: _figures(values) for kind, values in by_kind.items()} for size, by_kind in times.items()}
    print(json.dumps({"swap_and_recompute_ms": figures, "swapped_to": place, **facts}))


def _figures(values: list[float]) -> dict[str, float]:
    figures = {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
    return {name: round(value, 3) for name, value in figures.items()}


if __name__ == "__main__":
    main()
