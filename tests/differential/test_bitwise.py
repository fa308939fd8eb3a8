"""The same tokens give the same bits, whatever else the engine does (C7): random batches on real models, more by night.

Every case is some requests of a family that shares beginnings, at random moments, in an engine with its own budget of
tokens, memory, prefix cache, way of preemption and drafts. The hidden states of all tokens of all steps of all engines
are compared by `tests.support.bitwise`.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.support.bitwise import BookOfBits

from quire.config.model_source import embedded_path
from quire.engine_core.engine_core import EngineCore
from quire.messages import EngineRequest
from quire.sampling_params import SamplingParams
from quire.testing.greedy import real_core
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker.kernels import cpu

pytestmark = pytest.mark.skipif(not cpu.load(), reason="torch's own kernels do not promise this")

# checkpoint, dtype, further options
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("qwen3", {"dtype": "float32"}),
    "bfloat16": ("embedded", {"dtype": "bfloat16"}),
    "window": ("mistral", {"dtype": "bfloat16"}),
    "experts": ("qwen3_moe", {"dtype": "bfloat16"}),
    "chunks": ("llama4_chunks", {"dtype": "bfloat16"}),
    "latent": ("deepseek_v3_groups", {"dtype": "bfloat16"}),
    "sinks": ("gpt_oss", {"dtype": "bfloat16"}),
    "two shapes": ("gemma4", {"dtype": "bfloat16"}),
    "two shapes and experts": ("gemma4_moe", {"dtype": "bfloat16"}),
    "experts in int4": ("mixtral", {"dtype": "bfloat16", "quantization": "int4"}),
    "states": ("qwen3_next", {"dtype": "bfloat16"}),
    "int8": ("embedded", {"dtype": "bfloat16", "quantization": "int8"}),
    "int4": ("qwen3", {"dtype": "float32", "quantization": "int4"}),
}
ENGINES: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 512, "enable_prefix_caching": False},
    {"max_num_batched_tokens": 19, "enable_prefix_caching": True, "long_prefill_token_threshold": 7},
    {"num_gpu_blocks_override": 18, "max_num_batched_tokens": 64, "preemption_mode": "recompute"},
    {"num_gpu_blocks_override": 18, "max_num_batched_tokens": 64, "preemption_mode": "swap", "swap_space": 0.01},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "num_threads": 2},
]
# scarce memory of models whose layers have windows or none: three groups of blocks
SCARCE = {"sinks": 48, "two shapes": 32, "two shapes and experts": 48, "states": 60}
# What must have happened somewhere, or the test says less than it seems to.
SEEN = ("num_prefix_hit_tokens_total", "num_preemptions_by_recompute_total", "num_preemptions_by_swap_total")
MAX_MODEL_LEN = 128


def family(pick: random.Random) -> list[list[int]]:
    """Prompts that begin alike, some of them short repeats, which drafts like."""
    stem = [pick.randrange(5, 250) for _ in range(70)]
    prompts = [stem[: pick.choice((1, 5, 16, 17, 33, 48, 70))] for _ in range(6)]
    prompts += [stem[:20] + [pick.randrange(5, 250) for _ in range(pick.randrange(1, 20))] for _ in range(4)]
    prompts += [(stem[:4] * 9)[: pick.randrange(8, 36)] for _ in range(2)]
    return prompts


def run_case(core: EngineCore, pick: random.Random, prompts: list[list[int]], first_id: int, is_scarce: bool) -> int:
    """Some of the prompts at random moments, where memory is scarce enough of them to fill it; returns how many."""
    chosen = [pick.choice(prompts) for _ in range(8 if is_scarce else pick.choice((1, 3, 5, 8)))]
    waiting = list(enumerate(chosen, first_id))
    while waiting or core.has_work:
        while waiting and (not core.has_work or pick.random() < 0.85):
            number, prompt = waiting.pop()
            sampling = SamplingParams(
                temperature=0.0, max_tokens=40 if is_scarce else pick.choice((1, 6, 40)), ignore_eos=True
            )
            core.add(EngineRequest(request_id=number, prompt_token_ids=prompt, sampling=sampling))
        outputs = core.step()
        assert not [end.error for end in outputs.ends if end.error]
    return len(chosen)


@pytest.mark.parametrize("num_cases", [9, pytest.param(120, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_tokens_give_the_same_bits(name: str, num_cases: int, tmp_path: Path) -> None:
    checkpoint, options = MODELS[name]
    path = Path(embedded_path()) if checkpoint == "embedded" else make_checkpoint(tmp_path / checkpoint, checkpoint)
    book, pick, seen = BookOfBits(), random.Random(name), Counter[str]()
    prompts = family(pick)
    for engine in ENGINES:
        is_scarce = "num_gpu_blocks_override" in engine
        if is_scarce:
            engine = {**engine, "num_gpu_blocks_override": SCARCE.get(name, engine["num_gpu_blocks_override"])}
        core = real_core(path, max_model_len=MAX_MODEL_LEN, max_num_seqs=8, block_size=8, **options, **engine)
        book.watch(core)
        next_id = 0
        # those that fill the memory take longer
        for _ in range(num_cases // 3 if is_scarce else num_cases):
            next_id += run_case(core, pick, prompts, next_id, is_scarce)
        statistics = core.statistics()
        seen.update({what: int(statistics[what]) for what in SEEN})
        core.shutdown()
        assert not book.differences, f"{engine}: {len(book.differences)} states of {book.num_repeated}"
    assert book.num_repeated > 4 * len(book) > 1000
    assert all(seen[what] for what in SEEN), seen
