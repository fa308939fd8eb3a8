"""Quire beside llama.cpp, ik_llama.cpp, OpenVINO GenAI, vLLM and Transformers: the same weights, interleaved.

    python benchmarks/rivals.py --install [--build build/rivals]
    python benchmarks/rivals.py --warm     each engine starts once; vLLM compiles at its first start
    python benchmarks/rivals.py --out results.json [--budget 1500] [--requests 24] [--engines quire,llama.cpp ...]
    python benchmarks/rivals.py --experts 64 [--layers 4] --engines quire,llama.cpp ...     a mixture of experts
    python benchmarks/rivals.py --report results.json      tables again, and a drawing with --svg FILE
    python benchmarks/rivals.py --table results.json [more.json ...]      the goals, for docs/benchmarks.md

Each engine runs in an environment and a process of its own, loads once, and takes turns with the others in every round;
while it has no turn its processes are stopped. Ratios compare figures of the same round. What cannot be installed,
loaded or asked is noted with its reason and left out. Every unit is written when it is whole: the same command again
goes on where a run was stopped. Models are made and converted on the spot (benchmarks/make_model.py).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from make_model import make_expert_model, make_model
from rival_engines import ENGINES, ENVIRONMENTS, SOURCES, AbsentError, Build, Engine, engines_named
from rival_goals import Files, table
from rival_report import drawing, report
from rival_rounds import Results, Run, pods_of
from rival_workloads import WORKLOADS, Sizes

from quire.config import ModelFacts
from quire.interfaces.cli.bench_limits import ModelCost
from quire.interfaces.cli.bench_numbers import machine_in_words

_DEFAULT_ENGINES = "quire,vllm-zentorch,openvino,llama.cpp,ik_llama.cpp,transformers"


def main() -> None:
    options = _options()
    if options.table is not None:
        print(table(Files.read(options.table)))
        return
    if options.report is not None:
        saved = json.loads(options.report.read_text(encoding="utf-8"))
        print(report(saved))
        _draw(saved, options.svg)
        return
    os.nice(options.nice)
    # ended from outside, the engines are ended too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    checkpoint = options.model or _made(options)
    engines, build = engines_named(options.engines.split(",")), Build(options.build, checkpoint)
    if options.install:
        _install(build, engines, options.source)
        return
    _run(options, build, engines)


def _made(options: argparse.Namespace) -> Path:
    """With experts a name of its own: converted models are kept by it."""
    if not options.experts:
        return make_model(options.build / "model")
    path = options.build / f"model-{options.layers}x{options.experts}"
    return make_expert_model(path, num_layers=options.layers, num_experts=options.experts)


def _install(build: Build, engines: list[Engine], folder: Path | None) -> None:
    """Environments first, then models in every form that the engines read."""
    wanted = {
        name
        for engine in engines
        for name in (engine.environment, engine.source, engine.converter, engine.overlay)
        if name
    }
    steps = {one.name: partial(build.install, one) for one in ENVIRONMENTS}
    steps |= {one.name: partial(build.compile, one, folder) for one in SOURCES}
    for name in (name for name in steps if name in wanted):
        try:
            steps[name]()
            print(f"{name}: installed", flush=True)
        except AbsentError as error:
            print(f"{name}: not installed: {error}", flush=True)
    for engine in engines:
        for precision in engine.forms:
            try:
                if build.is_installed(engine):
                    print(f"{engine.name}, {precision}: {build.model(engine, precision)}", flush=True)
            except AbsentError as error:
                print(f"{engine.name}, {precision}: not converted: {error}", flush=True)


def _run(options: argparse.Namespace, build: Build, engines: list[Engine]) -> None:
    config = json.loads((build.checkpoint / "config.json").read_text(encoding="utf-8"))
    sizes = Sizes.small(config["vocab_size"]) if options.small else Sizes(config["vocab_size"], options.requests)
    facts = ModelFacts.read(build.checkpoint)
    schemes = {"float32": None, "bf16": None, "int8": "int8", "int4": "int4"}
    settings: dict[str, Any] = {
        "config": config,
        "weight_bytes": {
            name: ModelCost.of(facts, "float32" if name == "float32" else "bfloat16", scheme).step_bytes(1)
            for name, scheme in schemes.items()
        },
        "sizes": asdict(sizes),
        "threads": options.threads,
        "options": options.options,
        "machine": machine_in_words(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    results = Results.open(options.out, settings)
    print(f"{settings['machine']}; load {os.getloadavg()[0]:.1f}", flush=True)
    workloads = options.workloads.split(",") if options.workloads else None
    pods = pods_of(engines, options.precisions.split(","), workloads, options.resident)
    run = Run(
        build, results, sizes, threads=options.threads, priority=options.priority, options=options.options,
        rounds=options.rounds, budget=options.budget, start_limit=options.start_limit,
    )  # fmt: skip
    if options.warm:
        run.warm(pods)
        return
    run.run(pods)
    results.save()
    saved = json.loads(options.out.read_text(encoding="utf-8"))
    print(report(saved))
    _draw(saved, options.svg)


def _draw(saved: dict[str, Any], path: Path | None) -> None:
    picture = drawing(saved) if path else None
    if path and picture:
        path.write_text(picture, encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(engine.name for engine in ENGINES)
    parser.add_argument("--install", action="store_true", help="environments and models, and nothing else")
    parser.add_argument(
        "--source", type=Path, metavar="FOLDER", help="ik_llama.cpp's source, in place of a clone from GitHub"
    )
    parser.add_argument("--warm", action="store_true", help="start every engine once, so that it compiles what it must")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print the tables of an earlier run")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="print the table of goals")
    parser.add_argument("--build", type=Path, default=Path("build/rivals"), help="folder for environments and models")
    parser.add_argument(
        "--model", type=Path, help="a Qwen3 checkpoint in bfloat16, with or without experts; made if left out"
    )
    parser.add_argument(
        "--experts", type=int, help="make a Qwen3 with so many experts a layer (expert_shape.py), of which 8 are asked"
    )
    parser.add_argument("--layers", type=int, default=4, help="of a model with experts")
    parser.add_argument("--out", type=Path, default=Path("build/rivals/results.json"))
    parser.add_argument("--svg", type=Path, help="draw the medians")
    parser.add_argument("--engines", default=_DEFAULT_ENGINES, help=f"of {names} (default: {_DEFAULT_ENGINES})")
    parser.add_argument("--precisions", default="bf16,int8,int4")
    parser.add_argument(
        "--workloads",
        help=f"of {', '.join(WORKLOADS)}; by default all that have a goal in the precision (W1 and W5 have one in all)",
    )
    parser.add_argument("--requests", type=int, default=24, help="of W2, which has 64 in all")
    parser.add_argument("--rounds", type=int, help="at most")
    parser.add_argument("--budget", type=float, default=1500.0, help="seconds for the rounds of all engines")
    parser.add_argument("--start-limit", type=float, default=600.0, help="seconds until an engine must be ready")
    parser.add_argument("--resident", type=int, default=3, help="engines in memory at once, Quire counted")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--small", action="store_true", help="lengths of a few tokens, to try the machinery out")
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--priority", type=int, help="of the engines' scheduling groups (autogroup), -20 to 19")
    parser.add_argument(
        "--options", type=json.loads, default={}, metavar="JSON",
        help='an engine\'s own options, such as {"quire:int8": {"quantization": "int8_weight_only"}}',
    )  # fmt: skip
    return parser.parse_args()


if __name__ == "__main__":
    main()
