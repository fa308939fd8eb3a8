"""Speculative decoding of one greedy stream, with against without: where it pays, and what it costs where it does not.

    OMP_NUM_THREADS=1 python benchmarks/speculation.py [--cases embedded copy ...] [--rounds 3] [--threads 1]

Two engines live in one process and take turns, prompt by prompt. Cases:

    embedded    the embedded model and the draft that ships with it, on its own tasks
    draft       a larger target (12 layers) and a draft of one layer that is right in 80 % of the cases
    twin        the same with a draft that is always right
    copy        ngram, the target writes its prompt again
    wrong       a draft that is never right
    no repeat   ngram on text in which nothing comes twice

The targets of all but the first are made for this (chain_models.py): full cost, known answers. "first" is the first
answer of a new engine, which knows nothing of its drafts yet. "wrong/token" counts drafts made in vain, over all
answers; times the sum of the two last columns it is the loss to expect. Time is wall time and CPU time of all threads;
medians of the rounds, with quartiles. The last line is one line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chain_models import cycle, next_tokens, partly_right, write_chain_model

from quire.config import EngineOptions, resolve
from quire.engine_core.launch import build_engine_core
from quire.messages import EngineRequest
from quire.sampling_params import SamplingParams
from quire.testing.run_requests import run_requests

VOCAB_SIZE, HIDDEN_SIZE, NUM_LAYERS = 4096, 512, 12
OUTPUT = 160
COPIED = 96
QUESTIONS = (
    "Spell wonderful.", "Reverse planet.", "Sort the letters of garden.", "How many r's are in strawberry?",
    "Count from 12 to 24.", "What is 48 + 37?", "What is Quire?", "Tell me a story about a fox.", "Who are you?",
    "What is copy-on-write?", "Count backwards from 20 to 5.", "What is the capital of France?",
)  # fmt: skip


class Stream:
    """One engine that serves one request at a time."""

    def __init__(self, model: str, speculation: dict[str, Any] | None, options: argparse.Namespace) -> None:
        asked = EngineOptions(
            model=model,
            speculative_config=speculation,
            num_threads=options.threads,
            device="cpu",
            kv_cache_memory_bytes=2**27,
            max_model_len=1024,
            enable_prefix_caching=False,
            async_scheduling=False if options.synchronous else None,
        )
        config, _ = resolve(asked)
        self.core = build_engine_core(config)
        self._end_tokens = list(config.facts.eos_token_ids)
        self._num_requests = 0

    def answer(self, prompt: list[int], num_tokens: int) -> tuple[list[int], float, float]:
        """Tokens, wall seconds, CPU seconds."""
        self._num_requests += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        request = EngineRequest(
            request_id=self._num_requests,
            prompt_token_ids=prompt,
            sampling=sampling,
            eos_token_ids=self._end_tokens,
        )
        wall, cpu = time.perf_counter(), time.process_time()
        results = run_requests(self.core, [request])
        seconds = time.perf_counter() - wall, time.process_time() - cpu
        return results[self._num_requests][0].tokens, *seconds

    def drafts(self) -> tuple[float, float]:
        """How many there were, and how many were right."""
        numbers = self.core.statistics()
        return numbers.get("num_draft_tokens_total", 0), numbers.get("num_accepted_draft_tokens_total", 0)


Prompts = list[tuple[list[int], int]]


def compare(plain: Stream, drafting: Stream, prompts: Prompts, rounds: int) -> dict[str, Any]:
    """How many times faster one is than the other; above 1, drafts pay."""
    wall: list[float] = []
    cpu: list[float] = []
    steps, tokens = 0.0, 0
    for engine in (plain, drafting):
        engine.answer(prompts[0][0], 1)  # warms up; an answer of one token has no drafts
    gc.collect()
    for number in range(rounds + 1):
        sums = [0.0, 0.0, 0.0, 0.0]
        steps_before = drafting.core.control("worker.statistics", {})["num_steps"]
        for place, (prompt, num_tokens) in enumerate(prompts):
            order = (plain, drafting) if (number + place) % 2 else (drafting, plain)
            answers = {engine: engine.answer(prompt, num_tokens) for engine in order}
            assert answers[plain][0] == answers[drafting][0], "speculation changed what is said"
            sums = [
                total + value for total, value in zip(sums, (*answers[plain][1:], *answers[drafting][1:]), strict=True)
            ]
            tokens += len(answers[plain][0]) if number else 0
        wall.append(sums[0] / sums[2])
        cpu.append(sums[1] / sums[3])
        if number:
            steps += drafting.core.control("worker.statistics", {})["num_steps"] - steps_before
    low, _, high = statistics.quantiles(wall[1:], n=4)
    drafted, accepted = drafting.drafts()
    return {
        "speedup": statistics.median(wall[1:]),
        "quartiles": [low, high],
        "speedup_cpu": statistics.median(cpu[1:]),
        "first": wall[0],
        "first_cpu": cpu[0],
        "accepted": accepted / max(1, drafted),
        "wrong_drafts_per_token": (drafted - accepted) / (tokens * (rounds + 1) / rounds),
        "tokens_per_step": tokens / steps,
    }


def costs(drafting: Stream) -> dict[str, float]:
    """What the engine measured at start: a pass of the draft, and a further token of the target, over a step."""
    measured = drafting.core.control("worker.measure_speculation", {})
    step = measured["seconds_per_step"] + measured["seconds_per_token"]
    draft = measured["seconds_per_draft_step"] + measured["seconds_per_draft_token"]
    token = measured["seconds_per_token"]
    return {"step_ms": step * 1e3, "draft_over_step": draft / step, "token_over_step": token / step}


class Cases:
    """Engines and prompts of each case; models are written where they are needed first."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder = folder
        self._options = options

    def run(self, name: str) -> dict[str, Any]:
        model, speculation, prompts = getattr(self, f"_{name.replace(' ', '_')}")()
        plain, drafting = Stream(model, None, self._options), Stream(model, speculation, self._options)
        found = compare(plain, drafting, prompts, self._options.rounds) | costs(drafting)
        plain.core.shutdown()
        drafting.core.shutdown()
        return found

    def _embedded(self) -> tuple[str, dict[str, Any], Prompts]:
        from transformers import AutoTokenizer

        config, _ = resolve(EngineOptions(model=self._options.embedded))
        tokenizer = AutoTokenizer.from_pretrained(config.worker.model_path)
        prompts = []
        for text in QUESTIONS:
            chat = [{"role": "user", "content": text}]
            prompts.append((tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"], OUTPUT))
        return self._options.embedded, {"model": self._options.draft}, prompts

    def _draft(self) -> tuple[str, dict[str, Any], Prompts]:
        return self._with_draft(0.8)

    def _twin(self) -> tuple[str, dict[str, Any], Prompts]:
        return self._with_draft(1.0)

    def _wrong(self) -> tuple[str, dict[str, Any], Prompts]:
        return self._with_draft(0.0)

    def _copy(self) -> tuple[str, dict[str, Any], Prompts]:
        """The prompt ends where it begins anew, so the answer is the prompt again."""
        text = cycle(COPIED, VOCAB_SIZE)
        target = self._chain("copying", next_tokens(text, VOCAB_SIZE), NUM_LAYERS)
        return target, {"method": "ngram"}, [([*text, *text[:4]], OUTPUT)]

    def _no_repeat(self) -> tuple[str, dict[str, Any], Prompts]:
        return self._long_chain(), {"method": "ngram"}, self._long_prompts()

    def _with_draft(self, share: float) -> tuple[str, dict[str, Any], Prompts]:
        following = partly_right(self._long_following(), share)
        draft = self._chain(f"draft-{share}", following, 1)
        return self._long_chain(), {"method": "draft_model", "model": draft}, self._long_prompts()

    def _long_following(self) -> Any:
        return next_tokens(cycle(VOCAB_SIZE, VOCAB_SIZE), VOCAB_SIZE)

    def _long_chain(self) -> str:
        return self._chain("target", self._long_following(), NUM_LAYERS)

    def _long_prompts(self) -> Prompts:
        text = cycle(VOCAB_SIZE, VOCAB_SIZE)
        return [(text[:32], OUTPUT)]

    def _chain(self, name: str, following: Any, num_layers: int) -> str:
        path = self._folder / name
        if not path.exists():
            write_chain_model(path, following, num_layers=num_layers, hidden_size=HIDDEN_SIZE)
        return str(path)


CASES = ("embedded", "draft", "twin", "copy", "wrong", "no repeat")


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "speed-up": lambda found: f"{found['speedup']:.2f}",
    "quartiles": lambda found: "{:.2f}-{:.2f}".format(*found["quartiles"]),
    "CPU": lambda found: f"{found['speedup_cpu']:.2f}",
    "first": lambda found: f"{found['first']:.2f}",
    "its CPU": lambda found: f"{found['first_cpu']:.2f}",
    "accepted": lambda found: f"{found['accepted']:.1%}",
    "tokens/step": lambda found: f"{found['tokens_per_step']:.2f}",
    "wrong/token": lambda found: f"{found['wrong_drafts_per_token']:.3f}",
    "draft/step": lambda found: f"{found['draft_over_step']:.3f}",
    "token/step": lambda found: f"{found['token_over_step']:.3f}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--embedded", default="embedded", help="another target for the first case")
    parser.add_argument("--draft", default="embedded-draft", help="and its draft")
    parser.add_argument("--synchronous", action="store_true", help="async_scheduling=False")
    options = parser.parse_args()
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    results: dict[str, Any] = {"benchmark": "speculation", "threads": options.threads}
    print(f"{'case':<10}" + "".join(f"{name:>12}" for name in COLUMNS))
    with tempfile.TemporaryDirectory() as folder:
        cases = Cases(Path(folder), options)
        for name in options.cases:
            found = results[name] = cases.run(name)
            print(f"{name:<10}" + "".join(f"{column(found):>12}" for column in COLUMNS.values()), flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
