"""How wrong a simulation is: costs fitted to one workload predict another, which is run in between.

    python benchmarks/simulation_error.py [--model MODEL] [--rate X] [--repetitions N] [--rounds N]

By turns, so that both see the machine in the same moods: workload A (requests that lead to steps of all sizes) is
measured and a table fitted to it; workload B (lengths of ShareGPT, cut to the model, at random times) is predicted and
run, both times behind requests that are not counted: what a worker does for the first time takes longer. Ends in one
line of JSON: for throughput, time to the first token and time per token the median of the runs, the spread of the runs
around it, and the error of the predictions. The acceptance: medians within 5 % beyond the spread, p99 within 10 %
beyond.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from quire.config import EngineConfig, EngineOptions, resolve
from quire.messages import EngineRequest, split_sequence_ids
from quire.simulation.arrivals import Arrival, request_of
from quire.simulation.deployment import deploy_measured
from quire.simulation.measured import MeasuredSteps, load_to_measure
from quire.simulation.recorded_run import RecordedRun, record
from quire.simulation.records import Record
from quire.simulation.run import simulate
from quire.simulation.summary import Tally
from quire.simulation.traces.drawn import DrawnTrace

MEASURES = {
    "throughput": lambda tally: tally.num_output_tokens / (tally.last_end - STARTS_AT),
    "ttft_p50": lambda tally: tally.statistics()["ttft"]["p50"],
    "ttft_p99": lambda tally: tally.statistics()["ttft"]["p99"],
    "tpot_p50": lambda tally: tally.statistics()["tpot"]["p50"],
    "tpot_p99": lambda tally: tally.statistics()["tpot"]["p99"],
}
LONGEST = 512
# of workload B; when the first one that counts comes, on a clock that skips what is idle
NUM_UNCOUNTED = 12
STARTS_AT = 1000.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second of workload B")
    parser.add_argument("--num-requests", type=int, default=120)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=160, help="of workload A")
    arguments = parser.parse_args()
    options = {"max_model_len": LONGEST, "num_threads": 1, "async_scheduling": False, "recorder_bytes": 0}
    config, _ = resolve(EngineOptions(model=arguments.model, device="cpu", **options))
    arrivals = list(behind_uncounted(workload_b(arguments.rate, arguments.num_requests)))
    predicted, measured = [], []
    for repetition in range(arguments.repetitions):
        steps = MeasuredSteps.of(record(config, load_to_measure(config, arguments.rounds, repetition)), config)
        deployment = deploy_measured(arguments.model, steps, {"max_model_len": LONGEST})
        records: list[Record] = []
        simulate(deployment, arrivals, on_record=records.append)
        predicted.append(numbers(tally_of(records)))
        measured.append(numbers(tally_of(records_of(record(config, list(requests(config, arrivals))), arrivals))))
        print(f"{repetition + 1}: predicted {predicted[-1]}\n   measured  {measured[-1]}", flush=True)
    print(json.dumps({name: compared(name, predicted, measured) for name in MEASURES}))


def workload_b(rate: float, count: int) -> Iterator[Arrival]:
    for one in DrawnTrace("sharegpt", rate, count, seed=1).arrivals():
        prompt = min(one.num_prompt_tokens, LONGEST // 2)
        yield replace(one, num_prompt_tokens=prompt, num_output_tokens=min(one.num_output_tokens, LONGEST // 2))


def behind_uncounted(counted: Iterator[Arrival]) -> Iterator[Arrival]:
    """The same requests, later; the first of them stand before them, too, and come all at once."""
    later = [replace(one, at=STARTS_AT + one.at) for one in counted]
    yield from (replace(one, at=0.0) for one in later[:NUM_UNCOUNTED])
    yield from later


def requests(config: EngineConfig, arrivals: list[Arrival]) -> Iterator[tuple[float, EngineRequest]]:
    for number, arrival in enumerate(arrivals):
        request = request_of(arrival, number, config.facts.vocab_size)
        yield arrival.at, request


def records_of(run: RecordedRun, arrivals: list[Arrival]) -> list[Record]:
    """Of a real run, as a simulation has them."""
    records = [Record(n, 0, one.at, one.num_prompt_tokens) for n, one in enumerate(arrivals)]
    for at, outputs in run.outputs:
        for number in split_sequence_ids(outputs.sequence_ids)[0]:
            found = records[number]
            found.num_output_tokens += 1
            found.first_token_at = found.first_token_at if found.first_token_at >= 0 else at
            found.last_token_at = found.ended_at = at
    return records


def tally_of(records: list[Record]) -> Tally:
    tally = Tally()
    for one in records:
        if one.arrived_at >= STARTS_AT:
            tally.add(one)
    return tally


def numbers(tally: Tally) -> dict[str, float]:
    return {name: float(f"{measure(tally):.4g}") for name, measure in MEASURES.items()}


def compared(name: str, predicted: list[dict[str, float]], measured: list[dict[str, float]]) -> dict[str, float]:
    """Shares of the median of the runs: how far the runs lie from it at most, and how far the median prediction."""
    runs = np.array([one[name] for one in measured])
    median = float(np.median(runs))
    return {
        "measured": median,
        "spread": round(float(np.abs(runs / median - 1).max()), 3),
        "error": round(float(np.median([one[name] for one in predicted]) / median - 1), 3),
    }


if __name__ == "__main__":
    main()
