"""What sampling costs beside the model: microseconds of `Sampler.sample` without the logits, per step.

    python benchmarks/sampling.py [--rows 1 16 64] [--vocab 151936] [--dtype bfloat16] [--threads N] [--only KIND]

For each kind of request: with the C++ kernels, with plain PyTorch (what a machine without a compiler runs), and the C++
figure in reads: one read is the time to read all logits of the step once. Both ways and the read take turns within one
loop, so whatever else the machine does hits all; figures are medians, of processor time with one thread and of wall
time with more. Logits have some clear favourites, as those of a trained model; `flat` ones are nearly alike. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from quire.messages import AdmittedSequence, int_array
from quire.sampling_params import SamplingParams
from quire.worker.input_batch import BatchBuilder
from quire.worker.kernels import cpu, operators, reference
from quire.worker.row_table import RowTable
from quire.worker.sampler.sampler import Sampler

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top_k=40": SamplingParams(temperature=0.8, top_k=40),
    "top_k=1000": SamplingParams(temperature=0.8, top_k=1000),
    "top_p=0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "top_p=0.9, flat": SamplingParams(temperature=0.8, top_p=0.9),
    "min_p=0.05": SamplingParams(temperature=0.8, min_p=0.05),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.5),
    "logit_bias": SamplingParams(temperature=0.0, logit_bias={7: 1.0, 99: -2.0}),
    "logprobs=5": SamplingParams(temperature=0.0, logprobs=5),
}
MIX = "a mix"
OPERATORS = ("best_tokens", "choose_tokens", "gather_logits", "penalise", "token_logprobs")
LENGTH = 1024  # tokens that every row has


@contextmanager
def plain_pytorch() -> Iterator[None]:
    kernels = {name: getattr(operators, name) for name in OPERATORS}
    for name in OPERATORS:
        setattr(operators, name, getattr(reference, name))
    yield
    for name, kernel in kernels.items():
        setattr(operators, name, kernel)


class Case:
    """A sampler whose rows all are of one kind, or of each kind in turn, and logits for them."""

    def __init__(self, kind: str, num_rows: int, logits_NV: torch.Tensor) -> None:
        vocab_size = logits_NV.shape[1]
        self._logits, self._copy = logits_NV, logits_NV.clone()
        self._model_seconds = 0.0
        table = RowTable(num_rows, LENGTH + 8)
        self._sampler = Sampler(table, self._compute_logits)
        samplings = list(KINDS.values()) if kind == MIX else [KINDS[kind]]
        for row in range(num_rows):
            sequence = AdmittedSequence(
                row=row,
                sequence_id=row,
                token_ids=int_array(np.random.default_rng(row).zipf(1.3, LENGTH) % vocab_size),
                num_prompt_tokens=LENGTH // 2,
                num_computed_tokens=LENGTH - 1,
                sampling=samplings[row % len(samplings)],
                seed=row,
            )
            table.admit(sequence)
            self._sampler.admit(sequence)
        rows = np.arange(num_rows)
        self._batch = BatchBuilder(table, 16, torch.device("cpu")).build(rows, np.ones(num_rows, dtype=np.int64))
        self._hidden = torch.zeros(num_rows, 1)

    def _compute_logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Fresh every time, because processors may change them; as after a model, they were just written."""
        start = CLOCK()
        self._copy.copy_(self._logits)
        self._model_seconds += CLOCK() - start
        return self._copy

    def seconds(self) -> float:
        self._model_seconds = 0.0
        start = CLOCK()
        self._sampler.sample(self._hidden, self._batch)
        return CLOCK() - start - self._model_seconds


CLOCK: Callable[[], float] = time.process_time


def read_seconds(logits_NV: torch.Tensor) -> float:
    numbers = logits_NV.view(torch.float32)
    start = CLOCK()
    numbers.sum()
    return CLOCK() - start


def measure(kind: str, num_rows: int, logits_NV: torch.Tensor, seconds: float) -> tuple[float, float, float]:
    """Medians in microseconds: C++, plain PyTorch, one read."""
    case = Case(kind, num_rows, logits_NV)
    times: tuple[list[float], list[float], list[float]] = ([], [], [])
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 4:
        times[0].append(case.seconds())
        with plain_pytorch():
            times[1].append(case.seconds())
        times[2].append(read_seconds(logits_NV))
    cpp, plain, read = (1e6 * statistics.median(column[1:]) for column in times)
    return cpp, plain, read


def logits_like(kind: str, num_rows: int, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    if kind.endswith("flat"):
        return (logits * 0.6).to(dtype)
    logits *= 2.5
    favourites = torch.randint(0, vocab_size, (num_rows, 30), generator=generator)
    return logits.scatter_add(1, favourites, torch.linspace(14, 4, 30).expand(num_rows, -1)).to(dtype)


@torch.inference_mode()
def main() -> None:
    global CLOCK
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each figure")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if not cpu.load():
        raise SystemExit(f"no C++ kernels here: {cpu.statistics()['reason']}")
    cpu.set_crew(arguments.threads)
    CLOCK = time.process_time if arguments.threads == 1 else time.perf_counter
    print(f"{'':16}" + "".join(f"{rows:>21} rows    " for rows in arguments.rows))
    print(f"{'':16}" + "     C++ plain us  reads  " * len(arguments.rows))
    results: dict[str, dict[int, dict[str, float]]] = {}
    for kind in (kind for kind in (*KINDS, MIX) if arguments.only in kind):
        results[kind] = {}
        line = f"{kind:16}"
        for num_rows in arguments.rows:
            logits = logits_like(kind, num_rows, arguments.vocab, getattr(torch, arguments.dtype))
            cpp, plain, read = measure(kind, num_rows, logits, arguments.seconds)
            results[kind][num_rows] = {"us": round(cpp, 1), "plain_us": round(plain, 1), "read_us": round(read, 1)}
            line += f"{cpp:8.0f} {plain:8.0f} {cpp / read:6.1f}  "
        print(line, flush=True)
    print(json.dumps({"sampling_us": results, **vars(arguments), "isa": cpu.statistics()["isa"]}))


if __name__ == "__main__":
    main()
