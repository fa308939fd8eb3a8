"""What the engine costs beside the model (W8): microseconds a step with an executor that answers at once.

    python benchmarks/engine_overhead.py [--steps 200] [--synchronous]
    python benchmarks/engine_overhead.py --parts [--situations turnover]    # where that time goes

Real client, core and messages, in one thread: from `schedule` to the step's one columnar message decoded in the client.
Reported is CPU time summed over all threads of the process, median and least over the steps, with wall time beside it.
Handing tokens out to streams is measured apart ("deliver"), and so are ends and arrivals before a step ("turnover").
Three situations: steady decode; a tenth of the sequences ends in each step and as many arrive; and 10,000 requests
wait. Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from statistics import median
from types import FrameType

from instant_executor import InstantExecutor

from quire.engine_client.mailbox import Mailboxes
from quire.engine_core.engine_core import EngineCore
from quire.message_encoding import decode_to_client, encode
from quire.messages import EngineRequest
from quire.observability.recorder import Recorder
from quire.sampling_params import SamplingParams
from quire.testing.core import CoreUnderTest

COUNTS = (1, 64, 256, 1024)
PHASES = ("schedule", "update", "encode", "decode", "deliver")
# Phases of W8; handing tokens out to streams belongs to the front end.
W8 = PHASES[:4]
# who ends and who arrives, before the step that tells of them
TURNOVER = "turnover"
COLUMNS = (*PHASES, TURNOVER, "W8 median", "least", "wall")
_BLOCK_SIZE = 16
_WARM_UP = 24
_MANY = 1 << 30
# By function: of those that are being called, the innermost that stands here.
PARTS = {
    "Lifecycle.add": "arrival: checks, request and sequence, place in line",
    "Lifecycle.abort": "end: blocks, row, queues",
    "TwoLevel.staged": "who is next",
    "AdmissionControl.next": "whether it has room",
    "Lifecycle.place": "its row",
    "Scheduler._begin": "its first tokens",
    "Lifecycle.set_progress": "what worker and client hear of its start",
    "Scheduler._name_granted": "names of blocks that it fills",
    "Scheduler._start": "start: the rest",
    "Scheduler._grant_running": "running rows",
    "Scheduler._message_of": "what the worker hears of a step",
    "Scheduler.schedule": "a decision: the rest",
    "Results.settle": "results",
    "encode": "messages",
    "decode_to_client": "messages",
    "Engine.request": "the client: parameters, mailbox",
    "Engine.step": "executor and mailboxes of this benchmark",
}
_SECONDS_BETWEEN_SAMPLES = 0.001


class Sampler:
    """What Python is doing, once in so many seconds of the process's processor time: less of a change than a profile
    of calls, which charges short functions several times what they take."""

    def __init__(self) -> None:
        self.parts: Counter[str] = Counter()

    def __enter__(self) -> None:
        signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, _SECONDS_BETWEEN_SAMPLES, _SECONDS_BETWEEN_SAMPLES)

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _sample(self, number: int, frame: FrameType | None) -> None:
        while frame is not None:
            part = PARTS.get(frame.f_code.co_qualname)
            if part is not None:
                self.parts[part] += 1
                return
            frame = frame.f_back
        self.parts["the rest of this benchmark"] += 1


class Engine:
    """A core, and a client in the same thread."""

    def __init__(
        self,
        num_sequences: int,
        length: int,
        num_waiting: int,
        policy: str,
        *,
        is_async: bool,
        recorder: Recorder | None = None,
    ) -> None:
        harness = CoreUnderTest(
            num_blocks=num_sequences * (length // _BLOCK_SIZE + 4),
            block_size=_BLOCK_SIZE,
            budget=max(2048, num_sequences * 4),
            max_num_seqs=num_sequences,
            max_model_len=length,
            policy=policy,
            is_async=is_async,
            check_invariants=False,
            recorder=recorder,
        )
        self.scheduler = harness.scheduler
        executor = InstantExecutor(num_sequences)
        self.core = EngineCore(self.scheduler, executor, harness.core.ready, depth=int(is_async))
        self.executor = executor
        self.mailboxes = Mailboxes()
        self._num_requests = 0
        self._depth = int(is_async)
        self._in_flight: list[object] = []
        for _ in range(num_sequences + num_waiting):
            self.add()

    def add(self, max_tokens: int = _MANY) -> None:
        self.core.add(self.request(max_tokens))

    def request(self, max_tokens: int = _MANY) -> EngineRequest:
        """Prompts differ, and so do their lengths: blocks fill up in different steps, as they do in life."""
        number = self._num_requests
        self._num_requests += 1
        prompt = [number % 50, number // 50 % 50, number // 2500, *[number % 50] * (number % 16)]
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        self.mailboxes.open(number, 1)
        return EngineRequest(request_id=number, prompt_token_ids=prompt, sampling=sampling)

    def step(self, clock: Iterator[None]) -> None:
        """One step; the clock is told where a phase ends."""
        decision = self.scheduler.schedule()
        next(clock)
        assert decision is not None
        self._in_flight.append(self.executor.execute(decision))
        next(clock)
        if len(self._in_flight) <= self._depth:
            return
        outputs = self.scheduler.update_from_output(self._in_flight.pop(0).result())  # type: ignore[attr-defined]
        next(clock)
        message = encode(outputs)
        next(clock)
        received = decode_to_client(message)
        next(clock)
        self.mailboxes.deliver(received)  # type: ignore[arg-type]
        for box in self.mailboxes.boxes():
            box.pending = {}
        next(clock)


class PhaseClock:
    """CPU and wall microseconds of each phase, step by step."""

    NAMES = ("schedule", None, "update", "encode", "decode", "deliver")

    def __init__(self) -> None:
        self.cpu: dict[str, list[float]] = defaultdict(list)
        self.wall: dict[str, list[float]] = defaultdict(list)

    def start(self) -> Iterator[None]:
        cpu, wall = time.process_time_ns(), time.perf_counter_ns()
        for name in self.NAMES:
            yield
            cpu_now, wall_now = time.process_time_ns(), time.perf_counter_ns()
            if name is not None:
                self.cpu[name].append((cpu_now - cpu) / 1e3)
                self.wall[name].append((wall_now - wall) / 1e3)
            cpu, wall = time.process_time_ns(), time.perf_counter_ns()
        yield

    def sums(self, times: dict[str, list[float]]) -> list[float]:
        return [sum(step) for step in zip(*(times[name] for name in W8), strict=True)]


def measure(count: int, steps: int, situation: str, policy: str, *, is_async: bool) -> dict[str, float]:
    length = steps + _WARM_UP + 64 if situation == "steady" else 2 * steps + 256
    engine = Engine(count, length, 10_000 if situation == "waiting" else 0, policy, is_async=is_async)
    leaving = max(1, count // 10)
    clock = PhaseClock()
    gc.collect()
    gc.disable()
    for step in range(steps + _WARM_UP):
        if step == _WARM_UP:
            clock = PhaseClock()
        if situation == "turnover":
            running = [request.request_id for request in engine.scheduler.running.requests[:leaving]]
            coming = [engine.request() for _ in running]
            start = time.process_time_ns()
            engine.scheduler.abort(running)
            for request in coming:
                engine.core.add(request)
            clock.cpu[TURNOVER].append((time.process_time_ns() - start) / 1e3)
        ticks = clock.start()
        next(ticks)
        engine.step(ticks)
    gc.enable()
    cpu, wall = clock.sums(clock.cpu), clock.sums(clock.wall)
    phases = {name: median(clock.cpu[name] or [0.0]) for name in (*PHASES, TURNOVER)}
    return {"W8 median": median(cpu), "least": min(cpu), "wall": median(wall), **phases}


def print_parts(count: int, steps: int, situation: str, policy: str, *, is_async: bool) -> None:
    """Microseconds a step, and where requests come and go, of one that does both."""
    sampler = Sampler()
    began = time.process_time_ns()
    with sampler:
        measure(count, steps, situation, policy, is_async=is_async)
    in_all = (time.process_time_ns() - began) / 1e3 / (steps + _WARM_UP)
    leaving = max(1, count // 10)
    print(f"\n{situation}, {count} sequences: microseconds a step, and by requests that come and go")
    for part, samples in sampler.parts.most_common():
        share = in_all * samples / sampler.parts.total()
        print(f"{part:<55}{share:>8.0f}" + (f"{share / leaving:>8.1f}" if situation == "turnover" else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--synchronous", action="store_true", help="async_scheduling=False")
    parser.add_argument("--policy", default="two_level")
    parser.add_argument("--situations", nargs="*", default=["steady", "turnover", "waiting"])
    parser.add_argument("--parts", action="store_true", help="where the time goes, in place of how much it is")
    options = parser.parse_args()
    if options.parts:
        for situation in options.situations:
            for count in COUNTS[2:]:
                print_parts(count, options.steps, situation, options.policy, is_async=not options.synchronous)
        return
    results: dict[str, dict[str, float]] = {}
    for situation in options.situations:
        print(f"\n{situation}: microseconds a step")
        print("sequences" + "".join(f"{name:>10}" for name in COLUMNS))
        results[f"{situation}_us"] = {}
        for count in COUNTS:
            runs = [
                measure(count, options.steps, situation, options.policy, is_async=not options.synchronous)
                for _ in range(3)
            ]
            best = min(runs, key=lambda run: run["W8 median"])
            results[f"{situation}_us"][str(count)] = round(best["W8 median"], 1)
            print(f"{count:>9}" + "".join(f"{best[name]:>10.0f}" for name in COLUMNS))
    results["steady_decode_us"] = results.pop("steady_us", {})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
