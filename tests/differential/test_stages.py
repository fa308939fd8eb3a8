"""Workers that have some layers of a model each give the tokens of one, and its bits."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.rank_runs import NUM_TOKENS, make_draft, prompts, ways
from tests.support.sampled import sampled
from transformers import AutoModelForCausalLM

from quire import LLM, LoRARequest, RequestError, SamplingParams
from quire.engine_core.scheduler.speculation import SpeculationCosts
from quire.errors import ModelError
from quire.failpoints import arm
from quire.messages import DecodingSpec, EngineRequest, split_sequence_id
from quire.testing.greedy import assert_same_tokens, generate_greedy, real_core, reference_generate
from quire.testing.tiny_adapters import TARGETS as USUAL_TARGETS
from quire.testing.tiny_adapters import make_adapter, merged_checkpoint
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


def check(path, family, **options):
    """Of a checkpoint of that family; what the scheduler has counted."""
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
        counts = core.scheduler.statistics()
    finally:
        core.shutdown()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for ours, prompt in zip(generated, prompts(), strict=True):
        assert_same_tokens(ours, reference_generate(model, prompt, NUM_TOKENS), f"{family}, {options}")
    # the pipeline is filled
    assert max(num_under_way) >= 2
    return counts


@pytest.mark.parametrize(("way", "family"), SAMPLE.items(), ids=str)
def test_tokens_are_those_of_transformers(tmp_path, family, way):
    check(make_checkpoint(tmp_path, family), family, **WAYS[way])


def test_layers_that_are_shared_and_divided_at_once(tmp_path):
    check(make_checkpoint(tmp_path, "llama"), "llama", tensor_parallel_size=2)


# what drafts, for which target; each in one way
DRAFTS = {"twin": ("llama", "swapped"), "eagle3": ("llama", "ahead")}
BY_NIGHT = {"eagle": ("llama", "chunks"), "small": ("gpt_oss", "preempted"), "windowed": ("qwen2_window", "chunks")}


@pytest.mark.parametrize("num_tensor", [1, pytest.param(2, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("kind", "family", "way"),
    [
        *((kind, *rest) for kind, rest in DRAFTS.items()),
        *(pytest.param(kind, *rest, marks=pytest.mark.nightly) for kind, rest in BY_NIGHT.items()),
    ],
)
def test_the_last_stage_drafts_for_all(tmp_path, monkeypatch, kind, family, way, num_tensor):
    # a step costs a second, a draft nothing: every row gets as many as it may have
    monkeypatch.setattr("quire.engine_core.launch.SpeculationCosts", lambda **_: SpeculationCosts())
    target = make_checkpoint(tmp_path / "target", family)
    options = {**WAYS[way], "speculative_config": make_draft(tmp_path / "draft", kind, target)}
    if "num_gpu_blocks_override" in options:
        options["num_gpu_blocks_override"] = 80
    counts = check(target, family, tensor_parallel_size=num_tensor, **options)
    assert counts["num_draft_tokens_total"] > 50
    # a twin of the model is right nearly always: what it drafts is what the first stage computes
    assert counts["num_accepted_draft_tokens_total"] > 0.8 * counts["num_draft_tokens_total"] or kind != "twin"


def change_adapter(folder, change):
    """`change`: of the tensors by name, in place."""
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file)


# its experts take none
TARGETS = {"qwen3_next": ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj")}


def drop_first_layer(weights):
    for name in [name for name in weights if ".layers.0." in name]:
        del weights[name]


def break_last_layer(weights):
    next(weight for name, weight in weights.items() if ".layers.1." in name)[0, 0] = float("nan")


@pytest.mark.parametrize(
    ("family", "is_of_last_stage", "options"),
    [
        ("llama", False, {"max_loras": 1, "async_scheduling": True}),
        ("llama", True, {}),
        pytest.param("qwen3_next", False, {}, marks=pytest.mark.nightly),
        pytest.param("qwen3", False, {"tensor_parallel_size": 2}, marks=pytest.mark.nightly),
        pytest.param("llama", False, WAYS["drafts"], marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_each_stage_has_its_layers_of_an_adapter(tmp_path, family, is_of_last_stage, options):
    base = make_checkpoint(tmp_path / "base", family)
    adapter = make_adapter(tmp_path / "adapter", base, seed=3, targets=TARGETS.get(family, USUAL_TARGETS))
    if is_of_last_stage:
        change_adapter(adapter, drop_first_layer)
    merged = merged_checkpoint(tmp_path / "merged", base, adapter)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    asked = [(prompt, request) for prompt in prompts() for request in (LoRARequest("a", 1, str(adapter)), None)]
    with LLM(model=str(base), dtype="float32", enable_lora=True, **OPTIONS, **options) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in asked], sampling, lora_request=[one for _, one in asked]
        )
    models = {
        name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for name, path in {"adapter": merged, "base": base}.items()
    }
    for output, (prompt, request) in zip(outputs, asked, strict=True):
        model = models["base" if request is None else "adapter"]
        assert_same_tokens(output.outputs[0].token_ids, reference_generate(model, prompt, NUM_TOKENS), family)


def test_an_adapter_that_is_broken_for_one_stage_is_refused_by_all(tmp_path):
    base = make_checkpoint(tmp_path / "base", "llama")
    adapter = make_adapter(tmp_path / "adapter", base, seed=3)
    change_adapter(adapter, break_last_layer)
    llm = LLM(model=str(base), dtype="float32", enable_lora=True, **OPTIONS)
    with llm, pytest.raises(RequestError, match="not finite"):
        llm.load_adapter("a", str(adapter))


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", [*SAMPLE.values(), *OTHERS])
def test_tokens_of_every_family_in_every_way(tmp_path, family, way):
    check(make_checkpoint(tmp_path, family), family, **WAYS[way])


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v2", "qwen3_next"])
@pytest.mark.parametrize("way", WAYS)
def test_two_by_two_in_every_way(tmp_path, family, way):
    check(make_checkpoint(tmp_path, family), family, tensor_parallel_size=2, **WAYS[way])


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
