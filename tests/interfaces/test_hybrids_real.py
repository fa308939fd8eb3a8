"""Chats and pinned prefixes of models with recurrent layers: only what is new is computed, and no token changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, OptionError, SamplingParams
from quire.testing.tiny_checkpoints import make_checkpoint

MODELS = ("lfm2", "qwen3_next", "mamba2")
# without swap space copies are free, so that what a measurement says decides nothing here
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 400,
    "swap_space": 0,
}
QUESTION = [(7 * index) % 300 for index in range(200)]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / request.param, request.param, max_position_embeddings=512)


def answer(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[list[int], int]:
    """What it says, and how many tokens of the prompt were there."""
    [output] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    return list(output.outputs[0].token_ids), output.num_cached_tokens or 0


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_the_second_turn_of_a_chat_computes_what_is_new(path: Path, is_async: bool) -> None:
    """300 tokens, with the defaults of all that has to do with checkpoints; a third turn ends by a stop token."""
    with LLM(str(path), enable_prefix_caching=False, **OPTIONS) as plain:
        first, _ = answer(plain, QUESTION, greedy(100))
        said = [*QUESTION, *first, 5, 6, 7]
        second, _ = answer(plain, said, greedy(40))
        further = [*said, *second[: second.index(second[-1]) + 1], 8, 9]
        third, _ = answer(plain, further, greedy(10))
    stop = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop_token_ids=[second[-1]])
    with LLM(str(path), async_scheduling=is_async, **OPTIONS) as llm:
        assert answer(llm, QUESTION, greedy(100)) == (first, 0)
        found, num_cached = answer(llm, said, stop)
        assert found == second[: second.index(second[-1]) + 1]
        # all but the last token of the answer, which was sampled and not computed
        assert num_cached == 299
        # The end of an answer is found once the step that was ahead of it has its results: before those of this.
        answer(llm, [290], greedy(1))
        assert answer(llm, further, greedy(10)) == (third, len(further) - 3)
        # asked once more, the first turn begins at the last boundary of its prompt
        assert answer(llm, QUESTION, greedy(100)) == (first, 192)
        statistics = llm.statistics()
        share = statistics["num_state_checkpoint_blocks"] / statistics["num_blocks"]
        assert 0 < share <= 0.25


def test_a_pinned_prefix_is_used_to_its_last_token(path: Path) -> None:
    prefix = QUESTION[:77]
    prompts = [[*prefix, 3, number] for number in range(3)]
    with LLM(str(path), enable_prefix_caching=False, **OPTIONS) as plain:
        expected = [answer(plain, prompt, greedy(8))[0] for prompt in prompts]
    # checkpoints have no share, so that nothing but the pin serves
    with LLM(str(path), state_checkpoint_share=0.0, **OPTIONS) as llm:
        pinned = llm.pin_prefix({"prompt_token_ids": prefix}, "p")
        assert pinned.num_tokens == 77
        assert [answer(llm, prompt, greedy(8)) for prompt in prompts] == [(tokens, 77) for tokens in expected]
        several = SamplingParams(temperature=1.0, seed=3, max_tokens=4, n=3)
        [output] = llm.generate({"prompt_token_ids": prompts[0]}, several, use_tqdm=False)
        assert output.num_cached_tokens == 77
        assert llm.pinned_prefixes()[0].num_hits == 4
        llm.unpin_prefix("p")
        assert answer(llm, prompts[0], greedy(8)) == (expected[0], 0)
        assert llm.statistics()["num_blocks_held"] == 0


def test_a_file_of_prefixes_is_pinned_at_start(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "prefixes.json"
    file.write_text(json.dumps([{"name": "a", "token_ids": QUESTION[:40]}]))
    with LLM(str(path), pinned_prefixes=str(file), **OPTIONS) as llm:
        assert answer(llm, QUESTION, greedy(2))[1] == 40


def test_a_connector_is_refused_in_one_line(path: Path) -> None:
    with pytest.raises(OptionError, match=r"kv_connector=memory: .* has recurrent layers, whose state this connector"):
        LLM(str(path), kv_connector={"name": "memory"}, **OPTIONS)
