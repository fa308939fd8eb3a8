"""`quire bench`: throughput and latency of this engine with random prompts of equal length.

`quire bench WORKLOAD` measures one of the workloads below instead, each a command with options of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import ContextLengthError, OptionError, suggestion
from quire.interfaces.cli.bench_flags import Size, add_sizes, sizes_of, too_long
from quire.interfaces.cli.bench_perform import timeline_of
from quire.interfaces.cli.bench_report import Report, Timeline
from quire.interfaces.cli.engine_flags import add_engine_flags, add_model_argument, engine_options_of
from quire.interfaces.cli.sampling_flags import number_of
from quire.interfaces.cli.session import open_engine
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.interfaces.async_llm import AsyncLLM

# workload -> (its number, module, what stands there for it, what it is)
WORKLOADS = {
    "stream": ("w1", "bench_engine", "STREAM", "one request alone"),
    "batch": ("w2", "bench_engine", "BATCH", "64 requests of log-normal lengths at once"),
    "shared-prefix": ("w3", "bench_engine", "SHARED_PREFIX", "32 requests that begin alike"),
    "parallel": ("w4", "bench_engine", "PARALLEL", "several answers to one prompt, and beam search"),
    "prompt": ("w5", "bench_engine", "PROMPT", "one long prompt"),
    "serve": ("w6", "bench_serve", "SERVE", "the server, under requests that arrive at random"),
    "long-context": ("w10", "bench_engine", "LONG_CONTEXT", "one prompt of 32,768 tokens or more"),
    "agents": ("w11", "bench_engine", "AGENTS", "agents, each a chain of calls that grows"),
    "images": ("w12", "bench_engine", "IMAGES", "chats with images"),
    "speech": ("w13", "bench_engine", "SPEECH", "sounds that are written down: the real-time factor"),
    "steps": ("w8", "bench_steps", "STEPS", "steps of all sizes, for simulations"),
    "start": ("w7", "bench_start", "START", "from the start of a process to its first token"),
}
_SIZES = (
    Size("--num-requests", 32, 1, "requests in all"),
    Size("--concurrency", 0, 0, "requests in flight at once; 0 means all"),
    Size("--input-length", 128, 1, "tokens of each prompt"),
    Size("--output-length", 64, 1, "tokens of each answer"),
    Size("--shared-prefix", 0, 0, "tokens at the beginning that all prompts have in common"),
    Size("--num-warmups", 1, 0, "requests before the clock starts"),
    Size("--seed", 0, 0, "seed of prompts and sampling"),
)


@dataclass
class Load:
    """What is asked of the engine."""

    num_requests: int
    concurrency: int
    input_length: int
    output_length: int
    shared_prefix: int
    num_warmups: int
    seed: int

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Warm-up prompts first; the same for the same seed."""
        draw = random.Random(self.seed)
        prefix = [draw.randrange(vocab_size) for _ in range(self.shared_prefix)]
        length = self.input_length - self.shared_prefix
        return [
            prefix + [draw.randrange(vocab_size) for _ in range(length)]
            for _ in range(self.num_warmups + self.num_requests)
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [options]\n       %(prog)s WORKLOAD [MODEL] [options]"
    lines = [f"  {name:<14} ({number})  {text}" for name, (number, _, _, text) in WORKLOADS.items()]
    parser.epilog = "\n".join(["workloads; each has a --help of its own:", *lines])
    add_model_argument(parser)
    group = parser.add_argument_group("load")
    add_sizes(group, _SIZES)
    group.add_argument("--temperature", default="0", metavar="X", help="0 is greedy (default: 0)")
    group.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    add_engine_flags(parser, leave_out=("seed",))


def subcommand(word: str) -> Any:
    """The workload of this name or number, or None."""
    for name, (number, module, attribute, _) in WORKLOADS.items():
        if word.lower() in (name, number):
            return getattr(importlib.import_module(f"quire.interfaces.cli.{module}"), attribute)
    hint = "" if word.startswith("-") else suggestion(word, WORKLOADS)
    if hint and not Path(word).exists():
        raise OptionError(f"{word}: there is no such workload or folder.{hint}")
    return None


def run(arguments: argparse.Namespace) -> int:
    load = _load_of(arguments)
    temperature = number_of("--temperature", float, arguments.temperature)
    try:
        report = asyncio.run(_bench({**engine_options_of(arguments), "seed": load.seed}, load, temperature))
    except ContextLengthError as error:
        raise too_long(_SIZES, error) from error
    print(json.dumps(report.as_dict()) if arguments.json else report.as_table())
    return 0


def _load_of(arguments: argparse.Namespace) -> Load:
    load = Load(**sizes_of(arguments, _SIZES))
    if load.shared_prefix > load.input_length:
        raise OptionError(f"--shared-prefix {load.shared_prefix}: must not exceed --input-length {load.input_length}.")
    return load


async def _bench(options: dict[str, Any], load: Load, temperature: float) -> Report:
    async with open_engine(options) as engine:
        return await measure(engine, load, temperature)


async def measure(
    engine: AsyncLLM, load: Load, temperature: float, clock: Callable[[], float] = time.perf_counter
) -> Report:
    """Runs the load; the clock starts after the warm-up."""
    sampling = SamplingParams(
        max_tokens=load.output_length, min_tokens=load.output_length, ignore_eos=True, temperature=temperature,
        detokenize=True,
    )  # fmt: skip
    prompts = load.prompts(engine.config.facts.vocab_size)
    for number in range(load.num_warmups):
        await timeline_of(engine, prompts[number], sampling, clock)
    slots = asyncio.Semaphore(load.concurrency or load.num_requests)

    async def one(prompt: list[int]) -> Timeline:
        async with slots:
            return await timeline_of(engine, prompt, sampling, clock)

    start = clock()
    timelines = await asyncio.gather(*(one(prompt) for prompt in prompts[load.num_warmups :]))
    seconds = clock() - start
    asked = {**asdict(load), "temperature": temperature}
    return Report(engine.config.served_model_name, asked, list(timelines), seconds)
