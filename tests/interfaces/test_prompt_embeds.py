"""Prompts of vectors: those of a table of tokens give what the tokens give, to the bit, on every way through the
engine."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quire import LLM, BeamSearchParams, SamplingParams
from quire.errors import ModelError, OptionError, RequestError
from quire.testing.tiny_checkpoints import make_checkpoint

TOKENS = [[(7 * index + start) % 200 + 20 for index in range(length)] for start, length in ((1, 50), (3, 9), (1, 33))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
SMALL = {"max_num_seqs": 6, "check_invariants": True, "max_model_len": 128}


def embedded_table() -> torch.Tensor:
    from quire.config import EMBEDDED, EngineOptions, resolve

    config, _ = resolve(EngineOptions(model=EMBEDDED))
    model = AutoModelForCausalLM.from_pretrained(config.facts.path, dtype=torch.bfloat16)
    return model.get_input_embeddings().weight.detach()


TABLE = embedded_table()


def vectors(ids: list[int]) -> dict[str, torch.Tensor]:
    return {"prompt_embeds": TABLE[ids]}


def shown(outputs):
    """Everything that was sampled, with the bits of its log-probabilities."""
    return [[(one.token_ids, one.text, one.logprobs, one.cumulative_logprob) for one in out.outputs] for out in outputs]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16}, {"async_scheduling": True}])
def test_as_with_tokens(dtype, options):
    with LLM(**SMALL, **options, dtype=dtype, enable_prompt_embeds=True) as llm:
        by_tokens = llm.generate([{"prompt_token_ids": ids} for ids in TOKENS], GREEDY, use_tqdm=False)
        by_vectors = llm.generate([vectors(ids) for ids in TOKENS], GREEDY, use_tqdm=False)
        mixed = llm.generate(
            [vectors(TOKENS[0]), {"prompt_token_ids": TOKENS[1]}, vectors(TOKENS[2])], GREEDY, use_tqdm=False
        )
        assert shown(by_tokens) == shown(by_vectors) == shown(mixed)
        assert [len(one.prompt_token_ids) for one in by_vectors] == [50, 9, 33]
        as_array = {"prompt_embeds": TABLE[TOKENS[0]].float().numpy()[None]}
        assert shown(llm.generate(as_array, GREEDY, use_tqdm=False)) == shown(by_tokens[:1])
        assert llm.statistics()["num_blocks_held"] == 0


def test_samples_beams_and_speculation():
    sampled = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=10, ignore_eos=True, logprobs=0)
    beams = BeamSearchParams(beam_width=3, max_tokens=6)
    draft = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM(**SMALL, enable_prompt_embeds=True, speculative_config=draft) as llm:
        ids = TOKENS[0]
        for params in (sampled, beams, GREEDY):
            by_tokens = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
            assert shown(by_tokens) == shown(llm.generate(vectors(ids), params, use_tqdm=False))


def test_preempted_and_computed_again():
    """There is room for two of the four at their ends."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=0)
    prompts = [[start, *TOKENS[0]] for start in range(30, 34)]
    options = {**SMALL, "enable_prompt_embeds": True, "enable_prefix_caching": False}
    with LLM(**options, num_gpu_blocks_override=18) as llm:
        tight = llm.generate([vectors(ids) for ids in prompts], params, use_tqdm=False)
        assert llm.statistics()["num_preemptions_total"] > 0
    with LLM(**options) as llm:
        assert shown(tight) == shown(llm.generate([{"prompt_token_ids": ids} for ids in prompts], params))


def test_cached_by_content():
    with LLM(**SMALL, enable_prompt_embeds=True) as llm:

        def cached(prompt) -> int:
            return llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens

        ids = TOKENS[0]
        other = TABLE[ids].clone()
        other[-1] += 1
        zeros = {"prompt_token_ids": [0] * len(ids)}
        assert [cached(vectors(ids)), cached(vectors(ids))] == [0, 48]
        assert [cached({"prompt_embeds": other}), cached(zeros), cached({"prompt_token_ids": ids})] == [0, 0, 0]
        assert cached({**vectors(ids), "cache_salt": "mine"}) == 0


