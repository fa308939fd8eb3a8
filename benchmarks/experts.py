"""A mixture of experts on one stream, beside the two things that it should be held against.

    python benchmarks/experts.py [--experts 64] [--layers 4] [--rounds 3] [--output-length 96] [--quantization int4]

Random weights in the shape of Qwen 3 with experts: hidden 2,048, experts of 768, 8 of them for a token, vocabulary
32,000. Turn about, each in a process of its own: the model's own file; the same through Transformers; and a dense model
of as many weights as a token reads here, which shows what experts cost beside the bytes. `share` is what a token's
weights take at the bandwidth of this machine, measured in the same run, over what a token takes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from quire.interfaces.cli.bench_limits import measure_limits
from quire.testing.tiny_checkpoints import write_tokenizer

HIDDEN, INNER, TOP_K, VOCABULARY, HEADS, KV_HEADS, HEAD_DIM = 2048, 768, 8, 32_000, 32, 4, 128
# bytes of a weight; the head stays in 8 bits where layers have 4, with a scale of 16 bits for 32 of them
BYTES = {None: (2.0, 2.0), "int8": (1.0, 1.0), "int4": (0.5625, 1.0)}


def config_of(num_layers: int, num_experts: int, *, is_dense: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": TOP_K * INNER,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    if is_dense:
        return {**config, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    own = {"num_experts": num_experts, "num_experts_per_tok": TOP_K, "moe_intermediate_size": INNER}
    return {
        **config, **own, "norm_topk_prob": True, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
    }  # fmt: skip


def bytes_of_a_token(num_layers: int, quantization: str | None) -> float:
    """Weights that a token reads; routers and norms are left out."""
    attention = HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS)
    of_layer, of_head = BYTES[quantization]
    return num_layers * (attention + 3 * TOP_K * INNER * HIDDEN) * of_layer + VOCABULARY * HIDDEN * of_head


def milliseconds_a_token(folder: Path, length: int, *options: str) -> float:
    command = [
        sys.executable, "-m", "quire", "bench", "--model", str(folder), "--load-format", "dummy", "--dtype", "bfloat16",
        "--max-model-len", "1024", "--num-requests", "2", "--concurrency", "1", "--input-length", "32",
        "--output-length", str(length), "--json", *options,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    median: float = json.loads(done.stdout.splitlines()[-1])["time_per_output_token_ms"]["p50"]
    return median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output-length", type=int, default=96)
    parser.add_argument("--quantization", choices=["int8", "int4"], help="default: bfloat16")
    options = parser.parse_args()
    form = () if options.quantization is None else ("--quantization", options.quantization)
    with tempfile.TemporaryDirectory() as name:
        folders = {kind: Path(name) / kind for kind in ("experts", "dense")}
        for kind, folder in folders.items():
            folder.mkdir()
            write_tokenizer(folder)
            config = config_of(options.layers, options.experts, is_dense=kind == "dense")
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        runs = {"own file": (folders["experts"], form), "dense": (folders["dense"], form)}
        if not form:
            runs["Transformers"] = (folders["experts"], ("--model-impl", "transformers"))
        found: dict[str, list[float]] = {kind: [] for kind in runs}
        bandwidths = []
        for _ in range(options.rounds):
            bandwidths.append(measure_limits(len(os.sched_getaffinity(0))).bandwidth)
            for kind, (folder, more) in runs.items():
                found[kind].append(milliseconds_a_token(folder, options.output_length, *more))
    least = 1e3 * bytes_of_a_token(options.layers, options.quantization) / statistics.median(bandwidths)
    result: dict[str, Any] = {"least_ms": round(least, 2), "bandwidth": statistics.median(bandwidths)}
    for kind, times in found.items():
        median = statistics.median(times)
        result[kind] = {"ms": median, "from": min(times), "to": max(times), "share": round(least / median, 3)}
        print(f"{kind:14} {median:7.2f} ms a token ({min(times):.2f} to {max(times):.2f}), share {least / median:.2f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
