"""A small run with a real model on this processor, beside the same run simulated.

All is an eighth of the paper's: lengths of ShareGPT, the longest sequence, the KV cache. So as many requests should run
at once as in figure 3.13. The model is the one in the package; scheduler, managers and worker are the engine's. The
simulation has its own worker, and the times of steps from a table that is fitted to the real ones. Times are those of
the processor on one thread, whatever else it does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from quire.config import EMBEDDED, EngineConfig, EngineOptions, resolve
from quire.engine_core.executor.modelled import ModelledExecutor
from quire.messages import EngineRequest, split_sequence_id
from quire.sampling_params import SamplingParams
from quire.simulation.arrivals import request_of
from quire.simulation.costs.table import TableCosts
from quire.simulation.paper.assumptions import Assumptions
from quire.simulation.paper.lab import Task
from quire.simulation.paper.report import Line, Report
from quire.simulation.paper.systems import MAX, ORACLE, PAGED, POW2, manager_of
from quire.simulation.paper.workloads import MAX_MODEL_LEN, SHAREGPT
from quire.simulation.recorded_run import RecordedRun, record

_SMALLER = 8
_SHORT = replace(
    SHAREGPT,
    mean_prompt=SHAREGPT.mean_prompt / _SMALLER,
    mean_output=SHAREGPT.mean_output / _SMALLER,
    max_model_len=MAX_MODEL_LEN // _SMALLER,
)
_BLOCK_SIZE = 4
# Table 3.1
_NUM_BLOCKS = 15_700 // _SMALLER // _BLOCK_SIZE
_NUM_REQUESTS = 160
# all wait from the start
_RATE = 1e7
_SYSTEMS = (MAX, POW2, ORACLE, PAGED)
# figure 3.13
_BATCHED = dict(zip(_SYSTEMS, (7.00, 9.81, 13.62, 30.42), strict=True))


@dataclass(frozen=True)
class Ran:
    """Of one system, real or simulated."""

    num_batched: float
    tokens_per_second: float

    @classmethod
    def of(cls, run: RecordedRun, seconds: Sequence[float]) -> Ran:
        """`num_batched`: over the steps in which requests wait, but for the first of them, while memory fills."""
        known: set[int] = set()
        num_waiting = 0
        for number, decided in enumerate(run.decisions):
            new = {sequence_id for _, sequence_id, *_ in decided.admitted} - known
            if new:
                known |= new
                num_waiting = number
        full = run.works[num_waiting // 4 : num_waiting + 1]
        num_tokens = sum(work.num_sampled for work in run.works)
        return cls(fmean(work.num_rows for work in full), num_tokens / sum(seconds))


@dataclass(frozen=True)
class Comparison:
    """By system; and how many requests have the same tokens in all of them."""

    real: dict[str, Ran]
    simulated: dict[str, Ran]
    num_equal: int
    num_requests: int


@dataclass(frozen=True)
class RunAll:
    """One system after the other, so that none disturbs the times of another one."""

    num_requests: int

    def run(self, assumed: Assumptions, scale: float) -> Comparison:
        count = max(len(_SYSTEMS), round(self.num_requests * scale))
        runs = {system: _record(system, assumed, count) for system in _SYSTEMS}
        works = [work for run in runs.values() for work in run.works]
        seconds = [took for run in runs.values() for took in run.seconds]
        costs = TableCosts.fit(works, seconds)
        simulated = {}
        for system, run in runs.items():
            again = _record(system, assumed, count, ModelledExecutor(run.capacity, costs, control=run.control))
            simulated[system] = Ran.of(again, [float(costs.seconds(work)) for work in again.works])
        tokens = [_tokens_of(run) for run in runs.values()]
        num_equal = sum(all(one[number] == tokens[0][number] for one in tokens) for number in range(count))
        return Comparison(
            {system: Ran.of(run, run.seconds) for system, run in runs.items()}, simulated, num_equal, count
        )


def _record(
    system: str, assumed: Assumptions, num_requests: int, worker: ModelledExecutor | None = None
) -> RecordedRun:
    config = _config(system)
    manager = manager_of(system, config.max_model_len)
    return record(
        config, _requests(config, assumed, num_requests), worker, make_manager=manager, timer=time.process_time
    )


def _config(system: str) -> EngineConfig:
    config, _ = resolve(
        EngineOptions(
            model=EMBEDDED,
            device="cpu",
            num_threads=1,
            async_scheduling=False,
            recorder_bytes=0,
            block_size=_BLOCK_SIZE,
            num_gpu_blocks_override=_NUM_BLOCKS,
            max_model_len=MAX_MODEL_LEN // _SMALLER,
            enable_prefix_caching=False,
            # whoever keeps its piece to the end is never swapped out
            swap_space=EngineOptions.swap_space if system == PAGED else 0.0,
        )
    )
    return replace(config, engine_process=False)


def _requests(config: EngineConfig, assumed: Assumptions, count: int) -> Iterator[tuple[float, EngineRequest]]:
    for number, arrival in enumerate(_SHORT.arrivals(_RATE, count, assumed)):
        request = request_of(arrival, number, config.facts.vocab_size)
        request.prompt_token_ids = [int(token) for token in request.prompt_token_ids]
        request.sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=arrival.num_output_tokens)
        yield 0.0, request


def _tokens_of(run: RecordedRun) -> dict[int, list[int]]:
    """By request."""
    found: dict[int, list[int]] = {}
    for _, outputs in run.outputs:
        for sequence_id, token_id in zip(outputs.sequence_ids.tolist(), outputs.token_ids.tolist(), strict=True):
            found.setdefault(split_sequence_id(sequence_id)[0], []).append(token_id)
    return found


class Real:
    """No figure of the paper."""

    name = "real"
    _RUN = RunAll(_NUM_REQUESTS)

    def tasks(self, assumed: Assumptions) -> Sequence[Task]:
        return [self._RUN]

    def report(self, results: dict[Task, Any], assumed: Assumptions) -> Report:
        found: Comparison = results[self._RUN]
        lines = []
        for system in _SYSTEMS:
            real, simulated = found.real[system], found.simulated[system]
            lines += [
                Line(f"{system}: requests at once, real", real.num_batched, _BATCHED[system]),
                Line(f"{system}: requests at once, simulated", simulated.num_batched),
                Line(f"{system}: tokens/s, real", real.tokens_per_second),
                Line(f"{system}: tokens/s, simulated", simulated.tokens_per_second),
            ]
        paged = found.real[PAGED]
        for system in (ORACLE, MAX):
            factor = paged.tokens_per_second / found.real[system].tokens_per_second
            lines.append(Line(f"vLLM / {system}: tokens/s, real", factor))
        lines.append(Line("requests with equal tokens in all systems", found.num_equal, found.num_requests))
        return Report(self.name, "a small run on this processor, an eighth of the paper's ShareGPT", lines)