@pytest.mark.parametrize("name", ["gemma3", "opt", "gemma", "mamba2"])
def test_other_models(tmp_path, name):
    """Vectors are those that Transformers calls inputs_embeds, also where a model scales them; one of the models runs
    through Transformers, one has no attention."""
    checkpoint = make_checkpoint(tmp_path / name, name)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = [5, 9, 3, 7, 11, 2]
    with torch.no_grad():
        given = model.get_input_embeddings()(torch.tensor(ids))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    with LLM(model=str(checkpoint), dtype="float32", max_model_len=64, enable_prompt_embeds=True) as llm:
        by_tokens = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        assert shown(by_tokens) == shown(llm.generate({"prompt_embeds": given}, params, use_tqdm=False))


WIDTH = TABLE.shape[1]
OK = torch.zeros(4, WIDTH)


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ({"prompt_embeds": OK[:, 1:]}, {}, "must be [tokens,"),
        ({"prompt_embeds": OK[:0]}, {}, "must be [tokens,"),
        ({"prompt_embeds": OK[0]}, {}, "must be [tokens,"),
        ({"prompt_embeds": torch.zeros(2, 4, WIDTH)}, {}, "must be [tokens,"),
        ({"prompt_embeds": torch.zeros(200, WIDTH)}, {}, "has 200 tokens, this model takes 128"),
        ({"prompt_embeds": torch.zeros(128, WIDTH)}, {}, "no room for an output"),
        ({"prompt_embeds": OK.to_sparse()}, {}, "must be dense"),
        ({"prompt_embeds": OK / 0}, {}, "not finite"),
        ({"prompt_embeds": OK + torch.inf}, {}, "not finite"),
        ({"prompt_embeds": np.zeros((4, WIDTH), dtype=np.int64)}, {}, "floating-point"),
        ({"prompt_embeds": torch.zeros(4, WIDTH, dtype=torch.int64)}, {}, "floating-point numbers, not torch.int64"),
        ({"prompt_embeds": [[0.0] * WIDTH]}, {}, "floating-point"),
        ({"prompt_embeds": "AAAA"}, {}, "nothing that torch.save writes"),
        ({"prompt_embeds": "?"}, {}, "base64"),
        ({"prompt_embeds": OK, "prompt": "a"}, {}, "both prompt and prompt_embeds"),
        ({"prompt_embeds": OK, "multi_modal_data": {"image": b""}}, {}, "multi_modal_data"),
        ({"prompt_embeds": OK}, {"prompt_logprobs": 1}, "prompt_logprobs: not compatible"),
        ({"prompt_embeds": OK}, {"repetition_penalty": 1.1}, "repetition_penalty=1.1: not compatible"),
    ],
)
def test_refused(llm, prompt, params, words):
    with pytest.raises(RequestError) as error:
        llm.generate(prompt, SamplingParams(**{"max_tokens": 2, **params}), use_tqdm=False)
    assert words in str(error.value)


@pytest.fixture(scope="module")
def llm():
    with LLM(**SMALL, enable_prompt_embeds=True) as llm:
        yield llm


def test_a_model_that_looks_tokens_up_elsewhere(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "gemma4", "gemma4")
    with pytest.raises(ModelError, match="enable_prompt_embeds: Gemma4ForCausalLM reads tokens themselves"):
        LLM(model=str(checkpoint), dtype="float32", max_model_len=64, enable_prompt_embeds=True)


def test_not_where_tokens_are_needed(llm):
    for call in (lambda: llm.embed({"prompt_embeds": OK}), lambda: llm.pin_prefix({"prompt_embeds": OK}, "a")):
        with pytest.raises(RequestError, match="prompt_embeds: "):
            call()


def test_only_with_the_option(tmp_path):
    with LLM(**SMALL) as llm, pytest.raises(RequestError, match="Start the engine with enable_prompt_embeds"):
        llm.generate({"prompt_embeds": OK})
    with pytest.raises(OptionError, match="enable_prompt_embeds"):
        LLM(**SMALL, enable_prompt_embeds="perhaps")
