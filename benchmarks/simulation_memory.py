"""What memory a simulation of many replicas takes while requests come and go (docs/simulation.md).

    python benchmarks/simulation_memory.py [--replicas 1000] [--requests 100000] [--num-blocks 2000] [--processes 2]

Llama-3-8B on H100s with prefix caches behind `least_time`, conversations with the lengths of Azure's trace, 8 a second
and replica. `--num-blocks`: of each cache, so few that all are full after a quarter of the requests; 0: what an H100
has. Whenever a twentieth of the requests has come: how often these fill all caches, and the resident memory of the
largest process and of all together in MB, what they share counted in each; then how much it grew by a request.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from quire.config.device_sheets import device_sheet
from quire.engine_core.executor.modelled import VirtualClock
from quire.simulation.arrivals import Arrival
from quire.simulation.deployment import deploy
from quire.simulation.run import simulate
from quire.simulation.traces.drawn import DrawnTrace

_RATE = 8.0
_PIECES = 20


def resident() -> list[float]:
    """MB of this process and of those that it has started."""
    own = os.getpid()
    children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
    pages = [int(Path(f"/proc/{process}/statm").read_text().split()[1]) for process in (own, *children)]
    return [count * os.sysconf("SC_PAGE_SIZE") / 1e6 for count in pages]


class Load:
    """Arrivals, and how many blocks those that have come will fill."""

    def __init__(self, arrivals: Iterable[Arrival], block_size: int) -> None:
        self.num_blocks = 0
        self._arrivals = arrivals
        self._block_size = block_size

    def __iter__(self) -> Iterator[Arrival]:
        for arrival in self._arrivals:
            # the last token is never computed
            self.num_blocks += (arrival.num_prompt_tokens + arrival.num_output_tokens - 1) // self._block_size
            yield arrival


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--num-blocks", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    options: dict[str, object] = {"enable_prefix_caching": True}
    if arguments.num_blocks:
        options["num_gpu_blocks_override"] = arguments.num_blocks
    deployment = deploy("llama-3-8b", device_sheet("h100"), options)
    capacity = deployment.core(VirtualClock()).ready.num_blocks * arguments.replicas
    trace = DrawnTrace("azure-conv", _RATE * arguments.replicas, arguments.requests)
    load = Load(trace.arrivals(), deployment.config.block_size)
    every = arguments.requests // _PIECES
    seen: list[tuple[int, float]] = []

    def look(num_arrived: int, time: float) -> None:
        if num_arrived % every:
            return
        sizes = resident()
        seen.append((num_arrived, sum(sizes)))
        filled = load.num_blocks / capacity
        print(
            f"{num_arrived / arguments.requests:4.0%} of requests, {filled:5.2f} caches named: "
            f"largest process {max(sizes):7.1f} MB, all {sum(sizes):7.1f} MB",
            flush=True,
        )

    outcome = simulate(
        deployment,
        load,
        num_requests=arguments.requests,
        num_replicas=arguments.replicas,
        processes=arguments.processes,
        progress=look,
    )
    quarter = len(seen) // 4
    for name, first, last in (("first quarter", 0, quarter), ("rest", quarter, len(seen) - 1)):
        num_requests = seen[last][0] - seen[first][0]
        grown = seen[last][1] - seen[first][1]
        print(f"{name}: {grown / num_requests * 1e3:.2f} KB a request")
    evicted = sum(engine["kv_blocks_evicted"] for engine in outcome.summary["engines"])
    print(f"{evicted:,.0f} blocks evicted, {outcome.summary['preemptions']['recomputed']:,.0f} requests gave way")


if __name__ == "__main__":
    main()
