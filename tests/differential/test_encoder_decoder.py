"""Models that read a text and write another one against Transformers, in every way of scheduling."""

from pathlib import Path

import numpy as np
import pytest
import torch

from quire import LLM, BeamSearchParams, SamplingParams
from quire.errors import RequestError, UserError
from quire.testing.source_checkpoints import KINDS, START, make_source_checkpoint, make_source_model

NUM_TOKENS = 40
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=1)
# shorter and longer than a block, and than the distances that a bias tells apart
SOURCES = [[17], list(range(40, 45)), [(7 * place) % 250 + 5 for place in range(70)], list(range(60, 76)), [17]]
WAYS = {
    "at once": {},
    "chunks of 7 end within sources": {"max_num_batched_tokens": 7, "block_size": 4, "max_num_seqs": 5},
    "operator by operator": {"enforce_eager": True, "block_size": 4, "max_num_batched_tokens": 60, "max_num_seqs": 5},
    "the reference of attention": {"attention_backend": "reference"},
    "n-gram drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    "a source a step": {"max_num_encoder_tokens": 8},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_source_checkpoint(tmp_path_factory.mktemp("sources") / "t5")


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], list[float]]]:
    return [continued(make_source_model(), source) for source in SOURCES]


@torch.inference_mode()
def continued(model, source: list[int]) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities; each from the whole sequence, as no cache can be wrong then."""
    token_ids = [START]
    logprobs = []
    for _ in range(NUM_TOKENS):
        logits = model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([token_ids])).logits[0, -1]
        token_ids.append(int(logits.argmax()))
        logprobs.append(float(logits.log_softmax(-1)[token_ids[-1]]))
    return token_ids[1:], logprobs


def options_of(way: str) -> dict:
    return {"dtype": "float32", "device": "cpu", "num_threads": 1, "check_invariants": True, **WAYS[way]}


def check(outputs, expected) -> None:
    """Transformers itself is up to 1e-3 from what it computes in float64."""
    for output, (token_ids, logprobs) in zip(outputs, expected, strict=True):
        [found] = output.outputs
        assert found.token_ids == token_ids
        ours = [step[token].logprob for step, token in zip(found.logprobs, found.token_ids, strict=True)]
        np.testing.assert_allclose(ours, logprobs, atol=2e-3)


@pytest.mark.parametrize("way", WAYS)
def test_tokens_equal_those_of_transformers(way: str, checkpoint: Path, expected):
    with LLM(str(checkpoint), **options_of(way)) as llm:
        for _ in range(2):  # the second time from a warm prefix cache
            check(llm.generate(SOURCES, GREEDY, use_tqdm=False), expected)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "t5"])
def test_tokens_of_its_relatives(kind: str, tmp_path: Path):
    model = make_source_model(kind)
    with LLM(str(make_source_checkpoint(tmp_path / "model", kind)), **options_of("at once")) as llm:
        check(llm.generate(SOURCES, GREEDY, use_tqdm=False), [continued(model, source) for source in SOURCES])


def test_a_text_is_the_prompt_as_its_tokenizer_writes_it(checkpoint: Path):
    model = make_source_model()
    with LLM(str(checkpoint), **options_of("at once")) as llm:
        [output] = llm.generate("translate: ha", GREEDY, use_tqdm=False)
        source = llm.get_tokenizer().encode("translate: ha")
    assert output.prompt_token_ids == [*source, START]
    check([output], [continued(model, list(source))])


def test_tokens_after_preemption(checkpoint: Path, expected):
    scarce = {"block_size": 1, "max_model_len": 120, "enable_prefix_caching": False, "preemption_mode": "recompute"}
    for num_blocks in range(130, 400, 20):
        with LLM(str(checkpoint), num_gpu_blocks_override=num_blocks, **scarce, **options_of("at once")) as llm:
            check(llm.generate(SOURCES, GREEDY, use_tqdm=False), expected)
            if llm.statistics()["recomputed_tokens_total"]:
                return
    raise AssertionError("nobody had to give way")


def test_tokens_after_swapping(checkpoint: Path, expected):
    scarce = {"block_size": 2, "max_model_len": 120, "preemption_mode": "swap", "swap_space": 0.01}
    for num_blocks in range(70, 200, 10):
        with LLM(str(checkpoint), num_gpu_blocks_override=num_blocks, **scarce, **options_of("at once")) as llm:
            check(llm.generate(SOURCES, GREEDY, use_tqdm=False), expected)
            if llm.statistics()["swapped_in_blocks_total"]:
                return
    raise AssertionError("nobody had to give way")


def test_blocks_of_a_source_do_not_grow(checkpoint: Path):
    """70 tokens of the source and 41 of the text, in blocks of 4: 18 of the source, and 10 full ones of the text."""
    with LLM(str(checkpoint), block_size=4, **options_of("at once")) as llm:
        llm.generate([SOURCES[2]], GREEDY, use_tqdm=False)
        assert llm.statistics()["num_blocks_cached"] == 18 + 10


@pytest.mark.parametrize("way", ["at once", "chunks of 7 end within sources"])
def test_beams_equal_those_of_transformers(way: str, checkpoint: Path):
    with LLM(str(checkpoint), **options_of(way)) as llm:
        found = llm.generate(SOURCES, BeamSearchParams(beam_width=3, max_tokens=8), use_tqdm=False)
    model = make_source_model()
    for source, output in zip(SOURCES, found, strict=True):
        theirs = model.generate(
            torch.tensor([source]),
            num_beams=3,
            num_return_sequences=3,
            max_new_tokens=8,
            use_cache=False,  # its own has as many layers as the encoder
            return_dict_in_generate=True,
            output_scores=True,
        )
        expected = [token_ids[1:] for token_ids in theirs.sequences.tolist()]
        assert [one.token_ids for one in output.outputs] == expected
        scores = [one.cumulative_logprob / len(one.token_ids) for one in output.outputs]
        np.testing.assert_allclose(scores, theirs.sequences_scores.numpy(), atol=2e-3)


def test_several_outputs_of_a_source(checkpoint: Path):
    """The same seed draws the same, however the source is scheduled."""
    drawn = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=8, ignore_eos=True)
    found = []
    for way in ("at once", "chunks of 7 end within sources"):
        with LLM(str(checkpoint), **options_of(way)) as llm:
            outputs = llm.generate(SOURCES, drawn, use_tqdm=False)
            found.append([[tuple(one.token_ids) for one in output.outputs] for output in outputs])
    assert found[0] == found[1]
    assert all(len(set(several)) == 3 for several in found[0])


def test_what_cannot_be_asked_of_a_source(checkpoint: Path):
    with LLM(str(checkpoint), **options_of("operator by operator")) as llm:
        with pytest.raises(RequestError, match="prompt_logprobs: an encoder reads"):
            llm.generate("text", SamplingParams(prompt_logprobs=1), use_tqdm=False)
        with pytest.raises(RequestError, match="no chat template"):
            llm.chat([{"role": "user", "content": "hello"}], use_tqdm=False)
        with pytest.raises(RequestError, match="no sessions, no pinned prefixes, no prompts in pieces"):
            llm.pin_prefix("text")
        with pytest.raises(RequestError, match="its encoder makes no vectors"):
            llm.embed("text", use_tqdm=False)
        with pytest.raises(RequestError, match="empty"):
            llm.generate([[]], use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"enable_lora": True}, "enable_lora: T5ForConditionalGeneration has an encoder"),
        (
            {"speculative_config": {"method": "draft_model", "model": "embedded", "num_speculative_tokens": 2}},
            "a draft would not know what the encoder of T5ForConditionalGeneration has read",
        ),
        ({"kv_store": "host"}, "kv_store: of this model's sources"),
        ({"pipeline_parallel_size": 2}, "each looks at what its encoder made"),
        ({"context_parallel_size": 2}, "workers cannot share the keys of what an encoder made"),
        ({"dtype": "float16"}, "dtype=float16: hidden states of T5"),
    ],
)
def test_what_does_not_go_with_sources(options: dict, words: str, checkpoint: Path):
    with pytest.raises(UserError, match=words):
        LLM(str(checkpoint), **{**options_of("operator by operator"), **options})


@pytest.mark.nightly
def test_tokens_of_two_workers(checkpoint: Path, expected):
    with LLM(str(checkpoint), tensor_parallel_size=2, **options_of("chunks of 7 end within sources")) as llm:
        check(llm.generate(SOURCES, GREEDY, use_tqdm=False), expected)


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}])
def test_fewer_bits_give_the_same_tokens_in_every_way(options: dict, checkpoint: Path):
    found = []
    for way in ("at once", "chunks of 7 end within sources"):
        with LLM(str(checkpoint), **options_of(way), **options) as llm:
            outputs = llm.generate(SOURCES, GREEDY, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
