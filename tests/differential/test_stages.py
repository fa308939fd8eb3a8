"""Workers that have some layers of a model each give the tokens of one, and its bits."""

import pytest
import torch
from tests.support.rank_runs import NUM_TOKENS, prompts, ways
from tests.support.sampled import sampled
from transformers import AutoModelForCausalLM

from quire.errors import ModelError
from quire.failpoints import arm
from quire.messages import DecodingSpec, EngineRequest, split_sequence_id
from quire.sampling_params import SamplingParams
from quire.testing.greedy import assert_same_tokens, generate_greedy, real_core, reference_generate
from quire.testing.tiny_checkpoints import make_checkpoint

# in the default run, a way each; the others by night
SAMPLE = {
    "chunks": "llama",
    "preempted": "qwen3_moe",
    "swapped": "qwen3_next",
    "ahead": "deepseek_v2",
    "drafts": "gpt2",
}
OTHERS = [
    "llama_rope_llama3", "mistral", "qwen2", "qwen3", "opt", "mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3_groups",
    "llama4", "lfm2", "qwen3_5_text", "mamba2", "granitemoehybrid", "gemma3", "gemma4_moe",
]  # fmt: skip
WAYS = ways(40)
# those with several block tables need more for one request
MORE_BLOCKS = {
    "qwen2_moe": 80, "gpt_oss": 80, "llama4": 80, "granitemoehybrid": 80, "gemma3": 80, "qwen3_next": 80,
    "gemma4_moe": 80,
}  # fmt: skip
OPTIONS = {"pipeline_parallel_size": 2, "kv_cache_memory_bytes": 16 << 20}


def check(tmp_path, family, **options):
    path = make_checkpoint(tmp_path, family)
    if "num_gpu_blocks_override" in options:
        options["num_gpu_blocks_override"] = MORE_BLOCKS.get(family, options["num_gpu_blocks_override"])
    core = real_core(path, **{**OPTIONS, **options})
    num_under_way = []

    def look(decision, work):
        under_way = [row for step in core.scheduler._in_flight for row in step.rows.tolist()]
        assert len(set(under_way)) == len(under_way), "a row is in two steps at once"
        num_under_way.append(len(core.scheduler._in_flight))

    core.watch_steps(look)
    try:
        generated = generate_greedy(core, prompts(), NUM_TOKENS)
    finally:
        core.shutdown()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for ours, prompt in zip(generated, prompts(), strict=True):
        assert_same_tokens(ours, reference_generate(model, prompt, NUM_TOKENS), f"{family}, {options}")
    # the pipeline is filled
    assert max(num_under_way) >= 2


@pytest.mark.parametrize(("way", "family"), SAMPLE.items(), ids=str)
def test_tokens_are_those_of_transformers(tmp_path, family, way):
    check(tmp_path, family, **WAYS[way])


def test_layers_that_are_shared_and_divided_at_once(tmp_path):
    check(tmp_path, "llama", tensor_parallel_size=2)


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", [*SAMPLE.values(), *OTHERS])
def test_tokens_of_every_family_in_every_way(tmp_path, family, way):
    check(tmp_path, family, **WAYS[way])


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v2", "qwen3_next"])
@pytest.mark.parametrize("way", WAYS)
def test_two_by_two_in_every_way(tmp_path, family, way):
    check(tmp_path, family, tensor_parallel_size=2, **WAYS[way])


def answers(path, requests, **options):
    """What each sequence is told: tokens, their log-probabilities to the bit, and how it ends."""
    core = real_core(path, kv_cache_memory_bytes=16 << 20, **options)
    found = {}
    try:
        for request in requests:
            core.add(request)
        while core.has_work:
            outputs = core.step()
            for number, token in zip(outputs.sequence_ids.tolist(), outputs.token_ids.tolist(), strict=True):
                found.setdefault(number, []).append(token)
            for one in (*outputs.logprobs, *outputs.prompt_logprobs):
                found.setdefault(one.sequence_id, []).extend(tuple(position.logprobs) for position in one.positions)
            for end in outputs.ends:
                found.setdefault(end.sequence_id, []).append((end.finish_reason, end.error))
    finally:
        core.shutdown()
    # tokens and log-probabilities come in the same order; how they are mixed says how prompts were cut
    return {number: sorted(map(repr, of_sequence)) for number, of_sequence in found.items()}


