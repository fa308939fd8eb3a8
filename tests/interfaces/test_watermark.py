"""Texts of an engine with a watermark: found by its key, drawn by seed where they may differ, and no other request
changes them."""

import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from quire.errors import RequestError
from quire.watermark import WatermarkDetector

CONFIG = {"key": 1234, "context_width": 3}
OPTIONS = {"max_num_seqs": 6, "max_model_len": 256, "check_invariants": True}
# a small model is sure of its words, and what is sure cannot be marked
DRAWN = SamplingParams(temperature=2.5, max_tokens=120, ignore_eos=True, seed=3)
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm():
    with LLM(**OPTIONS, watermark_config=CONFIG) as llm:
        yield llm


def tokens(llm, params, prompt=PROMPT):
    [output] = llm.generate(prompt, params, use_tqdm=False)
    return [list(one.token_ids) for one in output.outputs]


def is_marked(token_ids) -> bool:
    return WatermarkDetector(**CONFIG, threshold=1e-4).detect(token_ids).is_watermarked


def test_marked_unless_asked_otherwise(llm):
    assert is_marked(tokens(llm, DRAWN)[0])
    assert is_marked(tokens(llm, DRAWN.replace(watermarking=True, top_k=50, top_p=0.95))[0])
    for params in (DRAWN.replace(watermarking=False), DRAWN.replace(temperature=0.0)):
        assert not is_marked(tokens(llm, params)[0])
    beams = llm.generate(PROMPT, BeamSearchParams(beam_width=2, max_tokens=40), use_tqdm=False)
    assert not any(is_marked(one.token_ids) for one in beams[0].outputs)
    with LLM(**OPTIONS) as other:
        plain = tokens(other, DRAWN)
        assert plain == tokens(llm, DRAWN.replace(watermarking=False))
        with pytest.raises(RequestError, match="watermarking: this engine has no watermark"):
            tokens(other, DRAWN.replace(watermarking=True))
    assert tokens(llm, DRAWN)[0][: CONFIG["context_width"]] == plain[0][: CONFIG["context_width"]]


def test_the_seed_and_not_the_batch_decides(llm):
    alone = tokens(llm, DRAWN)
    assert alone == tokens(llm, DRAWN)
    wild = DRAWN.replace(temperature=9.0)
    assert tokens(llm, wild) != tokens(llm, wild.replace(seed=4))
    together = llm.generate(
        [PROMPT, "2+3=", PROMPT], [DRAWN, DRAWN.replace(watermarking=False, seed=9), DRAWN], use_tqdm=False
    )
    assert [list(together[index].outputs[0].token_ids) for index in (0, 2)] == alone * 2
    three = tokens(llm, wild.replace(n=3))
    assert len({tuple(one) for one in three}) == 3
    assert all(map(is_marked, three))


def test_drafts_change_nothing(llm):
    draft = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM(**OPTIONS, watermark_config=CONFIG, speculative_config=draft) as other:
        assert tokens(other, DRAWN) == tokens(llm, DRAWN)


def test_refused():
    with pytest.raises(RequestError, match="watermarking: not with temperature=0"):
        SamplingParams(temperature=0.0, watermarking=True)
    with pytest.raises(RequestError, match="must be true or false"):
        SamplingParams(watermarking="yes")
