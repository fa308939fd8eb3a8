"""Greedy tokens and beams of a tiny model with the kernels that QUIRE_CPU_KERNELS names, as one line of JSON.

    python -m tests.worker.kernels.triton.engine_run CHECKPOINT DTYPE [OPTIONS BY ENGINE, OR OF ALL, AS JSON]

A process of its own, because the home of an operator is decided once.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.support.beam_requests import beam_request

from quire.engine_core.engine_core import EngineCore
from quire.messages import EngineRequest
from quire.sampling_params import SamplingParams
from quire.testing.beam_reference import BeamSettings
from quire.testing.greedy import real_core
from quire.testing.run_requests import run_requests
from quire.worker import worker
from quire.worker.kernels import triton

ENGINES: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 19, "enable_prefix_caching": True},
    "swap": {
        "num_gpu_blocks_override": 10,
        "max_num_batched_tokens": 64,
        "preemption_mode": "swap",
        "swap_space": 0.01,
        "enable_prefix_caching": False,
    },
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}
# What shows that an engine did what it is there for.
SIGNS = {"swap": "num_preemptions_by_swap_total"}


def requests(name: str) -> list[EngineRequest]:
    pick = random.Random(7)
    stem = [pick.randrange(5, 250) for _ in range(8)]
    # memory fills up while those of the second kind grow
    lengths, max_tokens = ((33, 21, 5), 6) if name != "swap" else ((9, 10, 11), 18)
    prompts = [(stem * 6)[:length] for length in lengths]
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    asked = [EngineRequest(number, prompt, greedy) for number, prompt in enumerate(prompts)]
    if name == "chunks":
        asked.append(beam_request(9, stem, BeamSettings(3, 4, (7, 17))))
    return asked


def run(path: Path, dtype: str, more: dict[str, dict[str, Any]]) -> dict[str, Any]:
    # the interpreter is slow, and waited for
    worker._PATIENCE_SECONDS = math.inf
    launches = count_launches() if os.environ["QUIRE_CPU_KERNELS"] == "triton" else Counter[str]()
    tokens, signs = {}, {}
    for name, options in ENGINES.items():
        common = {"max_model_len": 64, "max_num_seqs": 4, "block_size": 8, "dtype": dtype}
        core: EngineCore = real_core(path, **common | options | more.get("all", {}) | more.get(name, {}))
        results = run_requests(core, requests(name))
        tokens[name] = [[sequence.tokens for sequence in results[number]] for number in sorted(results)]
        statistics = core.statistics()
        signs[name] = int(statistics[SIGNS[name]]) if name in SIGNS else 0
        core.shutdown()
    return {"tokens": tokens, "signs": signs, "launches": dict(launches), "home": triton.statistics()}


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
    print(json.dumps(run(Path(sys.argv[1]), sys.argv[2], json.loads([*sys.argv, "{}"][3]))))
