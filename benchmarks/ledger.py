"""The ledger of speed: what things cost in counted work, a line a revision (benchmarks/ledger.jsonl).

    make bench-ledger                          counts, and puts a line behind the others
    make bench-ledger WHY="what it buys"       where something costs more than before
    python benchmarks/ledger.py                counts and prints, beside the last line

Nothing here is a time, so every machine counts the same: calls of Quire's own Python functions, bytes of messages,
steps, tokens and blocks of runs on the simulated executor, operators of a step in PyTorch's own kernels, modules that a
start reads. A test counts again and fails where the last line is exceeded by more than `TOLERANCE`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from engine_overhead import Engine

from quire.beam_search_params import BeamSearchParams
from quire.engine_core.executor.rank_channel import encode_step
from quire.interfaces.cli.bench_workloads import TokenSource, batch, shared_prefix
from quire.message_encoding import encode
from quire.testing.core import CoreUnderTest

LEDGER = Path(__file__).parent / "ledger.jsonl"
# of a figure, before somebody must say why it rises
TOLERANCE = 0.05
_SOURCE = str(Path(__file__).parents[1] / "src" / "quire") + os.sep
# frames of their own in some versions of Python, none in others
_INLINED = ("<listcomp>", "<dictcomp>", "<setcomp>")
_VOCABULARY = 50
_SEQUENCES = 256
_STEPS = 32
Counts = dict[str, float]


class Calls:
    """How many functions of Quire's own were called."""

    def __init__(self) -> None:
        self.count = 0

    def see(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        self.count += event == "call" and code.co_filename.startswith(_SOURCE) and code.co_name not in _INLINED


@contextmanager
def counted_calls() -> Iterator[Calls]:
    calls = Calls()
    sys.setprofile(calls.see)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def all_counts() -> Counts:
    """Every figure, by name; less is better."""
    counts: Counts = {}
    for part in (_steady_steps, _comings_and_goings, _a_batch, _alike, _little_memory, _beams, _operators, _modules):
        counts |= part()
    return {name: round(float(value), 2) for name, value in counts.items()}


# ---------------------------------------------------------------------------------------------- the engine's own work


def _steady_steps() -> Counts:
    """Steps in which everybody gets a token, whose blocks fill up now and then."""
    engine = Engine(_SEQUENCES, _STEPS + 64, 0, "fifo", is_async=False)
    for _ in range(20):
        engine.core.step()
    sent = answered = columns = 0
    with counted_calls() as calls:
        for _ in range(_STEPS):
            engine.core.step()
    for _ in range(_STEPS):
        decision = engine.scheduler.schedule()
        assert decision is not None
        columns += decision.num_column_bytes
        sent += len(encode_step(decision, []))
        outputs = engine.scheduler.update_from_output(engine.executor.execute(decision).result())
        answered += len(encode(outputs))
    return {
        "calls of a steady step": calls.count / _STEPS,
        "bytes of a steady step's columns, a sequence": columns / _STEPS / _SEQUENCES,
        "bytes of a steady step's message to a rank, a sequence": sent / _STEPS / _SEQUENCES,
        "bytes of a message to a client, a token": answered / _STEPS / _SEQUENCES,
    }


def _comings_and_goings() -> Counts:
    """Requests of one token each, beside one that runs on."""
    engine = Engine(9, 128, 0, "fifo", is_async=False)
    engine.scheduler.abort(range(1, 9))
    engine.core.step()

    def rounds(number: int) -> int:
        with counted_calls() as calls:
            for _ in range(16):
                for _ in range(number):
                    engine.add(max_tokens=1)
                engine.core.step()
        return calls.count

    alone = rounds(0)
    rounds(8)  # the first time something may be made that stays
    return {"calls of a request that comes and goes": (rounds(8) - alone) / (16 * 8)}


# ---------------------------------------------------------------------------------------------- what a load takes


def _core(**options: Any) -> CoreUnderTest:
    values = {"num_blocks": 4096, "block_size": 16, "budget": 2048, "max_num_seqs": 64, "max_model_len": 2048}
    return CoreUnderTest(check_invariants=False, vocab_size=_VOCABULARY, **{**values, **options})


def _run(core: CoreUnderTest, prompts: Any, lengths: Any) -> Counts:
    for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        core.add(number, list(prompt), max_tokens=length)
    core.run(1_000_000)
    return core.core.statistics()


def _a_batch() -> Counts:
    """W2: many of log-normal lengths, with room for all."""
    work = batch(TokenSource(_VOCABULARY, 0, 0))
    core = _core()
    statistics = _run(core, work.prompts, work.output_lengths)
    return {"steps of W2": statistics["num_steps_total"], "tokens computed in W2": core.executor.work.num_tokens}


def _alike() -> Counts:
    """W3: prompts that begin alike."""
    work = shared_prefix(TokenSource(_VOCABULARY, 0, 0))
    core = _core()
    statistics = _run(core, work.prompts, work.output_lengths)
    return {"steps of W3": statistics["num_steps_total"], "tokens computed in W3": core.executor.work.num_tokens}


def _little_memory() -> Counts:
    """W2 with a quarter of the memory that it could use: who gives way is computed again."""
    work = batch(TokenSource(_VOCABULARY, 0, 0))
    core = _core(num_blocks=160, preemption_mode="recompute")
    statistics = _run(core, work.prompts, work.output_lengths)
    return {
        "steps of W2 with little memory": statistics["num_steps_total"],
        "tokens computed again in W2 with little memory": statistics["recomputed_tokens_total"],
    }


def _beams() -> Counts:
    """W4: beams share what they can, and copy what they cannot."""
    core = _core()
    params = BeamSearchParams(beam_width=4, max_tokens=64)
    core.beam(0, TokenSource(_VOCABULARY, 0, 0).tokens(256), params.beam_width, max_tokens=params.max_tokens)
    most_held = 0
    while core.core.has_work:
        core.step()
        most_held = max(most_held, core.pool.num_held)
    num_copied = core.executor.work.num_copied_blocks
    return {"blocks held by W4's beams": most_held, "blocks copied for W4's beams": num_copied}


# ---------------------------------------------------------------------------------------------- the worker, the start

_OPERATORS = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from quire.config.model_source import embedded_path
from quire.testing.model_harness import ModelHarness, worker_config
from quire.worker.model_loader import load_model

class Count(TorchDispatchMode):
    number = 0
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        Count.number += 1
        return function(*args, **(kwargs or {}))

harness = ModelHarness(load_model(worker_config(embedded_path())))
harness.step({0: [5, 6, 7]})
with Count():
    harness.step({0: [8]})
print(Count.number)
"""
_MODULES = "import sys, {module}; print(sum(name.split('.')[0] == 'quire' for name in sys.modules))"


def _operators() -> Counts:
    """Of the embedded model, for one token, in PyTorch's own kernels."""
    return {"operators of a token": _said(_OPERATORS, QUIRE_CPU_KERNELS="reference")}


def _modules() -> Counts:
    """That are read before anything is done."""
    starts = {"import quire": "quire", "a core's process": "quire.engine_core.process"}
    return {f"modules of {name}": _said(_MODULES.format(module=module)) for name, module in starts.items()}


def _said(code: str, **variables: str) -> int:
    """What a program of its own prints."""
    environment = {**os.environ, "PYTHONPATH": str(Path(_SOURCE).parent), "OMP_NUM_THREADS": "1", **variables}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=folder, check=True
        )
    return int(done.stdout.split()[-1])


