"""3.4.1: attention over blocks does not depend on where the blocks lie. Bitwise, in log-probabilities."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quire.engine_core.engine_core import EngineCore
from quire.messages import EngineRequest
from quire.sampling_params import SamplingParams
from quire.testing.greedy import real_core
from quire.testing.tiny_checkpoints import make_checkpoint

NUM_BLOCKS = 200
Logprobs = dict[int, list[tuple[list[int], list[float]]]]


def run(core: EngineCore, order: list[int]) -> tuple[Logprobs, list[list[int]]]:
    """All log-probabilities of a mixed batch, and the block tables that it used."""
    pool = core.scheduler.manager.pool
    assert pool.num_held == 0
    pool.forget_all()
    pool._free[:] = reversed(order)
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=5)
    for number, length in enumerate([1, 7, 16, 33, 70]):
        prompt = [(number * 31 + i * 7) % 250 for i in range(length)]
        core.add(EngineRequest(request_id=number, prompt_token_ids=prompt, sampling=sampling))
    found: Logprobs = {}
    tables: list[list[int]] = []
    while core.has_work:
        outputs = core.step()
        tables = [list(sequence.block_tables[0]) for sequence in core.scheduler.running.living_sequences()] or tables
        for entry in outputs.logprobs:
            found.setdefault(entry.sequence_id, []).extend((p.token_ids, p.logprobs) for p in entry.positions)
    return found, tables


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_permutation_of_blocks_changes_no_bit(tmp_path: Path, backend: str) -> None:
    path = make_checkpoint(tmp_path / "qwen3", "qwen3")
    core = real_core(path, num_gpu_blocks_override=NUM_BLOCKS, block_size=8, attention_backend=backend)
    plain, plain_tables = run(core, list(range(NUM_BLOCKS)))
    shuffled = random.Random(3).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    permuted, permuted_tables = run(core, shuffled)
    assert plain_tables != permuted_tables
    assert len(plain) == 5
    assert plain == permuted
    core.shutdown()
