"""Eight adapters in a batch of 32, beside the same batch without: what they add to a step that samples.

    python benchmarks/adapters.py [--rounds 5] [--batch 32] [--adapters 8] [--rank 16] [--output-length 64]

Random weights in the shape of Qwen3-0.6B in bfloat16; adapters on all linear layers, so many requests for each. Turn
about, in one process: an engine without slots for adapters, one with them where nobody names an adapter, and the same
engine where everybody names one. What is measured is the time from the first step in which all sample to the last. The
last line is JSON.
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

PROMPT_TOKENS = 32


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


def seconds_of(llm: LLM, batch: int, length: int, requests: list[LoRARequest]) -> float:
    """Per token of each sequence: a long run less a short one, which has the same prompts."""

    def run(num_tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": [(7 * n + k) % 1000 + 5 for k in range(PROMPT_TOKENS)]} for n in range(batch)]
        asked = [requests[n % len(requests)] for n in range(batch)] if requests else None
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False, lora_request=asked)
        return time.perf_counter() - start

    short = run(2)
    return (run(length) - short) / (length - 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--output-length", type=int, default=64)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--vocabulary", type=int, default=151_936)
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
            "kv_cache_memory_bytes": 2**29, "quantization": asked.quantization, "max_num_seqs": asked.batch,
        }  # fmt: skip
        slots = {"enable_lora": True, "max_loras": asked.adapters, "max_lora_rank": asked.rank}
        with LLM(str(model), **options) as plain, LLM(str(model), **options, **slots) as adapted:
            kinds: dict[str, tuple[LLM, list[LoRARequest]]] = {
                "without slots": (plain, []), "base": (adapted, []), "adapters": (adapted, requests),
            }  # fmt: skip
            for llm, named in kinds.values():
                seconds_of(llm, asked.batch, 8, named)
            found: dict[str, list[float]] = {kind: [] for kind in kinds}
            for _ in range(asked.rounds):
                for kind, (llm, named) in kinds.items():
                    found[kind].append(seconds_of(llm, asked.batch, asked.output_length, named))
    shares = [one / other for one, other in zip(found["adapters"], found["base"], strict=True)]
    for kind, seconds in found.items():
        print(f"{kind:14s} {statistics.median(seconds) * 1e3:8.2f} ms a step ({min(seconds) * 1e3:.2f} at least)")
    print(f"adapters over base: {statistics.median(shares):.3f} x ({min(shares):.3f} to {max(shares):.3f})")
    print(json.dumps({"settings": vars(asked), "seconds": found, "shares": shares}))


if __name__ == "__main__":
    main()
