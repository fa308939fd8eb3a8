"""Where the time of a workload goes: its share of the limit, and what is missing by named costs.

    python benchmarks/where_time_goes.py MODEL [--workloads W1,W5] [--precisions bf16,int8,int4] [--rounds 3]

An engine in this process performs the workloads of `rivals.py`, while `perf` (the package linux-perf) looks a thousand
times a second of processor time at what each thread does. So a share of a cost is one of processor time, which other
work on the machine changes little; how fast the workload was, and its share of the limit, such work does change. Costs
of a name add up to 100 %. What the products need at least is the share of the limit: what they take beyond that is
missing, as all other costs are.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rival_workloads import PARTS, WORKLOADS, Sizes, jobs

from quire import AsyncLLM
from quire.interfaces.cli.bench_limits import MachineLimits, measure_limits
from quire.interfaces.cli.bench_perform import Outcome, perform
from quire.interfaces.cli.bench_sheet import Ruler
from quire.interfaces.cli.bench_workloads import Work

PRECISIONS = {"bf16": None, "int8": "int8", "int4": "int4"}
_SAMPLES_A_SECOND = 997
# by then weights lie in huge pages
_SECONDS_TO_MOVE = 8.0
_SAMPLE = re.compile(r"^\s*[0-9a-f]+ (?P<symbol>.*) \((?P<library>[^()]*|\[.*\])\)$")

# By the name of a function, the first that fits; then by the library that it is in.
_FUNCTIONS = (
    ("waiting at barriers", r"Member::barrier|sched|finish_task_switch|pick_next|do_syscall|entry_SYSCALL"),
    ("waiting for the next step", r"Threads::|run_crew|futex"),
    ("preparing rows", r"::prepare|interleave|quantize"),
    ("products", r"add_products|add_integers|add_codes|add_decoded|decode_codes|Block|::finish|::multiply$|LinearStep"),
    ("attention: scores", r"compute_scores|::score_"),
    (
        "attention: softmax and values",
        r"TileKernel|add_packed|add_few|pack_values|::attend$|::combine$|Attention(Step|Plan)",
    ),
    ("keys and values", r"store_rows"),
    ("norms, rotary positions, gates", r"norm|rotat|rotary|silu|gelu|swiglu|activate|combine_pair|convert|RowStep"),
    ("sampling", r"find_maxima|collect|weigh|widen|count_above|[Ss]ampl|LogitRow|Penalty|Bitmask"),
    ("first touch of memory", r"clear_page|page_fault|handle_mm|folio|do_anonymous|clear_huge|rmqueue"),
)
_LIBRARIES = (
    ("other kernels", r"kernels-[0-9a-f]+\.so"),
    ("torch", r"torch|c10|gomp"),
    ("Python", r"python|site-packages"),
    ("Python", r"libc\.so|ld-linux|libstdc|libm\.so|\[vdso\]"),
    ("the system", r"\[kernel|\[unknown|vmlinux"),
)


@dataclass(frozen=True)
class Found:
    """Of one workload in one precision, over all rounds."""

    figure: float
    share_of_limit: float | None
    samples: Counter[str]


def cost_of(symbol: str, library: str) -> str:
    for name, pattern in _FUNCTIONS:
        if re.search(pattern, symbol):
            return name
    return next((name for name, pattern in _LIBRARIES if re.search(pattern, library)), "the rest")


@contextlib.contextmanager
def sampled(samples: Counter[str], names: Counter[str]) -> Iterator[None]:
    """Adds what this process does meanwhile, by costs and by functions."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "perf.data"
        how = ["-e", "cpu-clock", "-F", str(_SAMPLES_A_SECOND)]
        command = ["perf", "record", "-q", *how, "-p", str(os.getpid()), "-o", str(file)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as recorder:
            try:
                yield
            finally:
                recorder.send_signal(signal.SIGINT)
        script = ["perf", "script", "-i", str(file), "-F", "ip,sym,dso"]
        done = subprocess.run(script, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    for line in done.stdout.splitlines():
        if match := _SAMPLE.match(line):
            name = cost_of(match["symbol"], match["library"])
            samples[name] += 1
            names[f"{name}: {match['symbol'][:110]}"] += 1


async def measured(options: argparse.Namespace, precision: str, limits: MachineLimits) -> dict[str, Found]:
    """By column of `rivals.py`, in one engine."""
    found: dict[str, Found] = {}
    engine = AsyncLLM(
        model=options.model,
        dtype="bfloat16",
        quantization=PRECISIONS[precision],
        num_threads=options.threads,
        max_model_len=4096,
        engine_process=False,
    )
    async with engine:
        if not options.first:
            await asyncio.sleep(_SECONDS_TO_MOVE)
        ruler = Ruler.of(engine.config, limits)
        sizes = Sizes(engine.config.facts.vocab_size)
        for workload in options.workloads.split(","):
            figures: dict[str, list[float]] = {}
            samples: dict[str, Counter[str]] = {}
            names: Counter[str] = Counter()
            works: dict[str, Work] = {}
            for number in range(0 if options.first else -1, options.rounds):
                for job in jobs(workload, sizes, number):
                    counted: Counter[str] = Counter()
                    with sampled(counted, names) if number >= 0 else contextlib.nullcontext():
                        outcome = await perform(engine, job.work)
                    if number < 0:
                        continue
                    read = job.read(_answer(outcome))
                    key = next(iter(read))
                    figures.setdefault(key, []).append(read[key])
                    samples.setdefault(key, Counter()).update(counted)
                    works[key] = job.work
            for key, values in figures.items():
                figure = median(values)
                found[key] = Found(figure, _share(ruler, key, works[key], figure), samples[key])
                print(line_of(f"{key} {precision}", key, found[key]), flush=True)
            for name, count in names.most_common(options.functions):
                print(f"    {count / names.total():6.1%}  {name}")
    return found


def _answer(outcome: Outcome) -> dict[str, object]:
    arrivals = [[(at - line.start, count) for at, count in line.arrivals] for line in outcome.timelines]
    return {"arrivals": arrivals, "seconds": outcome.seconds}


def _share(ruler: Ruler, key: str, work: Work, figure: float) -> float | None:
    if key == "W1":
        limit = ruler.decode_rate()
    elif key == "W5":
        limit = ruler.prompt_rate(work.num_prompt_tokens)
    else:
        seconds = ruler.seconds(work)
        if seconds is None:
            return None
        return seconds / figure if PARTS[key].is_time else figure * seconds / work.num_output_tokens
    return figure / limit if limit else None


def line_of(title: str, key: str, found: Found) -> str:
    """A row of the table in docs/benchmarks.md."""
    in_all = found.samples.total()
    share = found.share_of_limit
    limit = f"{share:.2f} of the limit" if share else "no limit"
    costs = ", ".join(
        f"{name} {count / in_all:.1%}" for name, count in found.samples.most_common() if count * 200 > in_all
    )
    beyond = ""
    if share:
        beyond = f" (products beyond the limit {found.samples['products'] / in_all - share:.1%})"
    return f"| {title} | {found.figure:.4g} {PARTS[key].unit}, {limit} | {costs}{beyond} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--precisions", default="bf16,int8,int4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--functions", type=int, default=0, help="so many functions that take most, below each row")
    parser.add_argument("--first", action="store_true", help="no request comes before the first that is looked at")
    options = parser.parse_args()
    if shutil.which("perf") is None:
        raise SystemExit("perf is not installed: it is the package linux-perf of Debian, linux-tools of Ubuntu.")
    limits = measure_limits(options.threads)
    print(f"limits: {limits.as_dict()}")
    for precision in options.precisions.split(","):
        asyncio.run(measured(options, precision, limits))


if __name__ == "__main__":
    main()
