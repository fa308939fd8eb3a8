"""Tokens with an adapter are those of the merged model, whoever else is in the batch and however it is scheduled."""

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire import LLM, BeamSearchParams, LoRARequest, RequestError, SamplingParams
from quire.testing.greedy import assert_same_tokens, reference_generate
from quire.testing.tiny_adapters import make_adapter, merged_checkpoint
from quire.testing.tiny_checkpoints import make_checkpoint

NUM_TOKENS = 16
NUM_ADAPTERS = 8
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], list(range(40, 75)), [200, 3, 77]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
# what differs between adapters: everything that PEFT's configuration may say of a plain one
KINDS = [
    {},
    {"rank": 4, "alpha": 16.0},
    {"use_rslora": True},
    {"targets": ("q_proj", "v_proj")},
    {"rank_pattern": {"k_proj": 3, "down_proj": 16}, "alpha_pattern": {"k_proj": 2}},
    {"rank": 1, "targets": ("down_proj",), "alpha": 1.0},
    {"rank": 16, "target_modules": "all-linear"},
    {"targets": ("gate_proj",), "target_modules": r".*\.gate_proj"},
]
WAYS = {
    "plain": {},
    "operator by operator": {"enforce_eager": True},
    "ahead": {"async_scheduling": True},
    "chunks": {"max_num_batched_tokens": 24, "block_size": 4},
    "one slot": {"max_loras": 1},
    "one in memory": {"max_loras": 1, "max_cpu_loras": 1},
    "three in memory, ahead": {"max_loras": 2, "max_cpu_loras": 3, "async_scheduling": True},
    "two slots ahead": {"max_loras": 2, "async_scheduling": True, "max_num_batched_tokens": 24},
    "preempted": {"num_gpu_blocks_override": 40, "block_size": 4, "preemption_mode": "recompute", "max_loras": 3},
    "swapped": {"num_gpu_blocks_override": 40, "block_size": 4, "preemption_mode": "swap", "max_loras": 3},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "reference kernels": {"attention_backend": "reference"},
}


