"""Eight adapters in a batch of 32, beside the same batch without: what they add to a step that samples.

    python benchmarks/adapters.py [--rounds 5] [--batch 32] [--adapters 8] [--rank 16] [--output-length 64]

Random weights in the shape of Qwen3-0.6B in bfloat16; adapters on all linear layers, so many requests for each. Turn
about, in one process: an engine without slots for adapters, one with them where nobody names an adapter, and the same
engine where everybody names one. What is measured is the time from the first step in which all sample to the last, on
the clock and of the processor: where others use the machine, the latter is what one thread has really worked.

Adapters cannot cost less than it takes to read them. How fast that goes is measured in the run: the operators multiply
a row with weights that are in no cache. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from quire import LLM, LoRARequest, SamplingParams
from quire.testing.tiny_adapters import TARGETS, write_adapter
from quire.testing.tiny_checkpoints import shape_0_6b_config, write_tokenizer
from quire.worker import kernels

PROMPT_TOKENS = 32
# [outputs, inputs] of a weight that bandwidth is measured with, and how many there are: more than caches hold
STREAMED = (8192, 2048)
NUM_STREAMED = 24
PASSES = 5


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of each module of a layer that has an adapter."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    attention = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    attention["o_proj"] = (hidden, queries)
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    named = {f"self_attn.{name}": shape for name, shape in attention.items()}
    return named | {f"mlp.{name}": shape for name, shape in mlp.items()}


def make_adapters(folder: Path, config: dict[str, Any], number: int, rank: int) -> list[LoRARequest]:
    requests: list[LoRARequest] = []
    for index in range(number):
        generator = torch.Generator().manual_seed(index)
        tensors: dict[str, torch.Tensor] = {}
        for layer in range(config["num_hidden_layers"]):
            for module, (outputs, inputs) in shapes_of(config).items():
                key = f"base_model.model.model.layers.{layer}.{module}"
                a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
                b = torch.randn(outputs, rank, generator=generator) / 100
                tensors[f"{key}.lora_A.weight"] = a.bfloat16()
                tensors[f"{key}.lora_B.weight"] = b.bfloat16()
        path = folder / f"adapter{index}"
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(TARGETS)}
        write_adapter(path, settings, tensors)
        requests.append(LoRARequest(f"adapter{index}", index + 1, str(path)))
    return requests


def bytes_of(config: dict[str, Any], number: int, rank: int) -> int:
    """What a step reads of so many adapters, in bfloat16."""
    per_layer = sum(outputs + inputs for outputs, inputs in shapes_of(config).values())
    return 2 * number * rank * per_layer * config["num_hidden_layers"]


class Bandwidth:
    """Bytes a second at which one row meets weights; each is timed by itself, and its least time counts."""

    def __init__(self) -> None:
        self._weights = [kernels.pack_weight(torch.ones(STREAMED).bfloat16()) for _ in range(NUM_STREAMED)]
        self._row = torch.ones(1, STREAMED[1]).bfloat16()
        self._least = [float("inf")] * NUM_STREAMED

    def measure(self) -> None:
        for index, weight in list(enumerate(self._weights)) * PASSES:
            start = time.perf_counter()
            kernels.packed_linear(self._row, weight, None, STREAMED[0])
            self._least[index] = min(self._least[index], time.perf_counter() - start)

    @property
    def found(self) -> float:
        return sum(weight.nbytes for weight in self._weights) / sum(self._least)


def seconds_of(llm: LLM, batch: int, length: int, requests: list[LoRARequest]) -> tuple[float, float]:
    """Per token of each sequence, on the clock and of the processor: a long run less a short one, which has the same
    prompts."""

    def run(num_tokens: int) -> tuple[float, float]:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": [(7 * n + k) % 1000 + 5 for k in range(PROMPT_TOKENS)]} for n in range(batch)]
        asked = [requests[n % len(requests)] for n in range(batch)] if requests else None
        start = time.perf_counter()
        worked = time.process_time()
        llm.generate(prompts, params, use_tqdm=False, lora_request=asked)
        return time.perf_counter() - start, time.process_time() - worked

    short = run(2)
    long = run(length)
    return (long[0] - short[0]) / (length - 2), (long[1] - short[1]) / (length - 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--output-length", type=int, default=64)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quantization", default=None)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = shape_0_6b_config(
            Path(folder) / "model",
            num_hidden_layers=asked.layers,
            vocab_size=asked.vocabulary,
            eos_token_id=2,
            bos_token_id=1,
        )
        write_tokenizer(model)
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        requests = make_adapters(Path(folder), config, asked.adapters, asked.rank)
        options: dict[str, Any] = {
            "load_format": "dummy", "max_model_len": 512, "enable_prefix_caching": False,
            "kv_cache_memory_bytes": 2**29, "num_threads": asked.threads,
            "quantization": asked.quantization, "max_num_seqs": asked.batch,
        }  # fmt: skip
        slots = {"enable_lora": True, "max_loras": asked.adapters, "max_lora_rank": asked.rank}
        with LLM(str(model), **options) as plain, LLM(str(model), **options, **slots) as adapted:
            kinds: dict[str, tuple[LLM, list[LoRARequest]]] = {
                "without slots": (plain, []), "base": (adapted, []), "adapters": (adapted, requests),
            }  # fmt: skip
            for llm, named in kinds.values():
                seconds_of(llm, asked.batch, 8, named)
            found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
            bandwidth = Bandwidth()
            for _ in range(asked.rounds):
                for kind, (llm, named) in kinds.items():
                    found[kind].append(seconds_of(llm, asked.batch, asked.output_length, named))
                bandwidth.measure()
    for kind, seconds in found.items():
        clock, processor = (sorted(of_one) for of_one in zip(*seconds, strict=True))
        print(
            f"{kind:14s} {statistics.median(clock) * 1e3:8.2f} ms a step ({clock[0] * 1e3:.2f} at least), of the "
            f"processor {statistics.median(processor) * 1e3:8.2f} ({processor[0] * 1e3:.2f} at least)"
        )
    shares: dict[str, list[float]] = {}
    for place, clock_of in enumerate(("clock", "processor")):
        pairs = zip(found["adapters"], found["base"], strict=True)
        shares[clock_of] = [adapted[place] / base[place] for adapted, base in pairs]
        of_one = sorted(shares[clock_of])
        print(
            f"adapters over base, {clock_of}: {statistics.median(of_one):.3f} x ({of_one[0]:.3f} to {of_one[-1]:.3f})"
        )
    read = bytes_of(config, asked.adapters, asked.rank)
    base = statistics.median(processor for _, processor in found["base"])
    limit = 1 + read / bandwidth.found / base
    reached = limit / statistics.median(shares["processor"])
    print(
        f"limit: {read / 1e6:.1f} MB of adapters at {bandwidth.found / 1e9:.1f} GB/s make it {limit:.3f} x, of which "
        f"{reached:.2f} is reached"
    )
    print(json.dumps({"settings": vars(asked), "seconds": found, "shares": shares, "limit": limit, "reached": reached}))


if __name__ == "__main__":
    main()
