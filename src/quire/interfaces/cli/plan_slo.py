"""`quire plan --slo`: which devices, and how many, keep a promise for a trace of requests (docs/planning.md)."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quire.config.device_sheets import device_sheet
from quire.errors import OptionError
from quire.interfaces.cli.bench_flags import whole_number
from quire.interfaces.cli.simulate import load_of
from quire.simulation.charts.line_chart import Line, line_chart
from quire.simulation.planner import PRICES, Found, Plan, Question, Trial, plan
from quire.simulation.slo import Slo

# exit status, for scripts: nothing keeps the promise
NOTHING_KEEPS_IT = 1
_NUM_REQUESTS = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to buy (--slo)")
    group.add_argument("--slo", metavar="TERMS", help="what is promised, as ttft_p90<1s,tpot_p90<50ms")
    group.add_argument("--trace", metavar="FILE", help="the requests: what `quire simulate --trace` takes")
    group.add_argument("--rate", metavar="X", help="requests a second, at drawn times, in place of the trace's own")
    group.add_argument("--num-requests", metavar="N", help="so many, the first of a trace (default: all, or 1000)")
    group.add_argument("--devices", metavar="NAMES", default="h100", help="with commas between them (default: h100)")
    group.add_argument("--sizes", metavar="N,N", default="1,2,4,8", help="devices that may share an engine")
    group.add_argument("--most-devices", metavar="N", default="64", help="in all (default: 64)")
    group.add_argument("--prices", metavar="NAME=X", default="", help="dollars an hour: h100=2.5,h200=3.5")
    group.add_argument("--seed", default="0", metavar="N", help="of all that is drawn")
    group.add_argument("--json", metavar="FILE", help="write all numbers there")
    group.add_argument("--write", metavar="FILE", help="write the picture there, as SVG")


def run(arguments: argparse.Namespace) -> int:
    slo = Slo.parse(arguments.slo)
    if not slo.terms:
        raise OptionError("slo: nothing is promised. A term looks like ttft_p90<1s.")
    if arguments.trace is None:
        raise OptionError("slo: needs requests to try it with. Give --trace, as sharegpt with --rate 10.")
    load = load_of(arguments, whole_number("--seed", arguments.seed, 0))
    question = Question(
        model=arguments.model,
        arrivals=list(load.arrivals),
        slo=slo,
        options=_options(arguments, has_contents=load.has_contents),
        most_devices=whole_number("--most-devices", arguments.most_devices, 1),
        seed=whole_number("--seed", arguments.seed, 0),
    )
    sheets = [device_sheet(name.strip()) for name in arguments.devices.split(",")]
    sizes = [whole_number("--sizes", size, 1) for size in arguments.sizes.split(",")]
    progress = _tell if sys.stderr.isatty() else None
    found = plan(question, sheets, sizes, _prices(arguments.prices), progress)
    print("\n".join(report(found, slo)))
    if arguments.json:
        _write(arguments.json, json.dumps(_plain(found), indent=1) + "\n")
    if arguments.write and found.found:
        _write(arguments.write, _picture(found, slo))
    return 0 if found.found else NOTHING_KEEPS_IT


def _options(arguments: argparse.Namespace, *, has_contents: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "gpu_memory_utilization": arguments.gpu_memory_utilization,
        "max_num_batched_tokens": arguments.max_num_batched_tokens,
        "max_num_seqs": arguments.max_num_seqs,
        "dtype": arguments.dtype,
        "enable_prefix_caching": has_contents,
    }
    if arguments.context:
        options["max_model_len"] = arguments.context
    if arguments.quantization is not None:
        options["quantization"] = arguments.quantization
    if arguments.kv_cache_dtype is not None:
        options["kv_cache_dtype"] = arguments.kv_cache_dtype
    return options


def _prices(text: str) -> dict[str, float]:
    prices = dict(PRICES)
    for part in text.split(",") if text else ():
        name, _, value = part.partition("=")
        try:
            prices[device_sheet(name.strip()).name] = price = float(value)
        except ValueError:
            price = 0.0
        if not 0 < price < 1e6:
            raise OptionError(f"prices={part[:40]}: must be a device and dollars an hour, as h100=2.5.")
    return prices


def report(found: Plan, slo: Slo) -> list[str]:
    """The answer first, then all that was tried."""
    if not found.found:
        return _nothing(found)
    best = found.found[0]
    engines = best.trial.engines
    lines = [
        f"cheapest            {engines}, ${engines.price:.2f} an hour",
        f"what binds          {best.binds}",
        "",
        f"{'engines':<18}{'$/hour':>8}  {'busy':>5} {'memory':>7}  {'  '.join(map(str, slo.terms))}",
    ]
    pareto = found.pareto
    lines += [_row(one, is_pareto=one in pareto) for one in found.found]
    lines.append("* no other one is cheaper without being slower in something")
    lines += [f"{trial.engines!s:<18}  never: {', '.join(trial.broken)}" for trial in found.hopeless]
    return [*lines, *(f"{name:<18}  does not fit" for name in found.too_small)]


def _row(one: Found, *, is_pareto: bool) -> str:
    trial = one.trial
    values = "  ".join(f"{_time(value):>{len(term)}}" for term, value in trial.values.items())
    mark = "*" if is_pareto else " "
    engines = trial.engines
    return f"{engines!s:<17}{mark}{engines.price:>8.2f}  {trial.busy:>5.0%} {trial.memory_held:>7.0%}  {values}"


def _nothing(found: Plan) -> list[str]:
    if not found.hopeless:
        return [f"does not fit        {reason}" for reason in found.too_small.values()]
    best = min(found.hopeless, key=lambda trial: (len(trial.broken), sum(trial.values.values())))
    values = ", ".join(f"{_time(value)} for {term}" for term, value in best.values.items())
    return [f"nothing keeps it    {best.engines} comes nearest, with {values}. Promise less, or allow other devices."]


def _time(seconds: float) -> str:
    return f"{seconds:.2f}s" if seconds >= 1 else f"{seconds * 1e3:.0f}ms"


def _picture(found: Plan, slo: Slo) -> str:
    """Price against the first term, a line a device."""
    term = str(slo.terms[0])
    by_device: dict[str, list[tuple[float, float]]] = {}
    for one in found.found:
        trial = one.trial
        by_device.setdefault(trial.engines.device, []).append((trial.engines.price, trial.values[term]))
    lines = [Line(name, sorted(points)) for name, points in by_device.items()]
    return line_chart("What keeps the promise", "dollars an hour", term, lines)


def _plain(found: Plan) -> dict[str, Any]:
    return {
        "found": [
            {
                **asdict(one.trial),
                "price": one.trial.engines.price,
                "binds": one.binds,
                "is_pareto": one in found.pareto,
            }
            for one in found.found
        ],
        "never": [asdict(trial) for trial in found.hopeless],
        "does_not_fit": found.too_small,
    }


def _tell(trial: Trial) -> None:
    verdict = "keeps it" if trial.keeps_promise else f"breaks {', '.join(trial.broken)}"
    print(f"{trial.engines} {verdict}", file=sys.stderr, flush=True)


def _write(file: str, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{file}: cannot be written ({error.strerror}).") from error
