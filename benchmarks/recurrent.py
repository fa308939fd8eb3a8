"""Models with recurrent layers: a step of one stream and of 16 requests, and a prompt, beside other models.

    python benchmarks/recurrent.py [--shapes lfm2 lfm2_large qwen3_next granite] [--rounds 3] [--threads N]
                                   [--prompt 512] [--steps 48] [--profile]

Random weights in bfloat16: LFM2-350M (`lfm2`), LFM2-1.2B (`lfm2_large`), and four layers of Qwen 3 Next 80B-A3B (three
recurrent, one of attention, 64 experts of which 10 compute a token) and of Granite 4 H Tiny (three recurrent, one of
attention, 64 experts of which 6 compute a token). Turn about, each in a process of its own: Quire; a dense model of as
many weights as a token reads here; and Transformers (with its own cache).

`share` is what a token's weights and states take at the read bandwidth of this machine, measured in the same process,
over what the step takes. `prompt` is compared with that of the dense model, whose products are as large. With
--threads 1 times are those of the processor, which a busy machine disturbs less. --profile prints where a step of
Quire's spends its time, operator by operator. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 32_000
NUM_REQUESTS = 16
CONTEXT = 32
BLOCK_SIZE = 16
# read in order, more than any cache holds
BANDWIDTH_BYTES = 512 << 20
LFM2_LAYERS = "ccaccaccacacacac"


@dataclass(frozen=True)
class Shape:
    """A configuration, and what its matrices and states are."""

    config: dict[str, Any]
    # parameters of all layers that every token reads, those of one expert, experts, and experts of a token
    num_dense: int
    num_expert: int = 0
    num_experts: int = 0
    top_k: int = 0
    # floats that a sequence keeps in all layers
    num_state: int = 0

    def active(self, num_tokens: int) -> float:
        """Parameters that a step of so many tokens reads, if they choose their experts evenly."""
        asked = self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** num_tokens) if self.num_experts else 0
        head = self.config["hidden_size"] * self.config["vocab_size"]
        return self.num_dense + asked * self.num_expert + head

    def step_bytes(self, num_tokens: int) -> float:
        """Weights in bfloat16, and float32 states that are read and written."""
        return 2 * self.active(num_tokens) + 8 * num_tokens * self.num_state


def lfm2(hidden: int, inner: int, heads: int) -> Shape:
    kinds = {"c": "conv", "a": "full_attention"}
    config = {
        "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": len(LFM2_LAYERS), "num_attention_heads": heads, "num_key_value_heads": 8,
        "layer_types": [kinds[kind] for kind in LFM2_LAYERS], "block_auto_adjust_ff_dim": False, "conv_L_cache": 3,
        "norm_eps": 1e-5, "rope_theta": 1e6, "vocab_size": 65_536, "tie_word_embeddings": True,
    }  # fmt: skip
    num_conv = LFM2_LAYERS.count("c")
    mixers = num_conv * 4 * hidden**2 + (len(LFM2_LAYERS) - num_conv) * attention(hidden, heads, 8, hidden // heads)
    return Shape(config, mixers + len(LFM2_LAYERS) * 3 * hidden * inner, num_state=num_conv * 3 * hidden)


def qwen3_next() -> Shape:
    hidden, experts, top_k, inner = 2048, 64, 10, 512
    config = {
        "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "hidden_size": hidden,
        "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "intermediate_size": 5632, "moe_intermediate_size": inner, "shared_expert_intermediate_size": inner,
        "num_experts": experts, "num_experts_per_tok": top_k, "vocab_size": VOCABULARY, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    }  # fmt: skip
    keys, values = 16 * 128, 32 * 128
    recurrent = hidden * (2 * keys + 2 * values + 64) + values * hidden
    # queries bring a gate
    mixers = 3 * recurrent + attention(hidden, 16, 2, 256) + hidden * 16 * 256
    feed_forward = 4 * (3 * hidden * inner + hidden * experts)
    state = 3 * (32 * 128 * 128 + 4 * (2 * keys + values))
    return Shape(config, mixers + feed_forward, 4 * 3 * hidden * inner, experts, top_k, state)


def granite() -> Shape:
    hidden, experts, top_k, inner, shared = 1536, 64, 6, 512, 1024
    config = {
        "model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"], "hidden_size": hidden,
        "num_hidden_layers": 4, "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": inner,
        "shared_intermediate_size": shared, "num_local_experts": experts, "num_experts_per_tok": top_k,
        "layer_types": ["mamba", "mamba", "mamba", "attention"], "position_embedding_type": "nope",
        "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4,
        "mamba_expand": 2, "vocab_size": VOCABULARY, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 6.0,
        "attention_multiplier": 0.0078125,
    }  # fmt: skip
    width = 2 * hidden
    recurrent = hidden * (2 * width + 2 * 128 + 48) + width * hidden
    mixers = 3 * recurrent + attention(hidden, 12, 4, 128)
    feed_forward = 4 * (3 * hidden * shared + hidden * experts)
    state = 3 * (48 * 64 * 128 + 4 * (width + 2 * 128))
    return Shape(config, mixers + feed_forward, 4 * 3 * hidden * inner, experts, top_k, state)


def attention(hidden: int, heads: int, kv_heads: int, head_dim: int) -> int:
    return hidden * head_dim * (2 * heads + 2 * kv_heads)


def dense(like: Shape) -> Shape:
    """Qwen 3 with as many layers, and as many weights as a token of the other reads."""
    num_layers, hidden = like.config["num_hidden_layers"], like.config["hidden_size"]
    heads, head_dim = hidden // 128, 128
    of_layer = (like.num_dense + like.top_k * like.num_expert) / num_layers - attention(hidden, heads, 4, head_dim)
    inner = round(of_layer / (3 * hidden * 64)) * 64
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": hidden, "rms_norm_eps": 1e-6,
        "num_hidden_layers": num_layers, "num_attention_heads": heads, "num_key_value_heads": 4, "head_dim": head_dim,
        "intermediate_size": inner, "rope_theta": 1e6, "vocab_size": like.config["vocab_size"],
        "tie_word_embeddings": like.config["tie_word_embeddings"],
    }  # fmt: skip
    return Shape(config, num_layers * (attention(hidden, heads, 4, head_dim) + 3 * hidden * inner))


SHAPES: dict[str, Callable[[], Shape]] = {
    "lfm2": lambda: lfm2(1024, 4608, 16),
    "lfm2_large": lambda: lfm2(2048, 8192, 32),
    "qwen3_next": qwen3_next,
    "granite": granite,
}


# ------------------------------------------------------------------------------------------ in a process of its own


class QuireSteps:
    """A worker and its rows, driven by hand."""

    def __init__(self, folder: Path, prompt: int, steps: int, threads: int, profile: bool) -> None:
        from quire.engine_core.kv_cache_manager.groups import make_groups
        from quire.testing.model_harness import worker_config
        from quire.worker.worker import Worker

        length = max(prompt, CONTEXT) + steps + 8
        self._worker = Worker(
            worker_config(
                folder, dtype="bfloat16", load_format="dummy", max_model_len=length, block_size=BLOCK_SIZE,
                max_num_seqs=NUM_REQUESTS, max_num_batched_tokens=max(prompt, NUM_REQUESTS * CONTEXT),
                attention_backend="auto", num_threads=threads, enforce_eager=profile,
            )
        )  # fmt: skip
        self._worker.load()
        groups, _ = make_groups(self._worker.measure_capacity().layers, BLOCK_SIZE)
        self._blocks_by_group = [group.num_state_blocks or -(-length // BLOCK_SIZE) for group in groups]
        num_blocks = NUM_REQUESTS * sum(self._blocks_by_group)
        self._worker.initialize_cache([list(group.layer_names) for group in groups], num_blocks + 1, 0)
        self._num_steps = 0

    def step(self, count: int, tokens: int, **changes: Any) -> None:
        from quire.messages import SchedulerOutput

        rows = np.arange(count)
        scheduled = SchedulerOutput(
            step=self._num_steps, rows=rows, num_tokens=np.full(count, tokens, dtype=np.int64), **changes
        )
        self._num_steps += 1
        output = self._worker.execute(scheduled)
        assert not output.failures, output.failures

    def begin(self, count: int, length: int) -> None:
        """So many rows with prompts of this length, computed in one step."""
        from quire.messages import AdmittedSequence, int_array
        from quire.sampling_params import SamplingParams

        random = np.random.default_rng(self._num_steps)
        admitted = [
            AdmittedSequence(
                row=row, sequence_id=self._num_steps * NUM_REQUESTS + row, num_prompt_tokens=length,
                token_ids=int_array(random.integers(0, VOCABULARY, length)), num_computed_tokens=0,
                sampling=SamplingParams(temperature=0.0), seed=row,
            )
            for row in range(count)
        ]  # fmt: skip
        writes = []
        block = 1
        for row in range(count):
            for group, num_blocks in enumerate(self._blocks_by_group):
                for index in range(num_blocks):
                    writes.append((group, row, index, block))
                    block += 1
        self.step(count, length, admitted=admitted, block_writes=np.array(writes, dtype=np.int64).T)

    def end(self, count: int) -> None:
        self.step(0, 0, released=list(range(count)))

    def decode(self, count: int) -> None:
        self.step(count, 1)


class TransformersSteps:
    """The same through Transformers and its cache."""

    def __init__(self, folder: Path, prompt: int, steps: int, threads: int, profile: bool) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self._torch = torch
        config = AutoConfig.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        self._cache: Any = None

    def begin(self, count: int, length: int) -> None:
        self._run(self._torch.randint(0, VOCABULARY, (count, length)), None)

    def decode(self, count: int) -> None:
        self._run(self._next, self._cache)

    def end(self, count: int) -> None:
        self._cache = None

    def _run(self, tokens: Any, cache: Any) -> None:
        out = self._model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        self._cache = out.past_key_values
        self._next = out.logits[:, -1:].argmax(-1)


def bandwidth(clock: Callable[[], float], num_threads: int) -> float:
    """Bytes a second that NumPy reads of huge pages, as weights lie in them; the best of some passes."""
    from quire.worker.lazy_memory import lazy_zeros

    memory = lazy_zeros((BANDWIDTH_BYTES,), np.uint8, use_huge_pages=True)
    memory[:] = 1
    parts = memory.view(np.int64).reshape(num_threads, -1)
    times = []
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(9):
            start = clock()
            list(pool.map(np.bitwise_or.reduce, parts))
            times.append(clock() - start)
    return BANDWIDTH_BYTES / min(times)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    clock = time.process_time if options.threads == 1 else time.perf_counter
    rate = bandwidth(clock, options.threads)
    kind = TransformersSteps if options.child == "Transformers" else QuireSteps
    steps = kind(folder, options.prompt, options.steps, options.threads, options.profile)

    def timed(run: Callable[[], None], times: int) -> float:
        durations = []
        for _ in range(times):
            start = clock()
            run()
            durations.append(clock() - start)
        return statistics.median(durations)

    found = {"bandwidth": rate}
    for count in (1, NUM_REQUESTS):
        steps.begin(count, CONTEXT)
        steps.decode(count)
        found[f"step_{count}"] = timed(lambda count=count: steps.decode(count), options.steps)
        steps.end(count)

    def prompt() -> None:
        steps.begin(1, options.prompt)

    prompts = []
    for _ in range(4):
        start = clock()
        prompt()
        prompts.append(clock() - start)
        steps.end(1)
    found["prompt"] = statistics.median(prompts[1:])
    if options.profile:
        print_profile(steps, options.prompt)
    return found


def print_profile(steps: Any, prompt: int) -> None:
    from torch.profiler import profile

    for count, length in ((1, CONTEXT), (NUM_REQUESTS, CONTEXT), (1, prompt)):
        with profile() as profiled:
            steps.begin(count, length)
            if length == CONTEXT:
                profiled.__exit__(None, None, None)
                with profile() as profiled:
                    for _ in range(8):
                        steps.decode(count)
        steps.end(count)
        print(f"\n{count} rows, {'a prompt of ' + str(length) if length != CONTEXT else '8 steps'}", file=sys.stderr)
        print(profiled.key_averages().table(sort_by="self_cpu_time_total", row_limit=14), file=sys.stderr)


# ------------------------------------------------------------------------------------------ the whole


def run_child(folder: Path, kind: str, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", kind, "--folder", str(folder), "--prompt", str(options.prompt)]
    command += ["--steps", str(options.steps), "--threads", str(options.threads)]
    if options.profile and kind == "Quire":
        command.append("--profile")
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    shape = SHAPES[name]()
    shapes = {"Quire": shape, "dense": dense(shape), "Transformers": shape}
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in options.kinds}
    with tempfile.TemporaryDirectory() as parent:
        for kind in rounds:
            folder = Path(parent) / kind
            folder.mkdir()
            config = {"torch_dtype": "bfloat16", "max_position_embeddings": 4096, **shapes[kind].config}
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for _ in range(options.rounds):
            for kind, found in rounds.items():
                found.append(run_child(Path(parent) / kind, kind, options))
    print(f"{name}: a token reads {shape.step_bytes(1) / 1e6:.0f} MB")
    return {kind: told(kind, shapes[kind], found) for kind, found in rounds.items()}


def told(kind: str, shape: Shape, rounds: list[dict[str, float]]) -> dict[str, float]:
    row: dict[str, float] = {}
    for count in (1, NUM_REQUESTS):
        row[f"step_{count}_ms"] = 1e3 * statistics.median(found[f"step_{count}"] for found in rounds)
        row[f"step_{count}_share"] = statistics.median(
            shape.step_bytes(count) / found["bandwidth"] / found[f"step_{count}"] for found in rounds
        )
    row["prompt_ms"] = 1e3 * statistics.median(found["prompt"] for found in rounds)
    row["read_gb_s"] = statistics.median(found["bandwidth"] for found in rounds) / 1e9
    print(
        f"  {kind:13} one stream {row['step_1_ms']:7.2f} ms, share {row['step_1_share']:.2f};  {NUM_REQUESTS} requests "
        f"{row[f'step_{NUM_REQUESTS}_ms']:7.2f} ms, share {row[f'step_{NUM_REQUESTS}_share']:.2f};  "
        f"prompt {row['prompt_ms']:8.1f} ms;  {row['read_gb_s']:.1f} GB/s"
    )
    return {name: round(value, 3) for name, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["lfm2", "qwen3_next", "granite"])
    parser.add_argument("--kinds", nargs="+", choices=("Quire", "dense", "Transformers"),
                        default=["Quire", "dense", "Transformers"])  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.folder, options)))
        return
    result: dict[str, Any] = {"threads": options.threads, "prompt": options.prompt}
    for name in options.shapes:
        result[name] = compare(name, options)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
