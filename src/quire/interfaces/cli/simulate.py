"""`quire simulate`: a trace of requests through the engine's own core, on a virtual clock and a modelled device."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from quire.config.device_sheets import DEVICE_SHEETS, DeviceSheet, device_sheet
from quire.config.processors import processors
from quire.engine_core.executor.modelled import DraftQuality
from quire.errors import CapacityError, OptionError
from quire.interfaces.cli.bench_flags import number, whole_number
from quire.interfaces.cli.bench_limits import measure_limits
from quire.interfaces.cli.engine_flags import add_engine_flags, engine_options_of
from quire.routing import POLICIES
from quire.routing.router import MOST_REPLICAS
from quire.simulation.arrivals import Arrival, Progress
from quire.simulation.costs.aiconfigurator import AiConfiguratorCosts
from quire.simulation.costs.roofline import MEASURED
from quire.simulation.deployment import Deployment, Price, deploy, deploy_measured
from quire.simulation.measured import MeasuredSteps
from quire.simulation.report import page_of
from quire.simulation.run import simulate
from quire.simulation.shapes import shape_names
from quire.simulation.slo import Slo
from quire.simulation.split_fleet import Split
from quire.simulation.traces import drawn
from quire.simulation.traces.formats import open_trace

# what has no meaning without a worker, or is said in another way here
_NOT_HERE = ("model", "device", "seed", "load_format", "kv_events_config", "data_parallel_size", "routing_policy")
_FURTHER_DEVICES = ", cpu (rates of this processor, measured), or a file of quire bench steps (.json)"
_BAR = 30
_COSTS: dict[str, Price | None] = {"roofline": None, "aiconfigurator": AiConfiguratorCosts}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is simulated")
    group.add_argument("--model", required=True, help=f"a folder with a config.json, or {', '.join(shape_names())}")
    group.add_argument("--device", required=True, help=f"{', '.join(DEVICE_SHEETS)}{_FURTHER_DEVICES}")
    group.add_argument(
        "--costs", choices=list(_COSTS), default="roofline",
        help="what a step takes: by the device's data sheet (default), or by measured tables of its operators "
        "(pip install 'quire[aiconfigurator]')",
    )  # fmt: skip
    group.add_argument(
        "--trace", required=True, metavar="FILE",
        help=f"arrivals: Azure's form (.csv), Mooncake's or Quire's own (.jsonl), ShareGPT's (.json); or lengths that "
        f"are drawn: {', '.join(drawn.names())}",
    )  # fmt: skip
    group.add_argument("--rate", metavar="X", help="requests a second, at drawn times, in place of the trace's own")
    group.add_argument("--num-requests", metavar="N", help="so many, the first of a trace (default: all, or 1000)")
    group.add_argument("--replicas", metavar="N", help="engines, each on devices of its own (default: 1)")
    group.add_argument(
        "--prefill", metavar="N", help="engines that compute prompts, with --decode, in place of --replicas"
    )
    group.add_argument("--decode", metavar="N", help="engines that go on from these prompts")
    group.add_argument(
        "--kv-link", metavar="X", help="GB a second from one to the other (default: the link of the device's sheet)"
    )
    group.add_argument("--router", choices=list(POLICIES), default="least_time", help="which of them gets a request")
    group.add_argument(
        "--router-age", default="0", metavar="SECONDS", help="how old what the router knows of them is (default: 0)"
    )
    group.add_argument(
        "--draft-acceptance", default="0.7", metavar="X", help="share of drafts that are right (default: 0.7)"
    )
    group.add_argument("--slo", default="", metavar="TERMS", help="what is promised, as ttft_p90<1s,tpot_p90<50ms")
    group.add_argument("--seed", default="0", metavar="N", help="of all that is drawn; the same one, the same bytes")
    group.add_argument(
        "--processes", metavar="N",
        help="share the work among so many processes, which changes no number (default: one a processor core)",
    )  # fmt: skip
    group.add_argument("--report", metavar="FILE", help="write a page with plots there (HTML)")
    group.add_argument("--json", metavar="FILE", help="write all numbers there; - prints them and no table")
    add_engine_flags(parser, leave_out=_NOT_HERE)


def run(arguments: argparse.Namespace) -> int:
    slo = Slo.parse(arguments.slo)
    seed = whole_number("--seed", arguments.seed, 0)
    load = load_of(arguments, seed)
    deployment = _deployment(arguments, has_contents=load.has_contents)
    progress = _progress(load.num_requests)
    split = _split(arguments)
    if split is None:
        num_replicas = whole_number("--replicas", arguments.replicas or "1", 1)
    else:
        num_replicas = split.num_prefill + split.num_decode
    if num_replicas > MOST_REPLICAS:
        raise OptionError(f"--replicas {num_replicas}: a router has at most {MOST_REPLICAS}.")
    outcome = simulate(
        deployment,
        load.arrivals,
        num_requests=load.num_requests,
        slo=slo,
        seed=seed,
        progress=progress,
        num_replicas=num_replicas,
        split=split,
        router=arguments.router,
        age=0.0 if arguments.router_age == "0" else number("--router-age", arguments.router_age),
        processes=_processes(arguments),
    )
    if not outcome.tally.num_completed:
        reason = next(iter(outcome.tally.errors), "there was none")
        raise CapacityError(f"{arguments.model}: no request of {load.name} could run: {reason}")
    asked = {
        "model": arguments.model,
        "device": deployment.device.name,
        "devices": deployment.num_devices * num_replicas,
        "replicas": num_replicas,
        **({} if split is None else {"prefill": split.num_prefill, "decode": split.num_decode}),
        "router": arguments.router,
        "trace": load.name,
        "arrived": load.num_requests,
        "seed": seed,
    }
    document = {**asked, **outcome.summary}
    if arguments.report:
        _write("--report", arguments.report, page_of(document, outcome.tally))
    _print(document, arguments.json)
    return 0


def _processes(arguments: argparse.Namespace) -> int:
    if arguments.processes is not None:
        return whole_number("--processes", arguments.processes, 1)
    return processors().num_threads


def _split(arguments: argparse.Namespace) -> Split | None:
    if arguments.prefill is None and arguments.decode is None:
        if arguments.kv_link is not None:
            raise OptionError("--kv-link: nothing goes from one engine to another. Give --prefill and --decode.")
        return None
    if arguments.prefill is None or arguments.decode is None or arguments.replicas is not None:
        raise OptionError("--prefill and --decode: engines of two kinds. Give both, and no --replicas.")
    return Split(
        whole_number("--prefill", arguments.prefill, 1),
        whole_number("--decode", arguments.decode, 1),
        None if arguments.kv_link is None else number("--kv-link", arguments.kv_link) * 1e9,
    )


@dataclass(frozen=True)
class Load:
    """What arrives, and how much of it."""

    name: str
    arrivals: Iterator[Arrival]
    num_requests: int
    has_contents: bool


def load_of(arguments: argparse.Namespace, seed: int) -> Load:
    rate = number("--rate", arguments.rate) if arguments.rate is not None else None
    count = whole_number("--num-requests", arguments.num_requests, 1) if arguments.num_requests is not None else None
    if arguments.trace in drawn.names():
        if rate is None:
            raise OptionError(f"trace={arguments.trace}: says no times. Give --rate, in requests a second.")
        synthetic = drawn.DrawnTrace(arguments.trace, rate, count or drawn.DEFAULT_REQUESTS, seed)
        return Load(synthetic.name, synthetic.arrivals(), synthetic.num_requests, has_contents=False)
    trace = open_trace(arguments.trace)
    if rate is not None:
        arrivals = drawn.at_rate(trace, rate, count, seed)
        return Load(trace.name, arrivals, count or len(trace.table), trace.has_contents)
    count = min(count or len(trace.table), len(trace.table))
    return Load(trace.name, islice(trace.arrivals(), count), count, trace.has_contents)


def _deployment(arguments: argparse.Namespace, *, has_contents: bool) -> Deployment:
    typed = {name: value for name, value in vars(arguments).items() if name not in _NOT_HERE}
    options = engine_options_of(argparse.Namespace(**typed))
    if not has_contents:
        # nothing could be found in it, and keeping the names of blocks takes time
        options.setdefault("enable_prefix_caching", False)
    costs = _COSTS[arguments.costs]
    if arguments.device.endswith(".json"):
        if costs is not None:
            raise OptionError(f"--costs {arguments.costs}: {arguments.device} says what steps take. Leave it out.")
        return deploy_measured(arguments.model, MeasuredSteps.read(Path(arguments.device)), options)
    drafts = DraftQuality(_share("--draft-acceptance", arguments.draft_acceptance))
    if arguments.device == "cpu":
        sheet = _this_processor(options)
        return deploy(arguments.model, sheet, options, costs=costs, drafts=drafts, efficiency=MEASURED)
    sheet = device_sheet(arguments.device, _FURTHER_DEVICES)
    return deploy(arguments.model, sheet, options, costs=costs, drafts=drafts)


def _this_processor(options: dict[str, Any]) -> DeviceSheet:
    """Its rates are measured on the spot, and are those that kernels reach."""
    limits = measure_limits(options.get("num_threads"))
    dtype = options.get("dtype", "bfloat16")
    peak = limits.peaks.get(dtype) or limits.peaks.get("float32")
    if not peak or not limits.bandwidth:
        raise OptionError("device=cpu: its rates are measured by a program that needs a C++ compiler. Install one.")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DeviceSheet("cpu", memory, limits.bandwidth, peak, limits.bandwidth, runtime_bytes=0)


def _share(flag: str, text: str) -> float:
    """A share."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise OptionError(f"{flag} {text[:40]}: must be a number from 0 to 1.")
    return value


