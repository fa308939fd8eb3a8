"""Why a prompt had to be computed, as each answer says it."""

import pytest

from quire import LLM, PoolingParams, SamplingParams
from quire.engine_core.kv_cache_manager.lost_names import MOST_NAMES, LostNames
from quire.hooks import Hook

BLOCK = 16
NUM_BLOCKS = 32


@pytest.fixture(scope="module")
def llm():
    with LLM(num_gpu_blocks_override=NUM_BLOCKS, block_size=BLOCK, max_model_len=400, max_num_seqs=2) as llm:
        yield llm


def prompt(first, num_tokens):
    return {"prompt_token_ids": [first, *range(20, 19 + num_tokens)]}


def miss(llm, first, num_tokens, **sampling):
    [output] = llm.generate([prompt(first, num_tokens)], SamplingParams(max_tokens=1, temperature=0, **sampling))
    return output.num_cached_tokens, output.first_miss


def test_new_and_then_there(llm):
    llm.control("reset_prefix_cache")
    assert miss(llm, 5, 65) == (0, "new")
    assert miss(llm, 5, 65) == (64, None)
    # the same beginning, and more of it
    assert miss(llm, 5, 100) == (64, "new")
    assert miss(llm, 5, 10) == (0, None)


def test_evicted_by_others(llm):
    llm.control("reset_prefix_cache")
    assert miss(llm, 6, 65) == (0, "new")
    for first in (7, 8, 9):
        miss(llm, first, 300)
    assert miss(llm, 6, 65) == (0, "evicted")
    assert miss(llm, 6, 65) == (64, None)


def test_cleared(llm):
    miss(llm, 10, 65)
    llm.control("reset_prefix_cache")
    assert miss(llm, 10, 65) == (0, "cleared")


def test_every_position_is_needed(llm):
    miss(llm, 11, 65)
    assert miss(llm, 11, 65, prompt_logprobs=1) == (0, "every_position")
    [output] = llm.embed([prompt(11, 65)], PoolingParams(pooling="mean"))
    assert output.num_cached_tokens == 0


class Watching(Hook):
    def on_tokens(self, tokens):
        return None


def test_where_hooks_look_at_tokens_as_well():
    with LLM(num_gpu_blocks_override=NUM_BLOCKS, block_size=BLOCK, max_model_len=400, hooks=[Watching()]) as llm:
        assert miss(llm, 5, 65) == (0, "new")


def test_no_cache_at_all():
    with LLM(
        num_gpu_blocks_override=NUM_BLOCKS, block_size=BLOCK, max_model_len=400, enable_prefix_caching=False
    ) as llm:
        assert miss(llm, 5, 65) == (0, "off")


def test_as_many_names_are_remembered_as_the_pool_has():
    lost = LostNames(3)
    lost.add([(0, name) for name in (b"a", b"b", b"c")], "evicted")
    lost.add([(0, b"a"), (0, b"d")], "cleared")
    assert [lost.reason((0, name)) for name in (b"a", b"b", b"c", b"d")] == ["cleared", None, "evicted", "cleared"]
    assert len(lost) == 3


def test_a_great_pool_does_not_remember_without_bound():
    lost = LostNames(10**9)
    lost.add([(0, number.to_bytes(16, "big")) for number in range(MOST_NAMES + 5)], "cleared")
    assert len(lost) == MOST_NAMES
    assert lost.reason((0, (4).to_bytes(16, "big"))) is None
    assert lost.reason((0, (5).to_bytes(16, "big"))) == "cleared"
