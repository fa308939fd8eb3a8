"""Everything that a GPU must show, in one call: same tokens as Transformers, then speed against the device's limits.

    python benchmarks/gpu_check.py [--device cuda] [--skip-speed]

1. Greedy float32 tokens of tiny random checkpoints (native files and the fallback) equal Transformers', with chunks, a
   warm prefix cache and preemption.
2. With the Qwen3-0.6B shape and random bfloat16 weights: one stream, and 64 requests at once; copy bandwidth and matrix
   rate are measured beside it, so that the figures are fractions and not absolute times.
The same script runs with --device cpu, which is how it is tested where there is no GPU. Exit code 1 if a token differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from quire.testing.greedy import assert_same_tokens, generate_greedy, real_core, reference_generate
from quire.testing.tiny_checkpoints import VOCAB_SIZE, make_checkpoint, shape_0_6b_config

MODELS = ["llama", "mistral", "qwen2", "qwen3", "opt", "gpt2", "gemma2", "phi3"]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks of 48": {"max_num_batched_tokens": 48},
    "few blocks": {
        "block_size": 8,
        "num_gpu_blocks_override": 44,
        "max_model_len": 160,
        "max_num_batched_tokens": 48,
    },
}


def check_tokens(device: str, folder: Path) -> list[str]:
    """A line for each model and setting whose tokens differ."""
    wrong = []
    for name in MODELS:
        path = make_checkpoint(folder / name, name)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        generator = torch.Generator().manual_seed(11)
        prompts = [torch.randint(0, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (1, 16, 17, 63, 101)]
        references = [reference_generate(model, prompt, 32) for prompt in prompts]
        for setting, options in SETTINGS.items():
            core = real_core(path, device=device, **{"kv_cache_memory_bytes": 2**26, **options})
            for attempt in ("cold", "warm"):
                what = f"{name}, {setting}, {attempt}"
                try:
                    for ours, reference in zip(generate_greedy(core, prompts, 32), references, strict=True):
                        assert_same_tokens(ours, reference, what)
                    print(f"same tokens   {what}", flush=True)
                except AssertionError as error:
                    wrong.append(str(error))
                    print(f"DIFFERENT     {error}", flush=True)
            core.shutdown()
    return wrong


def limits(device: str) -> dict[str, float]:
    """What the device does at best: copying memory, and multiplying bfloat16 matrices."""
    size = 2**28 if device == "cuda" else 2**26
    source = torch.empty(size, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    copy = _best(device, lambda: target.copy_(source))
    edge = 8192 if device == "cuda" else 1024
    left = torch.randn(edge, edge, device=device, dtype=torch.bfloat16)
    multiply = _best(device, lambda: left @ left)
    return {"copy_GB_per_s": 2 * 2 * size / copy / 1e9, "matrix_TFLOP_per_s": 2 * edge**3 / multiply / 1e12}


def speed(device: str, folder: Path) -> dict[str, float]:
    """Tokens per second of the 0.6B shape, and the share of the bandwidth that one stream reaches."""
    path = shape_0_6b_config(folder / "shape")
    core = real_core(
        path, device=device, dtype="bfloat16", load_format="dummy", max_model_len=1024, check_invariants=False
    )
    one, many, length = [list(range(5, 133))], [list(range(5 + i, 133 + i)) for i in range(64)], 64
    generate_greedy(core, one, 4)
    single = _timed(device, lambda: generate_greedy(core, one, length))
    batched = _timed(device, lambda: generate_greedy(core, many, length))
    core.shutdown()
    weight_bytes = 1.192e9
    return {
        "one_stream_tokens_per_s": length / single,
        "one_stream_GB_per_s": weight_bytes * length / single / 1e9,
        "batch_64_tokens_per_s": 64 * length / batched,
    }


def _timed(device: str, work: Callable[[], Any]) -> float:
    _wait(device)
    start = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - start


def _best(device: str, work: Callable[[], Any]) -> float:
    work()
    return min(_timed(device, work) for _ in range(5))


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--skip-speed", action="store_true")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: torch sees no GPU here. --device cpu runs the same checks on a CPU.", file=sys.stderr)
        return 2
    report: dict[str, Any] = {"device": arguments.device, "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        report["wrong"] = check_tokens(arguments.device, Path(folder))
        if not arguments.skip_speed:
            report |= limits(arguments.device) | speed(arguments.device, Path(folder))
    print(json.dumps(report))
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