def _progress(num_requests: int) -> Progress | None:
    """A bar on stderr, where somebody looks at it."""
    if not sys.stderr.isatty():
        return None
    drawn = [-1]

    def tell(num_arrived: int, time: float) -> None:
        filled = _BAR * num_arrived // num_requests
        if filled != drawn[0] or num_arrived == num_requests:
            drawn[0] = filled
            end = "\n" if num_arrived == num_requests else ""
            bar = "#" * filled + "." * (_BAR - filled)
            print(f"\r[{bar}] {num_arrived:,} requests, {time:,.0f} s", end=end, file=sys.stderr, flush=True)

    return tell


def _print(document: dict[str, Any], json_file: str | None) -> None:
    if json_file == "-":
        print(json.dumps(document))
        return
    if json_file:
        _write("--json", json_file, json.dumps(document, indent=1) + "\n")
    print(as_table(document))


def _write(flag: str, file: str, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{flag} {file}: cannot be written ({error.strerror}).") from error


def as_table(document: dict[str, Any]) -> str:
    """The numbers that most people ask for."""
    requests, tokens = document["requests"], document["tokens"]
    engines = document["engines"]
    engine = {key: fmean(one[key] for one in engines) for key in engines[0]}
    lines = [
        f"{document['model']} on {document['devices']} x {document['device']}, {document['trace']}",
        f"requests            {requests['completed']:,} in {document['seconds']:,.1f} s "
        f"({requests['per_second']:.2f} a second), {requests['failed']:,} failed",
        f"output              {tokens['output_per_second']:,.0f} tokens a second",
        *(_line_of(name, document[key]) for name, key in _LATENCIES),
        f"prefix cache        {document['cache_hit_rate']:.1%} of prompt tokens",
        f"preemptions         {document['preemptions']['recomputed']:,.0f} computed again, "
        f"{document['preemptions']['swapped']:,.0f} swapped",
        f"{'engine' if len(engines) == 1 else 'mean of engines':<20}busy {engine['busy']:.1%}, "
        f"{engine['sequences_at_once']:.1f} sequences at once, {engine['kv_blocks_held']:.1%} of KV blocks held",
    ]
    if "moved" in document:
        moved = document["moved"]
        seconds = moved["seconds_mean"] * 1e3
        lines.append(
            f"moved               {moved['prompts']:,} prompts, {moved['blocks']:,} blocks, in {seconds:,.1f} ms"
        )
    if "slo" in document:
        slo = document["slo"]
        terms = ", ".join(f"{term} {'holds' if holds else 'FAILS'}" for term, holds in slo["terms"].items())
        lines.append(f"goodput             {slo['goodput_per_second']:.2f} requests a second ({terms})")
    return "\n".join(lines + [f"error               {n:,} x {text}" for text, n in requests["errors"].items()])


_LATENCIES = (
    ("first token", "ttft_s"),
    ("between tokens", "inter_token_s"),
    ("a token", "normalized_latency_s"),
    ("whole request", "latency_s"),
)


def _line_of(name: str, numbers: dict[str, float]) -> str:
    shown = ", ".join(f"{key} {numbers[key] * 1e3:,.1f}" for key in ("mean", "p50", "p90", "p99", "max"))
    return f"{name:<20}{shown} ms"
