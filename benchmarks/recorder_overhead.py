"""What the recorder of decisions costs, what looking at the engine costs it, and what a log of the run costs.

    python benchmarks/recorder_overhead.py [--steps 400]

Two engines that differ in nothing but the recorder take their steps in turn, so that whatever else the machine does
meets both alike; who goes first alternates. Reported is the CPU time of a step as in engine_overhead.py (schedule,
update, encode, decode): the median of each, and the median of the differences of neighbouring steps. "turnover" ends a
tenth of the sequences in each step and adds as many. Then the pause of the engine for each view of /v1/observe, with
10,000 blocks.

The log (quire serve --record) of an engine of the embedded model: CPU time of a step, of its records on its own thread
and on that of the disk, and both as a share of the step; bytes on the disk. Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path
from statistics import median

from engine_overhead import COUNTS, Engine, PhaseClock

from quire.config import EngineOptions, resolve
from quire.engine_core.launch import make_executor
from quire.engine_core.recorded_core import record_core
from quire.messages import EngineRequest
from quire.observability.recorder import DecisionRecorder
from quire.observability.redaction import RedactingSink, Redaction
from quire.observability.run_log import RecordSink, RunLogWriter
from quire.observability.run_records import RunRecord
from quire.sampling_params import SamplingParams
from quire.testing.core import CoreUnderTest

_BYTES = 16 * 2**20
_WARM_UP = 24


class Side:
    """An engine and its clock."""

    def __init__(self, count: int, length: int, *, is_recorded: bool) -> None:
        recorder = DecisionRecorder(_BYTES, time.monotonic) if is_recorded else None
        self.engine = Engine(count, length, 0, "two_level", is_async=True, recorder=recorder)
        self.clock = PhaseClock()

    def step(self, leaving: int) -> None:
        if leaving:
            running = [request.request_id for request in self.engine.scheduler.running.requests[:leaving]]
            self.engine.scheduler.abort(running)
            for _ in running:
                self.engine.add()
        ticks = self.clock.start()
        next(ticks)
        self.engine.step(ticks)

    def times(self) -> list[float]:
        return self.clock.sums(self.clock.cpu)


def measure(count: int, steps: int, *, turnover: bool) -> dict[str, float]:
    length = 2 * steps + 256
    sides = [Side(count, length, is_recorded=is_recorded) for is_recorded in (False, True)]
    leaving = max(1, count // 10) if turnover else 0
    gc.collect()
    gc.disable()
    for step in range(steps + _WARM_UP):
        if step == _WARM_UP:
            for side in sides:
                side.clock = PhaseClock()
        for side in sides if step % 2 else sides[::-1]:
            side.step(leaving)
    gc.enable()
    without, with_recorder = (side.times() for side in sides)
    difference = median(b - a for a, b in zip(without, with_recorder, strict=True))
    return {
        "without_us": round(median(without), 1),
        "with_us": round(median(with_recorder), 1),
        "difference_us": round(difference, 2),
        "percent": round(100 * difference / median(without), 2),
    }


def pauses(num_blocks: int = 10_000, num_sequences: int = 256) -> dict[str, float]:
    """Milliseconds for which no step is decided, the median and the longest of 50."""
    core = CoreUnderTest(
        num_blocks=num_blocks, block_size=16, budget=1 << 20, max_num_seqs=num_sequences, max_model_len=1024,
        check_invariants=False, recorder=DecisionRecorder(_BYTES, time.monotonic),
    )  # fmt: skip
    shared = [1 + number % 40 for number in range(160)]
    for number in range(num_sequences):
        prompt = [*shared, *[number % 50] * (200 + number % 64)]
        sampling = SamplingParams(max_tokens=500, ignore_eos=True, temperature=0.0)
        core.core.add(EngineRequest(request_id=number, prompt_token_ids=prompt, sampling=sampling))
    for _ in range(40):
        core.step()
    found = {}
    for name, args in (("observe_state", {}), ("observe_blocks", {}), ("recent_decisions", {"since": 0})):
        times = []
        for _ in range(50):
            start = time.process_time_ns()
            core.core.control(name, args)
            times.append((time.process_time_ns() - start) / 1e6)
        found[f"{name}_ms"] = round(median(times), 3)
        found[f"{name}_longest_ms"] = round(max(times), 3)
    return found


class TimedSink:
    """Counts the CPU time of whoever writes."""

    def __init__(self, inner: RecordSink) -> None:
        self._inner = inner
        self.nanoseconds = 0

    def write(self, record: RunRecord) -> None:
        began = time.thread_time_ns()
        self._inner.write(record)
        self.nanoseconds += time.thread_time_ns() - began


def measure_log(count: int, steps: int, log: Path, *, is_redacted: bool) -> dict[str, float]:
    """Microseconds a step of the embedded model: of the step, of its records where they are made, and of the thread
    that writes them; bytes a step."""
    config, _ = resolve(
        EngineOptions(device="cpu", num_threads=1, max_num_seqs=count, async_scheduling=False, recorder_bytes=0)
    )
    writer = RunLogWriter(log, 2**30)
    outer = TimedSink(RedactingSink(writer, Redaction(config.facts.vocab_size, b"key")) if is_redacted else writer)
    core = record_core(config, make_executor(config.worker), outer, writer.now)
    for number in range(count):
        sampling = SamplingParams(max_tokens=steps + _WARM_UP, ignore_eos=True, temperature=0.0)
        core.add(EngineRequest(request_id=number, prompt_token_ids=[5 + number % 90] * 8, sampling=sampling))
    for _ in range(_WARM_UP):
        core.step()
    clock = time.pthread_getcpuclockid(writer.thread_id)
    outer.nanoseconds = 0
    writing = time.clock_gettime_ns(clock)
    num_bytes = log.stat().st_size
    times = []
    for _ in range(steps):
        began = time.thread_time_ns()
        core.step()
        times.append(time.thread_time_ns() - began)
    writing = time.clock_gettime_ns(clock) - writing
    num_bytes = log.stat().st_size - num_bytes
    core.shutdown()
    writer.close()
    step = sum(times) - outer.nanoseconds
    return {
        "step_us": round(step / steps / 1e3, 1),
        "making_us": round(outer.nanoseconds / steps / 1e3, 1),
        "writing_us": round(writing / steps / 1e3, 1),
        "bytes": round(num_bytes / steps),
        "percent": round(100 * (outer.nanoseconds + writing) / step, 2),
    }


def measure_logs(steps: int) -> dict[str, object]:
    names = ("step_us", "making_us", "writing_us", "bytes", "percent")
    print(f"{'log':>10}{'sequences':>10}" + "".join(f"{name:>12}" for name in names))
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("plain", "redacted"):
            for count in COUNTS:
                name = f"{kind}_{count}"
                numbers = measure_log(count, steps, Path(folder) / name, is_redacted=kind == "redacted")
                found[name] = numbers
                print(f"{kind:>10}{count:>10}" + "".join(f"{numbers[name]:>12}" for name in names))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--log", action="store_true", help="the log alone")
    options = parser.parse_args()
    results: dict[str, object] = {"log": measure_logs(options.steps)}
    if options.log:
        print(json.dumps(results))
        return
    print(f"{'':>10}{'sequences':>10}{'without':>10}{'with':>10}{'difference':>12}{'percent':>10}")
    for situation in ("steady", "turnover"):
        for count in COUNTS:
            found = measure(count, options.steps, turnover=situation == "turnover")
            results[f"{situation}_{count}"] = found
            numbers = "".join(f"{found[name]:>10.1f}" for name in ("without_us", "with_us"))
            print(f"{situation:>10}{count:>10}{numbers}{found['difference_us']:>12.2f}{found['percent']:>10.2f}")
    results["pauses"] = pauses()
    for name, value in results["pauses"].items():
        print(f"{name:>32} {value:>8.3f}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