def greedy(checkpoint, prompts=PROMPTS):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return [reference_generate(model, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A checkpoint, its adapters as requests, and what each merged model says after each prompt (None: the base)."""
    folder = tmp_path_factory.mktemp("adapters")
    base = make_checkpoint(folder / "base", "llama")
    references = {None: greedy(base)}
    requests = []
    for number, kind in enumerate(KINDS):
        adapter = make_adapter(folder / f"adapter{number}", base, seed=number, **kind)
        references[number] = greedy(merged_checkpoint(folder / f"merged{number}", base, adapter))
        requests.append(LoRARequest(f"adapter{number}", number + 1, str(adapter)))
    return base, requests, references


def engine(path, **options):
    values = {"dtype": "float32", "device": "cpu", "num_threads": 1, "check_invariants": True, "enable_lora": True}
    values |= {"max_model_len": 128, "packed_weights_cache": 0}
    return LLM(str(path), **{**values, **options})


def run(llm, asked, prompts=PROMPTS, params=GREEDY):
    """Tokens of each (prompt, adapter), all of them in one batch."""
    inputs = [{"prompt_token_ids": prompts[prompt]} for prompt, _ in asked]
    outputs = llm.generate(inputs, params, lora_request=[request for _, request in asked], use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_merged_models(house, way):
    """Eight adapters and the base in one batch, twice: the second time the prefix cache is warm."""
    base, requests, references = house
    numbers = [None, *range(NUM_ADAPTERS)]
    asked = [(prompt, number) for prompt in range(len(PROMPTS)) for number in numbers]
    with engine(base, **WAYS[way]) as llm:
        for _ in range(2):
            found = run(llm, [(prompt, None if number is None else requests[number]) for prompt, number in asked])
            for tokens, (prompt, number) in zip(found, asked, strict=True):
                assert_same_tokens(tokens, references[number][prompt], f"adapter {number}, prompt {prompt}")
    different = {tuple(references[number][1].token_ids) for number in numbers}
    assert len(different) == len(numbers), "the adapters change nothing"


@pytest.mark.parametrize("name", ["qwen3", "mistral", "opt", "gpt2", "llama_bias", "qwen2", "gemma4"])
def test_other_models(tmp_path, name):
    base = make_checkpoint(tmp_path / "base", name)
    config = {}
    if name == "gpt2":
        config = {"targets": ("c_attn", "c_proj", "c_fc"), "fan_in_fan_out": True}
    elif name == "opt":
        config = {"targets": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")}
    adapter = make_adapter(tmp_path / "adapter", base, seed=3, **config)
    expected = greedy(merged_checkpoint(tmp_path / "merged", base, adapter))
    with engine(base) as llm:
        request = LoRARequest("a", 1, str(adapter))
        found = run(llm, [(0, request), (1, None), (1, request), (2, request)])
    for tokens, reference in zip([found[0], *found[2:]], expected, strict=True):
        assert_same_tokens(tokens, reference, name)


def with_ranks(base, adapter, num_ranks):
    """Tokens of the first prompt with an adapter, of the second without, of the second and third with it. It has two
    names, of which one is in memory at a time."""
    one, other = (LoRARequest(name, 1, str(adapter)) for name in "ab")
    memory = {"kv_cache_memory_bytes": 16 << 20, "max_loras": 1, "max_cpu_loras": 1}
    with engine(base, tensor_parallel_size=num_ranks, **memory) as llm:
        return run(llm, [(0, one), (1, None), (1, other), (2, one)])


# with the layers whose outputs, and whose inputs, are shared out; more workers than heads of keys
SHARED = [
    pytest.param("llama", {}, 2, marks=pytest.mark.nightly),
    ("qwen3", {"rank": 5, "target_modules": "all-linear"}, 2),
    ("mistral", {}, 4),
]


@pytest.mark.parametrize(("name", "kind", "num_ranks"), SHARED, ids=str)
def test_workers_that_share_a_model_share_its_adapters(tmp_path, name, kind, num_ranks):
    base = make_checkpoint(tmp_path / "base", name)
    adapter = make_adapter(tmp_path / "adapter", base, seed=3, **kind)
    expected = greedy(merged_checkpoint(tmp_path / "merged", base, adapter))
    found = with_ranks(base, adapter, num_ranks)
    for tokens, reference in zip([found[0], *found[2:]], expected, strict=True):
        assert_same_tokens(tokens, reference, name)
    assert_same_tokens(found[1], greedy(base)[1], "the base")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("gpt2", ("c_attn", "c_proj", "c_fc")), ("opt", ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")),
        ("gemma4", None), ("deepseek_v3", ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")),
        ("qwen3_next", ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj")),
    ],
    ids=str,
)  # fmt: skip
def test_adapters_of_every_kind_of_layer_with_two_workers(tmp_path, name, targets):
    base = make_checkpoint(tmp_path / "base", name)
    config = {} if targets is None else {"targets": targets}
    if name == "gpt2":
        config["fan_in_fan_out"] = True
    adapter = make_adapter(tmp_path / "adapter", base, seed=3, **config)
    expected = greedy(merged_checkpoint(tmp_path / "merged", base, adapter))
    found = with_ranks(base, adapter, 2)
    for tokens, reference in zip([found[0], *found[2:]], expected, strict=True):
        assert_same_tokens(tokens, reference, name)


LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
RECURRENT = ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize(("name", "targets"), [("deepseek_v3", LATENT), ("qwen3_next", RECURRENT)])
def test_layers_of_latent_attention_and_recurrence(tmp_path, name, targets):
    base = make_checkpoint(tmp_path / "base", name)
    adapter = make_adapter(tmp_path / "adapter", base, seed=3, targets=targets)
    expected = greedy(merged_checkpoint(tmp_path / "merged", base, adapter))
    with engine(base) as llm:
        request = LoRARequest("a", 1, str(adapter))
        found = run(llm, [(0, request), (1, None), (1, request), (2, request)])
    for tokens, reference in zip([found[0], *found[2:]], expected, strict=True):
        assert_same_tokens(tokens, reference, name)


@pytest.mark.parametrize("target", ["kv_b_proj", "gate"])
def test_what_takes_no_adapters_is_refused_by_name(tmp_path, target):
    base = make_checkpoint(tmp_path / "base", "deepseek_v3")
    adapter = make_adapter(tmp_path / "adapter", base, seed=3, targets=(target,))
    with engine(base) as llm, pytest.raises(RequestError, match=rf"{target}: no linear layer .* takes adapters"):
        llm.load_adapter("a", str(adapter))


def test_beams_vectors_and_turns_of_a_session(house, tmp_path):
    base, requests, references = house
    merged = merged_checkpoint(tmp_path / "merged", base, Path(requests[1].lora_path))
    prompt = {"prompt_token_ids": PROMPTS[1]}
    beams = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    with engine(merged, enable_lora=False) as llm:
        (expected_beams,) = llm.beam_search(prompt, beams, use_tqdm=False)
        (expected,) = llm.embed(prompt, use_tqdm=False)
    with engine(base, block_size=4) as llm:
        (found_beams,) = llm.beam_search(prompt, beams, use_tqdm=False, lora_request=requests[1])
        assert [one.tokens for one in found_beams.sequences] == [one.tokens for one in expected_beams.sequences]
        of_base, found = llm.embed([prompt, prompt], use_tqdm=False, lora_request=[None, requests[1]])
        torch.testing.assert_close(*map(torch.tensor, (found.outputs.embedding, expected.outputs.embedding)))
        assert of_base.outputs.embedding != found.outputs.embedding
        with llm.open_session(cache_salt="nobody else") as session:
            session.generate({"prompt_token_ids": PROMPTS[1][:20]}, FIRST, lora_request=requests[2])
            session.rewind(20)
            # the past is computed again where the adapter is another one, and not where it is the same
            for number, is_kept in ((2, True), (1, False), (None, False)):
                request = None if number is None else requests[number]
                turn = session.generate({"prompt_token_ids": PROMPTS[1][20:]}, GREEDY, lora_request=request)
                assert_same_tokens(turn.outputs[0].token_ids, references[number][1], f"a turn with adapter {number}")
                assert (turn.num_cached_tokens > 0) == is_kept
                session.rewind(20)


@pytest.mark.parametrize("form", [None, "int8", "int4", "int8_weight_only", "int4_weight_only"])
def test_base_rows_keep_their_bits(house, form):
    """In bfloat16, where a bit is easily seen, and with packed weights of every form: log-probabilities are equal."""
    base, requests, _ = house
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=5)

    def scores(llm, asked):
        inputs = [{"prompt_token_ids": PROMPTS[prompt]} for prompt, _ in asked]
        outputs = llm.generate(inputs, params, lora_request=[request for _, request in asked], use_tqdm=False)
        return [
            [{token: entry.logprob for token, entry in place.items()} for place in output.outputs[0].logprobs]
            for output in outputs
        ]

    options = {"dtype": "bfloat16", "quantization": form, "enable_prefix_caching": False}
    with engine(base, enable_lora=False, **options) as llm:
        without = scores(llm, [(prompt, None) for prompt in range(3)])
    with engine(base, **options) as llm:
        alone = scores(llm, [(1, requests[0])])
        mixed = scores(llm, [(0, None), (1, requests[0]), (1, None), (0, requests[4]), (2, None), (1, requests[1])])
    assert [mixed[0], mixed[2], mixed[4]] == without
    assert mixed[1] == alone[0], "others change the bits of a row with an adapter"
    assert mixed[1] != mixed[2]


def test_beams_and_samples(house):
    base, requests, references = house
    params = SamplingParams(n=3, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with engine(base, max_loras=2) as llm:
        (output,) = llm.generate({"prompt_token_ids": PROMPTS[1]}, params, lora_request=requests[2], use_tqdm=False)
    for one in output.outputs:
        assert_same_tokens(one.token_ids, references[2][1], "a sample")


def test_another_version_finds_no_old_blocks(house):
    base, requests, references = house
    with engine(base) as llm:
        llm.load_adapter("sql", requests[0].lora_path)
        first = dataclasses.replace(requests[0], lora_name="sql")
        assert_same_tokens(run(llm, [(1, first)])[0], references[0][1], "first version")
        llm.load_adapter("sql", requests[2].lora_path, in_place=True)
        second = dataclasses.replace(requests[2], lora_name="sql")
        (output,) = llm.generate({"prompt_token_ids": PROMPTS[1]}, GREEDY, lora_request=second, use_tqdm=False)
        assert output.num_cached_tokens == 0
        assert_same_tokens(output.outputs[0].token_ids, references[2][1], "second version")
        with pytest.raises(RequestError, match="was loaded from"):
            run(llm, [(1, first)])


def test_a_rollback_gives_the_old_bits_back_and_others_keep_their_blocks(house):
    base, requests, _ = house
    greedy = GREEDY.replace(logprobs=2)
    with engine(base, block_size=4) as llm:

        def answer(request):
            (output,) = llm.generate({"prompt_token_ids": PROMPTS[1]}, greedy, lora_request=request, use_tqdm=False)
            return output.num_cached_tokens, output.outputs[0].token_ids, output.outputs[0].logprobs

        def version(number):
            llm.load_adapter("sql", requests[number].lora_path, in_place=True)
            return answer(dataclasses.replace(requests[number], lora_name="sql"))

        of_model, of_other = answer(None), answer(requests[1])
        first = version(0)
        second = version(2)
        again = version(0)
        # computed, or found among the blocks of the same version: the same bits
        assert again[1:] == first[1:] != second[1:]
        assert (first[0], second[0]) == (0, 0)
        for request, before in ((None, of_model), (requests[1], of_other)):
            num_cached, *after = answer(request)
            assert num_cached > 0
            assert tuple(after) == before[1:]


def test_the_prefix_cache_is_used_within_an_adapter_and_not_between(house):
    base, requests, _ = house
    with engine(base, block_size=4) as llm:

        def cached(request):
            (output,) = llm.generate({"prompt_token_ids": PROMPTS[1]}, GREEDY, lora_request=request, use_tqdm=False)
            return output.num_cached_tokens

        assert cached(None) == 0
        assert cached(requests[0]) == 0
        assert cached(requests[1]) == 0
        assert cached(requests[0]) > 0
        assert cached(None) > 0
