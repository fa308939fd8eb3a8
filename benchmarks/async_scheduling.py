"""Asynchronous scheduling on against off (4.6.1): the time of a whole step, and what of the engine's own is hidden.

    OMP_NUM_THREADS=1 python benchmarks/async_scheduling.py [--shapes embedded 0.6b] [--seconds 15]

One engine works in both ways by turns, round by round, in steady decode at 1, 8 and 32 sequences: whatever else the
machine does meets both, and the weights lie in the same place. A step is everything from `schedule` to the encoded
message, with the real worker. With one thread for the model a second core is free for the engine.

    time        medians of the rounds, their quartiles, and the median of on / off in the same round
    hidden      the share of the engine's time (schedule, update, encode) in which the worker ran, by the clock
    worker      what the worker's part of a step takes: with a small model it gets longer, because both threads want
                the interpreter's lock

Quartiles and CPU time say how far a busy machine can be trusted. The last line is one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import engine_rounds
from engine_rounds import SteadyEngine, Way
from timeline_chart import Bar, timeline_chart

from quire.testing.tiny_checkpoints import shape_0_6b_config

COUNTS = (1, 8, 32)
LEAST_ROUNDS, MOST_ROUNDS = 4, 24
# steps of a round: many of the small model, few of the large one, so that rounds are short
STEPS = {"embedded": 16, "0.6b": 3}
RECORDED = {"embedded": 60, "0.6b": 6}
WORKER = "model step"
FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "async_scheduling.svg"


class Recorder:
    """When each part of an engine worked. It wraps methods of that engine, so the engine itself knows of no clock."""

    def __init__(self, engine: SteadyEngine) -> None:
        self.bars: list[Bar] = []
        self.is_on = False
        scheduler, worker = engine.core.scheduler, engine.core.executor.worker
        scheduler.schedule = self._recorded("schedule", scheduler.schedule)
        scheduler.update_from_output = self._recorded("update", scheduler.update_from_output)
        worker.execute = self._recorded(WORKER, worker.execute)

    def _recorded(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                if self.is_on:
                    self.bars.append(Bar(kind, start, time.perf_counter()))

        return call

    @property
    def of_worker(self) -> list[Bar]:
        return [bar for bar in self.bars if bar.kind == WORKER]

    @property
    def of_engine(self) -> list[Bar]:
        return [bar for bar in self.bars if bar.kind != WORKER]

    def engine_seconds(self) -> float:
        """Of a step, as the median of each part."""
        kinds = {bar.kind for bar in self.of_engine}
        return sum(statistics.median(b.end - b.start for b in self.of_engine if b.kind == kind) for kind in kinds)

    def worker_seconds(self) -> float:
        return statistics.median(bar.end - bar.start for bar in self.of_worker)

    def hidden_share(self) -> float:
        hidden = sum(
            max(0.0, min(ours.end, theirs.end) - max(ours.start, theirs.start))
            for ours in self.of_engine
            for theirs in self.of_worker
        )
        return hidden / sum(bar.end - bar.start for bar in self.of_engine)


@dataclass
class Times:
    """Milliseconds a step of one engine, round by round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def report(self) -> dict[str, float]:
        low, middle, high = statistics.quantiles(self.wall, n=4)
        report = {"median_ms": middle, "quartiles_ms": [low, high], "least_ms": min(self.wall)}
        return report | {"cpu_ms": statistics.median(self.cpu)}