# ---------------------------------------------------------------------------------------------- the ledger itself


def lines(path: Path = LEDGER) -> list[dict[str, Any]]:
    """Oldest first."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def rises(before: Counts, now: Counts) -> dict[str, tuple[float, float]]:
    """What costs more than before, by more than the tolerance; figures that were not counted then have no before."""
    return {
        name: (before[name], value)
        for name, value in now.items()
        if name in before and value > before[name] * (1 + TOLERANCE)
    }


def table(before: Counts, now: Counts) -> str:
    rows = [f"{name:<58}{_short(before.get(name)):>12}{_short(value):>12}" for name, value in now.items()]
    return "\n".join([f"{'':<58}{'last line':>12}{'now':>12}", *rows])


def extend(path: Path, counts: Counts, why: str, git: Callable[..., str]) -> dict[str, Any]:
    """A line of this revision, in place of one that it has already."""
    known = lines(path)
    revision = git("rev-parse", "--short=10", "HEAD")
    earlier = [line for line in known if line["revision"] != revision]
    before = earlier[-1]["counts"] if earlier else {}
    if (more := rises(before, counts)) and not why:
        shown = "; ".join(f"{name}: {old:g}, now {new:g}" for name, (old, new) in more.items())
        raise SystemExit(f'This costs more than before: {shown}. Say why: make bench-ledger WHY="what it buys".')
    line = {"revision": revision, "date": datetime.now(UTC).strftime("%Y-%m-%d"), "counts": counts}
    line |= {"why": why} if why else {}
    path.write_text("".join(json.dumps(one) + "\n" for one in [*earlier, line]), encoding="utf-8")
    return line


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=LEDGER.parent, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}".removesuffix(".0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extend", action="store_true", help="put a line behind the others")
    parser.add_argument("--why", default="", help="what it buys that something costs more")
    options = parser.parse_args()
    counts = all_counts()
    known = lines()
    print(table(known[-1]["counts"] if known else {}, counts))
    if options.extend:
        extend(LEDGER, counts, options.why, _git)


if __name__ == "__main__":
    main()
