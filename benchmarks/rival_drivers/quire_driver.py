"""Quire, as `quire bench` drives it: an engine in a process of its own, tokens read from its streams."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from protocol import Recorder, Request, serve

# options of each precision; `--options` of rivals.py goes on top
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}


def load(settings: dict[str, Any]) -> Any:
    from quire import AsyncLLM
    from quire.interfaces.cli.bench_perform import perform
    from quire.interfaces.cli.bench_workloads import Work
    from quire.version import __version__

    options = {**PRECISIONS[settings["precision"]], **settings.get("options", {})}
    loop = asyncio.new_event_loop()
    engine = AsyncLLM(
        model=settings["model"], max_model_len=settings["max_length"], num_threads=settings["threads"], **options
    )
    loop.run_until_complete(engine.start())

    def generate(request: Request) -> Recorder:
        work = Work(request.prompts, request.output_lengths, request.num_answers, request.beam_width)
        recorder = Recorder(len(request.prompts))
        # as other drivers do: their engines hand over tokens without waiting for anybody to read them
        outcome = loop.run_until_complete(perform(engine, work, seed=0, clock=time.perf_counter, in_bursts=True))
        recorder.arrivals = [
            [(now - recorder.start, count) for now, count in timeline.arrivals] for timeline in outcome.timelines
        ]
        return recorder

    return generate, {"version": f"Quire {__version__}", "settings": options}


if __name__ == "__main__":
    serve(load)
