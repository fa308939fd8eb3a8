"""Does continuous batching pay? One run, one model, four ways to serve the same requests.

    python benchmarks/continuous_batching.py [--requests 32 --input 128 --output 64 --rounds 1]

A model of the Qwen3-0.6B shape with random bfloat16 weights is written once to --model. Then, in turn: Quire with all
requests at once, Quire with one after another, Transformers' `generate` with one static batch, and one stream alone in
each. Tokens are greedy and the end token is ignored, so all ways do the same work. Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from make_model import make_model

VOCAB = 151_936


def main() -> None:
    arguments = _arguments()
    path = make_model(arguments.model)
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.requests, arguments.input)
    prompts = torch.randint(0, VOCAB, shape, generator=generator).tolist()
    results: dict[str, list[float]] = {}
    for number in range(arguments.rounds):
        for name, seconds in _round(path, prompts, arguments.output):
            results.setdefault(name, []).append(seconds)
            print(f"round {number + 1}  {name:<34} {seconds:8.2f} s", flush=True)
    _report(results, len(prompts) * arguments.output)


def _round(path: Path, prompts: list[list[int]], num_tokens: int) -> list[tuple[str, float]]:
    """Engines are loaded one at a time, because two models of this size disturb each other's memory."""
    ours = _quire(path)
    times = [
        ("quire, all at once", _timed(lambda: ours(prompts, num_tokens))),
        ("quire, one after another", _timed(lambda: [ours([prompt], num_tokens) for prompt in prompts])),
        ("quire, one stream", _timed(lambda: ours(prompts[:1], num_tokens))),
    ]
    ours.shutdown()  # type: ignore[attr-defined]
    gc.collect()
    theirs = _transformers(path)
    times += [
        ("transformers, static batch", _timed(lambda: theirs(prompts, num_tokens))),
        ("transformers, one stream", _timed(lambda: theirs(prompts[:1], num_tokens))),
    ]
    return times


def _quire(path: Path) -> Callable[[list[list[int]], int], Any]:
    from quire import LLM, SamplingParams

    llm = LLM(model=str(path), max_model_len=1024, enable_prefix_caching=False)

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)

    generate([[1, 2, 3]], 2)
    generate.shutdown = llm.shutdown  # type: ignore[attr-defined]
    return generate


def _transformers(path: Path) -> Callable[[list[list[int]], int], Any]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        output = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        assert output.shape[1] == ids.shape[1] + num_tokens

    generate([[1, 2, 3]], 2)
    return generate


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _report(results: dict[str, list[float]], num_tokens: int) -> None:
    median = {name: statistics.median(values) for name, values in results.items()}
    ours = median["quire, all at once"]
    ratios = {
        "at_once_over_one_after_another": median["quire, one after another"] / ours,
        "at_once_over_static_batch": median["transformers, static batch"] / ours,
        "one_stream_over_transformers": median["transformers, one stream"] / median["quire, one stream"],
    }
    for name, ratio in ratios.items():
        print(f"{name:<34} {ratio:6.2f} x")
    spread = {name: [min(values), max(values)] for name, values in results.items()}
    report = {"median_s": median, "spread_s": spread, "ratios": ratios, "output_tokens_per_s": num_tokens / ours}
    print(json.dumps(report))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("build/model"), help="directory for the random model")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
