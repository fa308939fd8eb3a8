"""Interleaved rounds: a few engines are resident at once, Quire always among them, and take turns in every round.

A *pod* is one precision and the engines that are resident together. A *unit* is one workload in one round of one pod,
asked of each of its engines, one after the other, the others asleep. A unit is written when it is whole, so a run that
was stopped goes on where it was. The budget is shared out among the pods; what would not fit into it is left out, and
said.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from rival_engines import DRIVERS, AbsentError, Build, Engine
from rival_process import EngineFailedError, EngineProcess
from rival_workloads import WORKLOADS, Sizes, jobs, num_tokens, warm_up

from quire.interfaces.cli.bench_limits import measure_limits

_MIN_FREE_BYTES = 5 << 30
_LONGEST_SECONDS = 400.0
# Seconds that a workload takes an engine that has not done it yet, on two cores; afterwards what it took is known.
_EXPECTED = {"start": 10.0, "W1": 7.0, "W5": 8.0, "W4": 12.0, "W3": 15.0, "W2": 45.0}
_EXPECTED_OF = {
    ("vllm", "start"): 120.0, ("vllm-zentorch", "start"): 120.0, ("vllm", "W4"): 36.0, ("vllm-zentorch", "W4"): 36.0,
    ("vllm", "W3"): 20.0, ("vllm-zentorch", "W3"): 20.0, ("openvino", "W3"): 65.0, ("llama.cpp", "W5"): 14.0,
    ("llama.cpp", "W2"): 150.0, ("ik_llama.cpp", "W2"): 150.0, ("transformers", "W1"): 19.0,
    ("transformers", "W4"): 50.0,
}  # fmt: skip
# How often at most; a pod asks everything once before it asks anything again.
_WITH_GOALS = {"int8": ("W1", "W5", "W2"), "int4": ("W1", "W5")}
_ROUNDS = {"W1": 5, "W5": 4, "W4": 2, "W3": 2, "W2": 1}


@dataclass(frozen=True)
class Pod:
    """Engines that are resident together, and what part of the budget they get."""

    precision: str
    engines: tuple[Engine, ...]
    workloads: tuple[str, ...]
    share: float

    @property
    def key(self) -> str:
        return f"{self.precision}: {', '.join(engine.name for engine in self.engines)}"


def pods_of(
    engines: Sequence[Engine], precisions: Sequence[str], workloads: Sequence[str] | None, resident: int
) -> list[Pod]:
    """Quire with as many others as may be resident beside it.

    `workloads=None`: those that a goal is set for, fewer where the precision has fewer goals.
    """
    pods = []
    own = tuple(engine for engine in engines if engine.name == "quire")
    for precision in precisions:
        others = [engine for engine in engines if engine.name != "quire" and precision in engine.forms]
        wanted = _WITH_GOALS.get(precision, WORKLOADS) if workloads is None else workloads
        asked = [key for key in WORKLOADS if key in wanted]
        step = max(1, resident - len(own))
        for first in range(0, max(len(others), 1), step):
            members = (*own, *others[first : first + step])
            if members:
                share = sum(_whole_seconds(engine, asked) for engine in members)
                pods.append(Pod(precision, members, tuple(asked), share))
    return pods


def expected_seconds(name: str, workload: str) -> float:
    return _EXPECTED_OF.get((name, workload), _EXPECTED[workload])


def _whole_seconds(engine: Engine, asked: Sequence[str]) -> float:
    """The start and all rounds."""
    rounds = sum(expected_seconds(engine.name, key) * _ROUNDS[key] for key in asked if key not in engine.left_out)
    return expected_seconds(engine.name, "start") + rounds


@dataclass
class Results:
    """Everything that was measured, on disk after every unit."""

    path: Path
    settings: dict[str, Any]
    units: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    limits: dict[str, Any] | None = None

    @classmethod
    def open(cls, path: Path, settings: dict[str, Any]) -> Results:
        if not path.exists():
            return cls(path, settings)
        saved = json.loads(path.read_text(encoding="utf-8"))
        # a run may go on after midnight
        if {**saved["settings"], "date": None} != {**settings, "date": None}:
            raise SystemExit(f"{path} was measured with other settings: name another file, or remove it.")
        return cls(path, saved["settings"], saved["units"], saved["facts"], saved["notes"], saved["limits"])

    def save(self) -> None:
        saved = {name: value for name, value in asdict(self).items() if name != "path"}
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(saved, indent=1), encoding="utf-8")
        partial.replace(self.path)

    def note(self, text: str) -> None:
        print(f"  note: {text}", flush=True)
        if text not in self.notes:
            self.notes.append(text)
        self.save()

    def note_limits(self, measured: dict[str, Any]) -> None:
        """The best of all: whatever else the machine did at the time can only have lowered them."""
        known = self.limits or {}
        self.limits = {name: max(value, known.get(name, value)) for name, value in measured.items()}
        self.save()

    def num_rounds(self, pod: Pod, workload: str) -> int:
        return sum(unit["pod"] == pod.key and unit["workload"] == workload for unit in self.units)


class Run:
    """All pods, one after the other."""

    def __init__(self, build: Build, results: Results, sizes: Sizes, **how: Any) -> None:
        self.build, self.results, self.sizes = build, results, sizes
        self.threads: int = how["threads"]
        self.priority: int | None = how["priority"]
        self.options: dict[str, Any] = how["options"]
        self.start_limit: float = how["start_limit"]
        self.rounds: dict[str, int] = {key: min(_ROUNDS[key], how["rounds"] or 99) for key in WORKLOADS}
        self.end = time.monotonic() + how["budget"]
        # (engine, precision, workload) -> seconds, the last time
        self.took: dict[tuple[str, str, str], float] = {}

    def run(self, pods: Sequence[Pod]) -> None:
        for number, pod in enumerate(pods):
            left, shares = self.end - time.monotonic(), sum(pod.share for pod in pods[number:])
            if all(self.results.num_rounds(pod, key) >= self.rounds[key] for key in pod.workloads):
                continue
            if left <= 0:
                self.results.note(f"{pod.key}: left out, the budget is used up")
                continue
            PodRun(self, pod, time.monotonic() + left * pod.share / shares).run()

    def warm(self, pods: Sequence[Pod]) -> None:
        """Starts and ends each engine once: what it compiles at its first start is there afterwards."""
        for pod in pods:
            PodRun(self, pod, self.end).warm()


class PodRun:
    """One pod: its engines start, take turns, and end."""

    def __init__(self, run: Run, pod: Pod, end: float) -> None:
        self.run_, self.pod, self.end = run, pod, end
        self.processes: dict[str, EngineProcess] = {}

    def run(self) -> None:
        print(f"\n{self.pod.key} ({self.end - time.monotonic():.0f} s)", flush=True)
        try:
            for engine in self.pod.engines:
                self._start(engine)
            rivals = [name for name in self.processes if name != "quire"]
            if rivals or len(self.pod.engines) == 1:
                self._take_turns()
        finally:
            for name in list(self.processes):
                self._end(name)

    def warm(self) -> None:
        for engine in self.pod.engines:
            try:
                self._start(engine)
            finally:
                if engine.name in self.processes:
                    self._end(engine.name)

    def _start(self, engine: Engine) -> None:
        run, precision = self.run_, self.pod.precision
        label = f"{engine.name}, {precision}"
        try:
            if not run.build.is_installed(engine):
                raise AbsentError("not installed")
            free = psutil.virtual_memory().available
            if free < _MIN_FREE_BYTES:
                raise AbsentError(f"only {free >> 20} MiB of memory are free")
            settings = {
                "model": run.build.model(engine, precision),
                "precision": precision,
                "threads": run.threads,
                "max_length": max(2560, run.sizes.prompt + 64),
                "options": run.options.get(f"{engine.name}:{precision}", run.options.get(engine.name, {})),
            }
            command = [run.build.python(engine), str(DRIVERS / engine.driver), json.dumps(settings)]
            log = run.build.logs / f"{engine.name}-{precision}.log"
            process = EngineProcess(command, run.build.variables(engine, run.threads), log, run.priority)
        except (AbsentError, OSError) as error:
            run.results.note(f"{label}: {error}")
            return
        try:
            facts = process.wait_ready(run.start_limit)
            for job in warm_up(run.sizes):
                process.ask(job.command(), _LONGEST_SECONDS)
        except EngineFailedError as error:
            process.end()
            run.results.note(f"{label}: {error}")
            return
        facts["memory_mb"] = process.memory_bytes() >> 20
        run.results.facts[label] = facts
        process.pause()
        self.processes[engine.name] = process
        print(f"  {label} is ready after {facts['ready']:.1f} s", flush=True)

    def _end(self, name: str) -> None:
        self.processes.pop(name).end()

    def _take_turns(self) -> None:
        results, rounds = self.run_.results, self.run_.rounds
        for number in range(max(rounds[key] for key in self.pod.workloads)):
            for workload in self.pod.workloads:
                if results.num_rounds(self.pod, workload) == number < rounds[workload]:
                    self._unit(workload, number)

    def _unit(self, workload: str, number: int) -> None:
        members = [name for name in self.processes if self._is_asked(name, workload)]
        if not members or (members == ["quire"] and len(self.pod.engines) > 1):
            return
        # another one begins in every round
        members = members[number % len(members) :] + members[: number % len(members)]
        unit: dict[str, Any] = {
            "pod": self.pod.key,
            "precision": self.pod.precision,
            "workload": workload,
            "round": number,
            "time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"),
            "load": round(psutil.getloadavg()[0], 2),
            # beside the figures, because a shared machine's memory is twice as fast in one minute as in another
            "limits": measure_limits(self.run_.threads).as_dict(),
            "figures": {},
        }
        self.run_.results.note_limits(unit["limits"])
        for name in members:
            figures = self._turn(name, workload, number)
            unit["figures"][name] = figures
            shown = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
            print(f"  {workload} round {number + 1}  {name:<14} {shown}", flush=True)
        self.run_.results.units.append(unit)
        self.run_.results.save()

    def _turn(self, name: str, workload: str, number: int) -> dict[str, float]:
        """Empty where the engine failed or cannot do it."""
        run, process, figures = self.run_, self.processes[name], {}
        label, start = f"{name}, {self.pod.precision}, {workload}", time.monotonic()
        process.go_on()
        try:
            for job in jobs(workload, run.sizes, number):
                answer = process.ask(job.command(), _LONGEST_SECONDS)
                if "unsupported" in answer:
                    run.results.note(f"{label}: {answer['unsupported']}")
                    continue
                if (count := num_tokens(answer)) != job.work.num_output_tokens:
                    run.results.note(f"{label}: gave {count} tokens instead of {job.work.num_output_tokens}")
                    continue
                figures.update(job.read(answer))
            process.pause()
        except EngineFailedError as error:
            run.results.note(f"{label}: {error}")
            self._end(name)
        run.took[name, self.pod.precision, workload] = time.monotonic() - start
        return figures

    def _is_asked(self, name: str, workload: str) -> bool:
        engine = next(engine for engine in self.pod.engines if engine.name == name)
        label = f"{name}, {self.pod.precision}, {workload}"
        if workload in engine.left_out:
            self.run_.results.note(f"{label}: {engine.left_out[workload]}")
            return False
        # small sizes are for trying the machinery out
        expected = expected_seconds(name, workload) * min(1.0, self.run_.sizes.prompt / 2048)
        seconds = self.run_.took.get((name, self.pod.precision, workload), expected)
        if time.monotonic() + seconds > self.end:
            self.run_.results.note(f"{label}: some rounds left out, one takes about {seconds:.0f} s")
            return False
        return True
