"""A mixture of experts, on one stream and for many requests at once, beside what it should be held against.

    python benchmarks/experts.py [--experts 64] [--layers 4] [--rounds 3] [--output-length 96] [--quantization int4]
                                 [--requests 64]

Random weights in the shape of Qwen 3 with experts: hidden 2,048, experts of 768, 8 of them for a token, vocabulary
32,000. Turn about, each in a process of its own: the model's own file; the same through Transformers; and a dense model
of as many weights as a token reads here, which shows what experts cost beside the bytes. `share` is what a token's
weights take at the bandwidth of this machine, measured in the same run, over what a token takes.

`rivals.py --experts 64` runs the same shape beside other engines.

With --requests so many prompts of 128 tokens arrive at once. `prompts` is what their products take at the machine's
matrix rate over what they take; `steps` the same of a step that gives each of them a token, where the bytes of the
experts that are asked may take longer than the products. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from expert_shape import config_of

from quire.config import ModelFacts
from quire.interfaces.cli.bench_limits import MachineLimits, ModelCost, measure_limits
from quire.testing.tiny_checkpoints import write_tokenizer

# of each of many requests
PROMPT, ANSWER = 128, 24


def bench(folder: Path, *options: str) -> dict[str, Any]:
    """What `quire bench` measures, in a process of its own."""
    command = [
        sys.executable, "-m", "quire", "bench", "--model", str(folder), "--load-format", "dummy", "--dtype", "bfloat16",
        "--max-model-len", "1024", "--json", *options,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


class OneStream:
    """Milliseconds a token, and what the weights that it reads take at the least."""

    def __init__(self, length: int) -> None:
        self._length = length

    def measure(self, folder: Path, *options: str) -> dict[str, float]:
        sizes = (
            "--num-requests",
            "2",
            "--concurrency",
            "1",
            "--input-length",
            "32",
            "--output-length",
            str(self._length),
        )
        return {"token": bench(folder, *sizes, *options)["time_per_output_token_ms"]["p50"]}

    def least(self, cost: ModelCost, limits: MachineLimits) -> dict[str, float]:
        return {"token": 1e3 * cost.step_bytes(1) / limits.bandwidth}


class ManyRequests:
    """Milliseconds of all prompts together, and of a step after them."""

    def __init__(self, count: int) -> None:
        self._count = count

    def measure(self, folder: Path, *options: str) -> dict[str, float]:
        sizes = "--num-requests", str(self._count), "--concurrency", str(self._count), "--input-length", str(PROMPT)
        prompts = bench(folder, *sizes, "--output-length", "1", *options)
        answers = bench(folder, *sizes, "--output-length", str(ANSWER), *options)
        return {"prompts": 1e3 * prompts["seconds"], "step": answers["inter_token_latency_ms"]["p50"]}

    def least(self, cost: ModelCost, limits: MachineLimits) -> dict[str, float]:
        rate = limits.peaks.get(cost.unit)
        if not rate:
            raise SystemExit("the machine's matrix rate is not known: there is no compiler")
        step = max(
            cost.matrix_operations(self._count, self._count) / rate, cost.step_bytes(self._count) / limits.bandwidth
        )
        return {"prompts": 1e3 * self._count * cost.prompt_operations(PROMPT) / rate, "step": 1e3 * step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output-length", type=int, default=96)
    parser.add_argument("--quantization", choices=["int8", "int4"], help="default: bfloat16")
    parser.add_argument("--requests", type=int, default=1, help="at once (default: 1, which measures one stream)")
    options = parser.parse_args()
    kind_of_load = OneStream(options.output_length) if options.requests == 1 else ManyRequests(options.requests)
    form = () if options.quantization is None else ("--quantization", options.quantization)
    with tempfile.TemporaryDirectory() as name:
        folders = {kind: Path(name) / kind for kind in ("experts", "dense")}
        for kind, folder in folders.items():
            folder.mkdir()
            write_tokenizer(folder)
            config = config_of(options.layers, options.experts, is_dense=kind == "dense")
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        runs = {"own file": (folders["experts"], form), "dense": (folders["dense"], form)}
        if not form and options.requests == 1:
            runs["Transformers"] = (folders["experts"], ("--model-impl", "transformers"))
        found: dict[str, list[tuple[dict[str, float], dict[str, float]]]] = {kind: [] for kind in runs}
        for _ in range(options.rounds):
            limits = measure_limits(len(os.sched_getaffinity(0)))
            for kind, (folder, more) in runs.items():
                cost = ModelCost.of(ModelFacts.read(folder), "bfloat16", options.quantization)
                found[kind].append((kind_of_load.measure(folder, *more), kind_of_load.least(cost, limits)))
    result: dict[str, Any] = {"options": vars(options), "limits": limits.as_dict()}
    for kind, rounds in found.items():
        result[kind] = {part: told(kind, part, rounds) for part in rounds[0][0]}
    print(json.dumps(result))


def told(kind: str, part: str, rounds: list[tuple[dict[str, float], dict[str, float]]]) -> dict[str, float]:
    """The median of all rounds, and of its share of what it takes at the least, as a line and as numbers."""
    times = [measured[part] for measured, _ in rounds]
    share = statistics.median(least[part] / measured[part] for measured, least in rounds)
    median = statistics.median(times)
    print(f"{kind:14} {part:8} {median:9.2f} ms ({min(times):.2f} to {max(times):.2f}), share {share:.2f}")
    return {"ms": round(median, 2), "from": min(times), "to": max(times), "share": round(share, 3)}


if __name__ == "__main__":
    main()
