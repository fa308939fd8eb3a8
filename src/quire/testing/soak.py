"""Random workloads for as long as you like, in pieces that add up.

    python -m quire.testing.soak --steps 20000000 --state build/soak.json     until so many steps are done in all
    python -m quire.testing.soak --steps 20000000 --state build/soak.json --seconds 600     a piece of it
    python -m quire.testing.soak --seed 17                                     one workload, as it failed
    python -m quire.testing.soak --seed 17 --plain                             with a plain engine

The state file is written after every batch of seeds and read at the start, so that a run that was stopped goes on;
seeds that failed are tried again first. Exit status 1 says that a rule was broken; the command that repeats it is
printed. A seed that failed belongs into tests/seeds/, whose seeds are run by the default tests.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from quire.testing.simulator.coverage import counts_of
from quire.testing.simulator.engine_settings import PLAIN_ENGINE, EngineSettings
from quire.testing.simulator.workload import Workload

STEPS_OF_A_SEED = 400
# The default tests run the seeds below it.
FIRST_SEED = 5_000_000
# Seeds from before there were mishaps, rows that are late, states, ranges that are whole, or steps of several tokens;
# tests/seeds/ remembers some of them.
_WITHOUT_MISHAPS = range(1_000_000, 2_000_000)
_WITHOUT_LATE_ROWS = range(1_000_000, 4_000_000)
_WITHOUT_STATES = range(FIRST_SEED)
_WITHOUT_RANGES = range(30_000_000)
_WITHOUT_BURSTS = range(40_000_000)
_SEEDS_OF_A_BATCH = 64
_MOST_FAILURES = 20


@dataclass
class SeedResult:
    """What became of one workload."""

    seed: int
    num_steps: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    error: str | None = None


@dataclass
class SoakState:
    """The sum over all pieces so far."""

    next_seed: int = FIRST_SEED
    num_seeds: int = 0
    num_steps: int = 0
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[dict[str, str | int]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path | None, first_seed: int = FIRST_SEED) -> SoakState:
        if path is None or not path.exists():
            return cls(first_seed)
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path | None) -> None:
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        # a run that is killed while it writes must not lose what was done
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    def try_failures_again(self) -> None:
        """What was mended since is forgotten."""
        results = [result_of(int(failure["seed"])) for failure in self.failures]
        self.failures = [{"seed": one.seed, "error": one.error} for one in results if one.error is not None]

    def add(self, result: SeedResult) -> None:
        self.next_seed = max(self.next_seed, result.seed + 1)
        self.num_seeds += 1
        self.num_steps += result.num_steps
        self.counts = dict(Counter(self.counts) + Counter(result.counts))
        if result.error is not None:
            self.failures.append({"seed": result.seed, "error": result.error})


def command_for(seed: int) -> str:
    """What repeats a workload."""
    return f"python -m quire.testing.soak --seed {seed}"


def _workload(seed: int, engine: EngineSettings | None = None) -> Workload:
    has_mishaps, has_late_rows = seed not in _WITHOUT_MISHAPS, seed not in _WITHOUT_LATE_ROWS
    has_states = seed not in _WITHOUT_STATES
    return Workload(
        seed,
        engine=engine,
        has_mishaps=has_mishaps,
        has_late_rows=has_late_rows,
        has_states=has_states,
        has_ranges=seed not in _WITHOUT_RANGES,
        has_bursts=seed not in _WITHOUT_BURSTS,
        is_chunked=seed % 3 == 2,
    )


def run_seed(seed: int, num_steps: int = STEPS_OF_A_SEED, engine: EngineSettings | None = None) -> Workload:
    """One workload to its end; a broken rule raises AssertionError, with the command that repeats it."""
    workload = _workload(seed, engine)
    _run(workload, num_steps)
    return workload


def result_of(seed: int, num_steps: int = STEPS_OF_A_SEED) -> SeedResult:
    """The same, with the failure as a text."""
    workload = _workload(seed)
    error = None
    try:
        _run(workload, num_steps)
    except Exception as broken:
        # the rule that was broken, and the notes
        error = "".join(traceback.format_exception_only(broken)).strip()
    return SeedResult(seed, workload.core.executor.work.num_steps, counts_of(workload), error)


def _run(workload: Workload, num_steps: int) -> None:
    try:
        workload.run(num_steps)
        workload.finish()
    except Exception as error:
        plain = " --plain" if workload.engine == PLAIN_ENGINE else ""
        error.add_note(f"{workload.sizes}\n{workload.engine}\nrepeat: {command_for(workload.seed)}{plain}")
        raise


def soak(state: SoakState, path: Path | None, num_steps: int, seconds: float, processes: int) -> None:
    """Batches of seeds until there are enough steps in all, the time is over, or too much is broken to go on."""
    started = last = time.monotonic()
    with _Runner(processes) as runner:
        while state.num_steps < num_steps and last - started < seconds and len(state.failures) < _MOST_FAILURES:
            for result in runner.run(range(state.next_seed, state.next_seed + _SEEDS_OF_A_BATCH)):
                state.add(result)
                if result.error is not None:
                    print(f"\nseed {result.seed} failed: {result.error}\nrepeat: {command_for(result.seed)}")
            now = time.monotonic()
            state.seconds += now - last
            last = now
            state.write(path)
            _show(state, num_steps)
    print()


class _Runner:
    """Runs seeds here, or in processes of their own. Results come in the order of the seeds."""

    def __init__(self, processes: int) -> None:
        self._pool = multiprocessing.get_context("spawn").Pool(processes, _be_quiet) if processes > 1 else None

    def __enter__(self) -> _Runner:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.terminate()

    def run(self, seeds: Iterable[int]) -> Iterator[SeedResult]:
        return map(result_of, seeds) if self._pool is None else self._pool.imap(result_of, seeds)


def _be_quiet() -> None:
    """What an engine warns of is meant to happen here."""
    logging.getLogger("quire").addHandler(logging.NullHandler())


def _show(state: SoakState, num_steps: int) -> None:
    share = min(1.0, state.num_steps / num_steps)
    rate = state.num_steps / max(state.seconds, 1e-9)
    line = (
        f"{share:6.1%}  {state.num_steps:,} of {num_steps:,} steps, {state.num_seeds:,} seeds, "
        f"{len(state.failures)} failures, {rate:,.0f} steps/s"
    )
    print(f"\r{line}" if sys.stdout.isatty() else line, end="" if sys.stdout.isatty() else "\n", flush=True)


def _report(state: SoakState) -> None:
    width = max(map(len, state.counts), default=0)
    for name, count in sorted(state.counts.items()):
        print(f"{name:<{width}}  {count:>14,}")
    print(f"{state.num_steps:,} steps of {state.num_seeds:,} workloads in {state.seconds:,.0f} s")
    for failure in state.failures:
        print(f"failed: {command_for(int(failure['seed']))}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=200_000, help="at least so many in all, those of the state included"
    )
    parser.add_argument("--state", type=Path, help="a file that sums up the pieces")
    parser.add_argument(
        "--first-seed",
        type=int,
        default=FIRST_SEED,
        help="where a new state begins: pieces of several machines need not repeat each other",
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="workloads that run side by side")
    parser.add_argument("--seed", type=int, help="run this workload alone, and show what breaks")
    parser.add_argument("--plain", action="store_true", help="first in first out, synchronously, without drafts")
    options = parser.parse_args(arguments)
    _be_quiet()
    if options.seed is not None:
        # a broken rule ends here, with its traceback
        workload = run_seed(options.seed, engine=PLAIN_ENGINE if options.plain else None)
        print(f"seed {options.seed}: {workload.core.executor.work.num_steps} steps, every rule kept")
        print(workload.sizes, workload.engine, sep="\n")
        return 0
    if min(options.steps, options.processes) < 1 or options.first_seed < 0:
        parser.error("--steps and --processes are 1 or more, --first-seed is 0 or more")
    state = SoakState.read(options.state, options.first_seed)
    state.try_failures_again()
    state.write(options.state)
    status = 0
    try:
        soak(state, options.state, options.steps, options.seconds, options.processes)
    except KeyboardInterrupt:
        # what was done is in the state, up to the last batch
        status = 130
    _report(state)
    return 1 if state.failures else status


if __name__ == "__main__":
    sys.exit(main())
