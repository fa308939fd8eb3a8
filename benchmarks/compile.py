"""A model compiled in pieces (4.6.3) beside the recorded program and beside operators one by one, on a CPU.

    python benchmarks/compile.py [--layers 8] [--hidden 1024] [--rounds 3] [--dtype bfloat16]

Random weights in the shape of Qwen 3 0.6B with fewer layers. Each start is a process of its own: one whose compiler
folder is empty, then one that finds what the first has made. `start` is what loading and opening the caches take, in
processor time of the process and of the compilers that it called; steps are medians, in processor time of the worker,
one thread. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WAYS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "recorded": {},
    "compiled": {"compile": True},
}
# tokens of a step: one request, sixteen, a prompt
STEPS = (1, 16, 256)


def processor_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(path: str, way: str, rounds: int, dtype: str) -> dict[str, float]:
    import torch

    from quire.testing.model_harness import worker_config
    from quire.worker.attention import AttentionBatch
    from quire.worker.forward_context import ForwardContext, forward_context
    from quire.worker.worker import Worker

    torch.set_num_threads(1)
    options: dict[str, Any] = {"dtype": dtype, "load_format": "dummy", "attention_backend": "auto"}
    options |= {"block_size": 16, "max_num_seqs": 16}
    worker = Worker(worker_config(Path(path), **options, **WAYS[way]))
    before = processor_seconds()
    clock = time.perf_counter()
    worker.load()
    layers = worker.measure_capacity().layers
    loaded = processor_seconds()
    worker.initialize_cache([[layer.name for layer in layers]], 64)
    found = {"start": processor_seconds() - before, "opening": processor_seconds() - loaded}
    found["start_wall"] = time.perf_counter() - clock
    model: Any = worker._model
    for count in STEPS:
        rows = 1 if count == 256 else count
        length = count // rows
        batch = AttentionBatch(
            query_starts_S1=torch.arange(0, count + 1, length, dtype=torch.int32),
            seq_lens_S=torch.full((rows,), length, dtype=torch.int32),
            block_tables_SM=torch.arange(rows * -(-length // 16), dtype=torch.int32).view(rows, -1),
            slots_T=torch.arange(count) if rows == 1 else torch.arange(rows) * 16,
            max_query_len=length,
            max_seq_len=length,
        )
        backend = next(module.backend for module in model.modules() if getattr(module, "backend", None))
        metadata = (backend.build_metadata(batch),)
        ids = torch.arange(count)
        positions = torch.arange(length).repeat(rows)
        times = []
        for _ in range(rounds * 5):
            began = time.process_time()
            with torch.inference_mode(), forward_context(ForwardContext(metadata)):
                model(ids, positions)
            times.append(time.process_time() - began)
        found[f"step_{count}"] = statistics.median(times)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(*arguments.one, arguments.rounds, arguments.dtype)))
        return
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 8192,
        "hidden_size": arguments.hidden, "intermediate_size": 3 * arguments.hidden,
        "num_hidden_layers": arguments.layers, "num_attention_heads": arguments.hidden // 64,
        "num_key_value_heads": arguments.hidden // 128, "head_dim": 128, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, "compiled"))
        own = [__file__, "--rounds", str(arguments.rounds), "--dtype", arguments.dtype]
        found: dict[str, dict[str, float]] = {}
        for name, way in (("eager", "eager"), ("recorded", "recorded"), ("first", "compiled"), ("second", "compiled")):
            command = [sys.executable, *own, "--one", str(model), way]
            lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
            found[name] = json.loads(lines[-1])
            print(name, {key: round(value, 4) for key, value in found[name].items()}, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