def requests():
    plain = {"max_tokens": 10, "ignore_eos": True}
    made = [
        SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2, **plain),
        SamplingParams(temperature=0.9, top_p=0.8, n=3, repetition_penalty=1.2, presence_penalty=0.3, **plain),
        SamplingParams(temperature=0.0, n=2, **plain),
        SamplingParams(temperature=1.0, logit_bias={5: 3.0}, min_tokens=3, **plain),
    ]
    beams = DecodingSpec(method="beam_search", args={"width": 3})
    return [
        EngineRequest(
            request_id=number, prompt_token_ids=prompt, sampling=sampling, seed=7 + number,
            decoding=beams if number == 2 else None,
        )
        for number, (prompt, sampling) in enumerate(zip(prompts(), made, strict=True))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "options"), [("llama", {"dtype": "bfloat16"}), ("mamba2", {}), ("qwen3_moe", {})], ids=str
)
def test_whatever_is_asked_for_comes_out_to_the_bit(tmp_path, family, options):
    path = make_checkpoint(tmp_path, family)
    alone = answers(path, requests(), **options)
    assert {split_sequence_id(number)[0] for number in alone} == {0, 1, 2, 3}
    assert all(repr(("length", None)) in of_sequence for of_sequence in alone.values()), "something was refused"
    assert answers(path, requests(), pipeline_parallel_size=2, **options) == alone


def test_a_session_goes_on_where_it_was(tmp_path):
    path = make_checkpoint(tmp_path, "qwen3")

    def turns(**options):
        core = real_core(path, kv_cache_memory_bytes=16 << 20, block_size=4, **options)
        sampling = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
        told = []
        try:
            for turn, prompt in enumerate(prompts()[1:]):
                before = {"continues": f"turn {turn - 1}"} if turn else {}
                core.add(
                    EngineRequest(
                        request_id=turn, prompt_token_ids=prompt, sampling=sampling, keep=f"turn {turn}", **before
                    )
                )
                core.add(EngineRequest(request_id=100 + turn, prompt_token_ids=prompt, sampling=sampling))
                while core.has_work:
                    outputs = core.step()
                    told += zip(outputs.sequence_ids.tolist(), outputs.token_ids.tolist(), strict=True)
        finally:
            core.shutdown()
        return sorted(told, key=lambda pair: pair[0])

    assert turns(pipeline_parallel_size=2) == turns()


POISON = 251


# what fails on the first stage and on the last one
PLACES = {
    "on both stages": ("in_forward", "in_forward"),
    "on the last one": ("", "in_forward"),
    "in its sampler": ("", "nan_row"),
    "on the first one": ("in_forward", ""),
}


@pytest.mark.parametrize(("place", "way"), sampled(PLACES, ["chunks", "drafts"], n=4))
def test_a_row_that_fails_on_one_stage_fails_alone(tmp_path, monkeypatch, way, place):
    here, there = PLACES[place]
    path = make_checkpoint(tmp_path, "qwen3")
    options = {**WAYS[way], "kv_cache_memory_bytes": 16 << 20}
    stem = prompts()[2]
    asked = [[*stem, number] for number in (1, 2, POISON, 3, 4)]
    assert POISON not in stem

    def run(asked, **more):
        core = real_core(path, **options, **more)
        told = {}
        sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

        def step():
            outputs = core.step()
            for one, token in zip(outputs.sequence_ids.tolist(), outputs.token_ids.tolist(), strict=True):
                told.setdefault(split_sequence_id(one)[0], []).append(token)
            for end in outputs.ends:
                told.setdefault(split_sequence_id(end.sequence_id)[0], []).append(end.finish_reason)

        try:
            # the second time each of them finds what is there of the others, and what is not must not be found
            for round_number in range(2):
                for number, prompt in enumerate(asked):
                    core.add(
                        EngineRequest(
                            request_id=10 * round_number + prompt[-1], prompt_token_ids=prompt, sampling=sampling
                        )
                    )
                    if number % 2:
                        step()
                while core.has_work:
                    step()
        finally:
            core.shutdown()
        return told

    expected = run([prompt for prompt in asked if prompt[-1] != POISON])
    # read once when a process begins, so this reaches the other stage alone
    monkeypatch.setenv("QUIRE_FAIL", f"{there}:raise:1:0:when={POISON}" if there else "")
    try:
        arm(f"{here}:raise:1:0:when={POISON}" if here else "")
        found = run(asked, pipeline_parallel_size=2)
    finally:
        arm("")
    failed = {number for number, told in found.items() if told[-1] == "error"}
    assert failed == {POISON, 10 + POISON}
    assert {number: told for number, told in found.items() if number not in failed} == expected


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "each takes an input of its own"),
        ({"hidden_size_per_layer_input": 0}, "some read keys and values that others have made"),
    ],
    ids=["own inputs", "shared keys"],
)
def test_layers_that_cannot_be_divided_are_refused_by_name(tmp_path, changes, why):
    path = make_checkpoint(tmp_path, "gemma4", **changes)
    with pytest.raises(ModelError, match=f"pipeline_parallel_size=2: the layers of Gemma4ForCausalLM.*{why}"):
        real_core(path, **OPTIONS)
