"""What the machine could do at best: its read bandwidth and its rate of arithmetic, and the least time of a workload.

Measured by a small C++ program (csrc/limits) that is compiled on the spot for this processor, because a limit that a
library reaches is that library's, not the machine's. Without a compiler the bandwidth is measured with NumPy, and rates
of arithmetic are not known. Both can be given instead.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config import ModelFacts
from quire.config.arithmetic import ModelShape
from quire.config.weight_sizes import expert_bytes, looked_up_bytes, weight_bytes
from quire.interfaces.cli.bench_workloads import Work

_SOURCE = Path(__file__).parents[2] / "csrc" / "limits" / "limits.cpp"
_TIMEOUT_SECONDS = 60
# for NumPy: more than any cache holds
_NUMPY_BYTES = 256 << 20


@dataclass(frozen=True)
class MachineLimits:
    """Rates in bytes and operations a second; 0 where nobody knows."""

    threads: int
    bandwidth: float
    peaks: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        peaks = {f"{name}_gops": round(rate / 1e9, 1) for name, rate in self.peaks.items()}
        return {"threads": self.threads, "read_gb_s": round(self.bandwidth / 1e9, 2), **peaks}


def measure_limits(num_threads: int | None = None) -> MachineLimits:
    """About two seconds, of which the compiler takes one."""
    threads = num_threads or available_threads()
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    measured = _by_program(compiler, threads) if compiler else None
    if measured is None:
        return MachineLimits(threads, _numpy_bandwidth(threads), {})
    peaks = {name: measured[name] for name in ("float32", "bfloat16", "int8") if measured.get(name)}
    return MachineLimits(threads, measured["bandwidth"], peaks)


def available_threads() -> int:
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() and int(text) else len(os.sched_getaffinity(0))


def _by_program(compiler: str, threads: int) -> dict[str, float] | None:
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/limits"
        command = [compiler, "-std=c++17", "-O2", "-march=native", "-pthread", str(_SOURCE), "-o", program]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_SECONDS)
            done = subprocess.run(
                [program, str(threads)], check=True, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS
            )
            answer: dict[str, float] = json.loads(done.stdout)
        except (OSError, subprocess.SubprocessError, ValueError):
            return None
    return answer


def _numpy_bandwidth(threads: int) -> float:
    import numpy as np

    parts = [np.ones(_NUMPY_BYTES // 8 // threads, dtype=np.int64) for _ in range(threads)]

    def one_pass() -> float:
        # NumPy lets go of the interpreter's lock while it reduces
        workers = [threading.Thread(target=np.bitwise_or.reduce, args=(part,)) for part in parts]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return time.perf_counter() - start

    return sum(part.nbytes for part in parts) / min(one_pass() for _ in range(7))


@dataclass(frozen=True)
class ModelCost:
    """Bytes and operations of one model in one precision. Norms are left out."""

    shape: ModelShape
    # what a step reads of the weights: all of them, a tied embedding once
    weight_bytes: float
    # type in which products with the weights are made
    unit: str
    kv_dtype: str = "bfloat16"
    # of the weights, experts: a step reads those that its tokens ask
    expert_bytes: float = 0.0

    @classmethod
    def of(cls, facts: ModelFacts, dtype: str, scheme: str | None) -> ModelCost:
        """Raises ModelError or OptionError where the size of the model or of its format is not known."""
        shape = ModelShape.of(facts.hf_config)
        num_bytes, _ = weight_bytes(facts, shape, dtype, scheme)
        num_bytes -= looked_up_bytes(facts, shape, dtype)
        return cls(shape, num_bytes, unit_of(dtype, scheme), dtype, expert_bytes(facts, shape, dtype, scheme))

    @property
    def kv_bytes_per_token(self) -> int:
        return self.shape.kv_bytes_per_token(self.kv_dtype)

    def step_bytes(self, num_tokens: int) -> float:
        """What a step of so many tokens reads of the weights."""
        experts = self.shape.experts
        return self.weight_bytes - (self.expert_bytes * (1 - experts.share_asked(num_tokens)) if experts else 0.0)

    def matrix_operations(self, num_tokens: int, num_rows: int) -> float:
        """Products with the weights; the head is needed for the rows that get a token only."""
        shape = self.shape
        head = shape.vocab_size * shape.hidden_size
        looked_up = shape.num_table_parameters + head * (1 if shape.has_tied_embeddings else 2)
        layers = shape.num_active_parameters - looked_up
        return 2.0 * (layers * num_tokens + head * num_rows)

    def prompt_operations(self, length: int) -> float:
        """A whole prompt, attention included, and the logits of its last token."""
        shape = self.shape
        attention = 4.0 * shape.query_width * length * (length + 1) / 2
        return self.matrix_operations(length, 1) + attention


def unit_of(dtype: str, scheme: str | None) -> str:
    """Schemes that quantise activations multiply whole numbers; float16 is widened first."""
    if scheme in ("int8", "int4"):
        return "int8"
    return "bfloat16" if dtype == "bfloat16" else "float32"


def least_seconds(work: Work, cost: ModelCost, bandwidth: float, peak: float) -> float:
    """Step by step the larger of arithmetic (products with the weights) and of bytes (weights, and for each sequence
    the KV cache once and its state twice). All prompts are computed in the first step, a shared prefix once."""
    computed = [len(prompt) - work.shared_prefix for prompt in work.prompts]
    prefix = 0 if work.is_prefix_known else work.shared_prefix
    rows = work.sequences_a_request
    seconds = _step_seconds(cost, sum(computed) + prefix, len(work.prompts), 0, bandwidth, peak)
    for step in range(1, max(work.output_lengths)):
        alive = [len(p) for p, length in zip(work.prompts, work.output_lengths, strict=True) if length > step]
        # of the prompt, answers to it read the same
        kept = sum(length + step * rows for length in alive)
        seconds += _step_seconds(cost, len(alive) * rows, len(alive) * rows, kept, bandwidth, peak)
    return seconds


def _step_seconds(cost: ModelCost, tokens: int, rows: int, kept: int, bandwidth: float, peak: float) -> float:
    num_bytes = cost.step_bytes(tokens) + kept * cost.kv_bytes_per_token + 2 * rows * cost.shape.state_bytes
    return max(cost.matrix_operations(tokens, rows) / peak, num_bytes / bandwidth)
