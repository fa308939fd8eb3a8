"""Sessions and pinned prefixes of a model whose layers keep different numbers of bytes: no token changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire import LLM, SamplingParams
from quire.testing.greedy import assert_same_tokens, reference_generate
from quire.testing.tiny_checkpoints import make_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
Check = Callable[[list[int]], None]


@pytest.fixture(scope="module", params=["gemma4", "gemma4_moe"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def check(path: Path) -> Check:
    """That Transformers ends these tokens as they end."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def check(tokens: list[int]) -> None:
        assert_same_tokens(tokens[-12:], reference_generate(model, tokens[:-12], 12), f"after {len(tokens) - 12}")

    return check


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    """Two to three requests of the greatest length."""
    options = {"block_size": 8, "num_gpu_blocks_override": 120, "max_model_len": 192, "max_num_seqs": 4}
    with LLM(str(path), dtype="float32", check_invariants=True, **options) as one:
        yield one
        assert one.statistics()["num_blocks_held"] == 0


def test_a_session_goes_on_beyond_its_windows(llm: LLM, check: Check) -> None:
    flood = [{"prompt_token_ids": [number] * 30} for number in range(20)]
    with llm.open_session() as session:
        for turn in range(3):
            session.generate(f"turn {turn} is longer than a window ", GREEDY)
            check(session.token_ids)
            with session.fork() as fork:
                fork.rewind(len(session.token_ids) - 5)
                fork.generate(" but", GREEDY)
                check(fork.token_ids)
            if turn == 1:
                llm.generate(flood, GREEDY, use_tqdm=False)


def test_a_pinned_prefix_is_used_to_its_last_token(llm: LLM, check: Check) -> None:
    prefix = list(range(40, 77))
    llm.pin_prefix({"prompt_token_ids": prefix}, "p")
    for more in ([3], [4, 5, 6], [3]):
        [output] = llm.generate({"prompt_token_ids": [*prefix, *more]}, GREEDY, use_tqdm=False)
        assert output.num_cached_tokens >= len(prefix)
        check([*output.prompt_token_ids, *output.outputs[0].token_ids])
    llm.unpin_prefix("p")
