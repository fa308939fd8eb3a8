"""When servers for prompts and servers for output pay: the highest rate at which a promise is kept, simulated.

    python benchmarks/disaggregation.py [--model M] [--device D] [--devices 4] [--seconds 10] [--trace T] [--kv-link 50]

For each trace and each promise the same devices serve whole requests, or are divided into those that compute prompts
and those that go on (docs/disaggregation.md), in each way that there is. The rate is found by halving, to 5 %;
requests come for so many seconds. Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import json

from quire.config.device_sheets import device_sheet
from quire.simulation.deployment import Deployment, deploy
from quire.simulation.run import simulate
from quire.simulation.slo import Slo
from quire.simulation.split_fleet import Split
from quire.simulation.traces.drawn import DrawnTrace

TRACES = ("azure-conv", "azure-code", "sharegpt")
PROMISES = ("ttft_p90<2s,tpot_p90<25ms", "ttft_p90<2s,tpot_p90<12ms")
PRECISION = 1.05
FIRST_RATE = 0.5
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--device", default="h100")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--kv-link", type=float, help="GB a second (default: the link of the device's sheet)")
    parser.add_argument("--trace", choices=TRACES, action="append", help="by default all")
    arguments = parser.parse_args()
    deployment = deploy(arguments.model, device_sheet(arguments.device), {"enable_prefix_caching": False})
    link = None if arguments.kv_link is None else arguments.kv_link * 1e9
    num = arguments.devices
    ways: dict[str, Split | None] = {f"{num} whole": None}
    ways |= {f"{one} + {num - one}": Split(one, num - one, link) for one in range(1, num)}
    print("| trace | promise |", " | ".join(ways), "|")
    print("| --- | --- |" + " --- |" * len(ways))
    found: dict[str, dict[str, float]] = {}
    for trace in arguments.trace or TRACES:
        for promise in PROMISES:
            rates = {
                way: highest_rate(deployment, trace, Slo.parse(promise), split, num, arguments.seconds)
                for way, split in ways.items()
            }
            found[f"{trace}, {promise}"] = rates
            print(f"| {trace} | {promise} |", " | ".join(f"{rate:.1f}" for rate in rates.values()), "|", flush=True)
    print(json.dumps(found))


def highest_rate(
    deployment: Deployment, trace: str, slo: Slo, split: Split | None, num_replicas: int, seconds: float
) -> float:
    """Requests a second; 0 if not even one in two seconds is served so."""
    lowest = highest = FIRST_RATE
    while keeps(deployment, trace, highest, slo, split, num_replicas, seconds):
        lowest, highest = highest, 2 * highest
    if highest == FIRST_RATE:
        return 0.0
    while highest / lowest > PRECISION:
        middle = (lowest * highest) ** 0.5
        if keeps(deployment, trace, middle, slo, split, num_replicas, seconds):
            lowest = middle
        else:
            highest = middle
    return lowest


def keeps(
    deployment: Deployment, trace: str, rate: float, slo: Slo, split: Split | None, num_replicas: int, seconds: float
) -> bool:
    arrivals = DrawnTrace(trace, rate, max(1, round(rate * seconds)), SEED).arrivals()
    outcome = simulate(deployment, arrivals, slo=slo, seed=SEED, num_replicas=num_replicas, split=split)
    return bool(outcome.summary["slo"]["is_met"])


if __name__ == "__main__":
    main()
