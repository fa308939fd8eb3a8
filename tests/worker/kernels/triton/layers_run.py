"""Tokens of a tiny model, greedy and drawn in every way, with the kernels that QUIRE_CPU_KERNELS names, as JSON.

    python -m tests.worker.kernels.triton.layers_run CHECKPOINT [SCHEME]

A process of its own, because the home of an operator is decided once.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from quire.messages import EngineRequest
from quire.sampling_params import SamplingParams
from quire.testing.greedy import real_core
from quire.testing.run_requests import run_requests
from quire.worker import worker

WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 2},
    {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "seed": 3},
    {"temperature": 0.0, "presence_penalty": 0.4, "allowed_token_ids": list(range(40, 200))},
)


def run(path: Path, scheme: str | None) -> dict[str, Any]:
    # the interpreter is slow, and waited for
    worker._PATIENCE_SECONDS = math.inf
    launches = count_launches() if os.environ["QUIRE_CPU_KERNELS"] == "triton" else Counter[str]()
    requests = [
        EngineRequest(number, [7 + number, 9, 11, 13 + number, 9], SamplingParams(max_tokens=4, ignore_eos=True, **way))
        for number, way in enumerate(WAYS)
    ]
    options = {"max_model_len": 32, "max_num_seqs": 8, "block_size": 8, "dtype": "float32", "quantization": scheme}
    core = real_core(path, max_num_batched_tokens=16, **options)
    results = run_requests(core, requests)
    core.shutdown()
    tokens = [[sequence.tokens for sequence in results[number]] for number in sorted(results)]
    return {"tokens": tokens, "launches": dict(launches)}


def count_launches() -> Counter[str]:
    """By kernel."""
    from quire.worker.kernels.triton.interpreter import interpret

    interpret()
    from quire.worker.kernels.triton import launch

    counts: Counter[str] = Counter()
    run_really = launch.run

    def run_and_count(launched: Any) -> None:
        counts[launched.kernel.__name__] += 1
        run_really(launched)

    launch.run = run_and_count
    return counts


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)))
