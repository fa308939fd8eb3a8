"""How much longer a token takes where the Transformers library runs a model, with Quire's attention underneath.

Each family has random weights and one shape, and is held against Llama of that shape, or Qwen 3 with experts: as its
own file here runs it, if it has one, and as Transformers does. Rounds take turns, and the best of each counts. Ratios
are to the first; some families with experts have one more that computes every token.

    python -m benchmarks.transformers_models [family ...]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quire.testing.greedy import generate_greedy, real_core
from quire.testing.tiny_checkpoints import make_config
from quire.worker.models.registry import native_model_types

_SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
}
_EXPERTS = {"moe_intermediate_size": 512, "first_k_dense_replace": 0, "num_experts_per_tok": 4}
_EXPERTS |= dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"), 16)
_EXPERTS |= {"moe_k": 4, "moe_topk": 4, "moe_layer_start_index": 0, "layer_types": None, "mlp_layer_types": None}
DENSE = ("smollm3", "olmo2", "olmo3", "granite", "phi", "phi3", "ministral3", "exaone4", "seed_oss", "gptj")
MIXTURES = ("glm4_moe", "minimax_m2", "hy_v3", "mimo_v2_flash", "ernie4_5_moe", "olmoe", "granitemoe")
_FULL = {"layer_types": ["full_attention"] * 8}
# what makes the shapes alike
_OF_FAMILY: dict[str, dict[str, Any]] = {
    # no layer has a window, but the library makes the masks of windows all the same
    "olmo3": {**_FULL, "sliding_window": 1024},
    "mimo_v2_flash": {**_FULL, "sliding_window": 1024, "v_head_dim": 64},
    "exaone4": _FULL,
    # of an expert
    "minimax_m2": {"intermediate_size": 512},
}
_NUM_TOKENS = 24
_NUM_ROUNDS = 5


def make_core(folder: Path, name: str, impl: str) -> Any:
    sizes = {**_SIZES, **({} if name in (*DENSE, "llama") else _EXPERTS), "head_dim": 64, "sliding_window": None}
    config = make_config(name, **{**sizes, **_OF_FAMILY.get(name, {})})
    path = folder / f"{name}-{impl}"
    config.save_pretrained(path)
    options = {"dtype": "bfloat16", "load_format": "dummy", "model_impl": impl, "check_invariants": False}
    return real_core(path, max_model_len=256, kv_cache_memory_bytes=2**26, packed_weights_cache=0, **options)


def seconds_per_token(core: Any, num_prompts: int) -> float:
    prompts = [[7 + number, 99, 3, 250] for number in range(num_prompts)]
    began = time.perf_counter()
    generate_greedy(core, prompts, _NUM_TOKENS)
    return (time.perf_counter() - began) / _NUM_TOKENS


def main(names: list[str]) -> None:
    for name in names or [*DENSE, *MIXTURES]:
        other = "llama" if name in DENSE else "qwen3_moe"
        runs = {f"native {other}": (other, "native"), "its own file": (name, "native")}
        if name not in native_model_types():
            del runs["its own file"]
        runs["through Transformers"] = (name, "transformers")
        with tempfile.TemporaryDirectory() as folder:
            cores = [make_core(Path(folder), family, impl) for family, impl in runs.values()]
            for num_prompts in (1, 8):
                rounds = [[seconds_per_token(core, num_prompts) for core in cores] for _ in range(_NUM_ROUNDS)]
                best = [min(times) for times in zip(*rounds, strict=True)]
                parts = [
                    f"{what} {1e3 * seconds:.1f} ms ({seconds / best[0]:.2f})"
                    for what, seconds in zip(runs, best, strict=True)
                ]
                print(f"{name:14} {num_prompts} at once: {', '.join(parts)}", flush=True)
            for core in cores:
                core.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