def compare(engines: dict[str, Way], shape: str, count: int, seconds: float) -> dict[str, Any]:
    engines["on"].take_over()
    engines["on"].engine.fill(count)
    times = {name: Times() for name in engines}
    num_steps, end = STEPS[shape], time.perf_counter() + seconds
    while len(times["on"].wall) < LEAST_ROUNDS or (time.perf_counter() < end and len(times["on"].wall) < MOST_ROUNDS):
        # who goes first changes, because the first one finds the caches of the other's last round
        order = sorted(engines, reverse=len(times["on"].wall) % 2 == 1)
        for name in order:
            wall, cpu = engines[name].round(num_steps)
            times[name].wall.append(wall / num_steps * 1e3)
            times[name].cpu.append(cpu / num_steps * 1e3)
    ratios = [on / off for on, off in zip(times["on"].wall, times["off"].wall, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        **{name: one.report() for name, one in times.items()},
        "rounds": len(ratios),
        "ratio": middle,
        "ratio_quartiles": [low, high],
        "ratio_of_medians": statistics.median(times["on"].wall) / statistics.median(times["off"].wall),
        "ratio_of_least": min(times["on"].wall) / min(times["off"].wall),
    }


def record(engines: dict[str, Way], recorders: dict[str, Recorder], num_steps: int) -> None:
    """Steps in a row with the recorders on; the first and the last ones have nothing to lie beside."""
    for name, engine in engines.items():
        recorder = recorders[name]
        recorder.bars.clear()
        engine.take_over()
        engine.step()
        recorder.is_on = True
        original = engine_rounds.encode
        engine_rounds.encode = recorder._recorded("encode", original)
        for _ in range(num_steps):
            engine.step()
        engine_rounds.encode = original
        recorder.is_on = False
        engine.core.control("worker.ping", {})
    # The step that still ran when the recorder was switched off has no end.
    last = max(bar.end for bar in recorders["on"].of_worker)
    recorders["on"].bars[:] = [bar for bar in recorders["on"].bars if bar.start < last]


def draw(recorders: dict[str, Recorder], what: str) -> None:
    """The quickest four steps in a row of each, because others on the machine may have taken the cores at any time."""
    begin, lengths = {}, []
    for name, recorder in recorders.items():
        starts = [bar.start for bar in recorder.of_worker]
        first = min(range(1, len(starts) - 4), key=lambda place: starts[place + 4] - starts[place])
        begin[name] = starts[first]
        lengths.append(starts[first + 4] - starts[first])
    length = 1.05 * max(lengths)
    lanes = {}
    for name, title in (("off", "off"), ("on", "on")):
        for part, bars in (("engine", recorders[name].of_engine), ("worker", recorders[name].of_worker)):
            lanes[f"{title}: {part}"] = [
                Bar(bar.kind, (bar.start - begin[name]) * 1e3, (bar.end - begin[name]) * 1e3) for bar in bars
            ]
    title = f"Asynchronous scheduling off and on: {what}"
    FIGURE.write_text(timeline_chart(title, "milliseconds", lanes, length * 1e3), encoding="utf-8")


def measure(shape: str, model: str, options: argparse.Namespace) -> dict[str, Any]:
    sizes: dict[str, Any] = {"num_threads": options.threads, "max_model_len": 1024, "max_num_batched_tokens": 1024}
    memory = {"kv_cache_memory_bytes": 2**29 if shape == "0.6b" else 2**27, "enable_prefix_caching": False}
    load = {"load_format": "dummy", "dtype": "bfloat16"} if shape == "0.6b" else {}
    chosen = _default_choice(model, sizes | memory | load)
    engine = SteadyEngine(model, is_async=True, **sizes, **memory, **load)
    engines = {"off": Way(engine, is_ahead=False), "on": Way(engine, is_ahead=True)}
    recorders = {name: Recorder(engine) for name in engines}
    results: dict[str, Any] = {"default": chosen}
    for count in options.counts:
        found = compare(engines, shape, count, options.seconds)
        record(engines, recorders, RECORDED[shape])
        engine_ms = {name: recorder.engine_seconds() * 1e3 for name, recorder in recorders.items()}
        found |= {"engine_ms": engine_ms, "hidden": recorders["on"].hidden_share()}
        found["worker_ms"] = {name: recorder.worker_seconds() * 1e3 for name, recorder in recorders.items()}
        if (shape, count) == ("embedded", 32) and not options.no_figure:
            draw(recorders, "embedded model, 32 sequences")
        engine.empty()
        results[str(count)] = found
        _print(shape, count, found)
    engine.core.shutdown()
    return results


def _default_choice(model: str, options: dict[str, Any]) -> str:
    """What an engine decides that was not told: the last line of its report."""
    engine = SteadyEngine(model, is_async=None, **options)
    choice = engine.core.ready.report[-1]
    engine.core.shutdown()
    print(choice, flush=True)
    return choice


def _print(shape: str, count: int, found: dict[str, Any]) -> None:
    parts = [
        f"{name} {found[name]['median_ms']:8.2f} ms ({found[name]['quartiles_ms'][0]:.2f} to "
        f"{found[name]['quartiles_ms'][1]:.2f}, CPU {found[name]['cpu_ms']:.2f})"
        for name in ("off", "on")
    ]
    low, high = found["ratio_quartiles"]
    print(f"{shape:<9}{count:>3}  {'   '.join(parts)}   on/off {found['ratio']:.3f} ({low:.3f} to {high:.3f})")
    print(
        f"{'':12}  {found['rounds']} rounds; engine {found['engine_ms']['off']:.3f} ms of a step, "
        f"hidden {found['hidden']:.0%}; worker {found['worker_ms']['off']:.2f} and {found['worker_ms']['on']:.2f} ms; "
        f"fastest on / fastest off {found['ratio_of_least']:.3f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--counts", nargs="*", type=int, default=list(COUNTS))
    parser.add_argument("--seconds", type=float, default=15.0, help="for each model and number of sequences")
    parser.add_argument("--threads", type=int, default=1, help="threads of the model")
    parser.add_argument("--no-figure", action="store_true")
    options = parser.parse_args()
    results: dict[str, Any] = {"benchmark": "async_scheduling", "threads": options.threads}
    with tempfile.TemporaryDirectory() as folder:
        models = {"embedded": "embedded", "0.6b": str(shape_0_6b_config(Path(folder)))}
        for shape in options.shapes:
            results[shape] = measure(shape, models[shape], options)
    print(json.dumps(results, default=float))


if __name__ == "__main__":
    main()
