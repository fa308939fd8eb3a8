"""`import quire.vllm as vllm`: programs written for vLLM, on the embedded model."""

import argparse
import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.pages import coming_from

import quire.interfaces.llm as our
import quire.vllm as vllm
from quire.interfaces.compat.vllm_engine import _forms_of, _Profile
from quire.interfaces.tokenizer import OwnTokenizer
from quire.sampling_params import SamplingParams

OPTIONS = {"max_model_len": 256, "num_threads": 1, "kv_cache_memory_bytes": 2**24, "packed_weights_cache": 0}


@pytest.fixture(scope="module")
def llm():
    with vllm.LLM("embedded", dtype="float", enable_chunked_prefill=True, disable_log_stats=True, **OPTIONS) as engine:
        yield engine


def test_every_name_is_there():
    for name in vllm.__all__:
        assert getattr(vllm, name) is not None


def test_positions_and_keywords_are_vllms(llm):
    params = vllm.SamplingParams(temperature=0, max_tokens=4, output_kind=vllm.RequestOutputKind.FINAL_ONLY)
    (first,) = llm.generate("Once upon", params, False)
    (same,) = llm.generate({"prompt": "Once upon"}, params, use_tqdm=False, priority=None, lora_request=None)
    assert first.outputs[0].token_ids == same.outputs[0].token_ids
    (cut,) = llm.generate("One two three", params, False, tokenization_kwargs={"truncate_prompt_tokens": 2})
    assert cut.prompt_token_ids == llm.renderer.encode("One two three")[-2:]
    with pytest.raises(vllm.VLLMValidationError, match="padding: only add_special_tokens"):
        llm.generate("One", params, False, tokenization_kwargs={"padding": True})
    for length in (0, -2, True, "all"):
        with pytest.raises(vllm.VLLMValidationError, match="truncate_prompt_tokens"):
            llm.generate("One", params, False, tokenization_kwargs={"truncate_prompt_tokens": length})


def test_what_a_prompt_brings_along_stays_with_its_tokens(llm):
    given = {"prompt": "One two", "cache_salt": "a tenant's"}
    token_ids = llm.renderer.encode("One two")
    cut = llm._tokenized([given], {"truncate_prompt_tokens": 1})
    assert cut == [{"prompt_token_ids": token_ids[-1:], "cache_salt": "a tenant's"}]


def test_a_chat_brings_its_template_and_goes_on(llm):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello th"}]
    params = vllm.SamplingParams(max_tokens=1)
    (own,) = llm.chat(messages, params, False, chat_template="{{ messages[-1].content }}!")
    assert own.prompt == "Hello th!"
    (going_on,) = llm.chat(messages, params, False, add_generation_prompt=False, continue_final_message=True)
    assert going_on.prompt.endswith("Hello th")


def test_an_engine_step_by_step(llm):
    engine = llm.llm_engine
    for name in ("a", "b", "c"):
        engine.add_request(name, "Once upon", vllm.SamplingParams(max_tokens=100 if name == "c" else 3))
    engine.abort_request("c")
    ended = []
    while engine.has_unfinished_requests():
        ended += engine.step()
    assert sorted(output.request_id for output in ended) == ["a", "b"]
    assert all(output.finished for output in ended)
    assert engine.step() == []


def test_one_that_fails_takes_no_other_answer_with_it(llm):
    engine = llm.llm_engine
    for name, params in (("a", {"max_tokens": 2}), ("wrong", {"logit_bias": {10**6: 1.0}}), ("b", {"max_tokens": 2})):
        engine.add_request(name, "Once upon", vllm.SamplingParams(**params))
    # all of them have ended before the first step
    assert all(one.exception(60.0) is None or name == "wrong" for name, one in engine._running.items())
    ended = []
    num_errors = 0
    while engine.has_unfinished_requests():
        try:
            ended += engine.step()
        except vllm.VLLMValidationError:
            num_errors += 1
    assert sorted(output.request_id for output in ended) == ["a", "b"]
    assert num_errors == 1


@pytest.mark.parametrize("kind", vllm.RequestOutputKind)
def test_what_an_asynchronous_engine_yields(kind):
    async def main():
        args = vllm.AsyncEngineArgs("embedded", **OPTIONS)
        async with vllm.AsyncLLM.from_engine_args(args) as engine:
            params = vllm.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, output_kind=kind)
            lengths = [len(one.outputs[0].token_ids) async for one in engine.generate("Once upon", params)]
        # several tokens may come together
        assert (sum(lengths) if kind is vllm.RequestOutputKind.DELTA else lengths[-1]) == 4
        assert lengths == sorted(lengths) or kind is vllm.RequestOutputKind.DELTA
        assert len(lengths) == 1 or kind is not vllm.RequestOutputKind.FINAL_ONLY

    asyncio.run(main())


def test_managing(llm):
    assert llm.reset_prefix_cache() is True
    metrics = {metric.name: metric.value for metric in llm.get_metrics()}
    statistics = llm.statistics()
    assert metrics.keys() == statistics.keys()
    # clocks and memory change between the two
    counts = {name for name in metrics if name.startswith("num_")}
    assert counts
    assert all(metrics[name] == statistics[name] for name in counts)
    with pytest.raises(ValueError, match="workers"):
        llm.collective_rpc("f")


def children() -> set[str]:
    """Processes that this one has begun and that have not ended."""
    lists = Path("/proc/self/task").glob("*/children")
    return {child for one in lists for child in one.read_text().split()}


def test_an_engine_that_sleeps_is_gone_until_it_wakes():
    params = vllm.SamplingParams(max_tokens=4, temperature=0)
    others = children()
    with vllm.LLM("embedded", enable_sleep_mode=True, engine_process=True, **OPTIONS) as engine:
        (before,) = engine.generate("Once upon", params, False)
        first = children() - others
        assert first
        engine.sleep(level=2)
        engine.sleep()
        assert not first & children()
        with pytest.raises(ValueError, match="wake_up"):
            engine.generate("Once upon", params, False)
        engine.wake_up(tags=["weights"])
        engine.wake_up(tags=["kv_cache"])
        (after,) = engine.generate("Once upon", params, False)
        assert after.outputs[0].token_ids == before.outputs[0].token_ids
        weights = engine._engine._parts.weights
        weights.version = "mine"
        with pytest.raises(ValueError, match="level=2"):
            engine.sleep()


def test_a_profile_is_a_trace(llm, tmp_path):
    llm._profile = _Profile({"profiler": "torch", "torch_profiler_dir": str(tmp_path)})
    with pytest.raises(ValueError, match="start_profile"):
        llm.stop_profile()
    llm.start_profile("mine")
    llm.generate("One", vllm.SamplingParams(max_tokens=2), False)
    llm.stop_profile()
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("mine-")
    assert json.loads(path.read_text())["traceEvents"]


def test_log_probabilities_in_long_lists(llm):
    params = {"max_tokens": 3, "logprobs": 2, "prompt_logprobs": 1, "temperature": 0}
    (flat,) = llm.generate("One two", vllm.SamplingParams(**params, flat_logprobs=True), False)
    (plain,) = llm.generate("One two", vllm.SamplingParams(**params), False)
    assert isinstance(flat.prompt_logprobs, vllm.FlatLogprobs)
    assert list(flat.outputs[0].logprobs) == plain.outputs[0].logprobs
    assert flat.outputs[0].logprobs[1:][-1] == plain.outputs[0].logprobs[-1]
    assert list(flat.prompt_logprobs) == [position or {} for position in plain.prompt_logprobs]
    assert len(flat.outputs[0].logprobs.token_ids) == sum(map(len, plain.outputs[0].logprobs))


def test_what_the_engine_says_of_all_forms(llm):
    llm._forms, options = _forms_of({"structured_outputs_config": {"backend": "auto", "disable_any_whitespace": True}})
    assert options == {"structured_outputs_config": {"backend": "auto"}}
    form = {"type": "object", "properties": {"a": {"enum": [1]}, "b": {"enum": [2]}}, "required": ["a", "b"],
            "additionalProperties": False}  # fmt: skip
    params = vllm.SamplingParams(max_tokens=40, structured_outputs=vllm.StructuredOutputsParams(json=form))
    (output,) = llm.generate("{", params, False)
    assert output.outputs[0].text == '{"a":1,"b":2}'
    llm._forms = {}


def test_facts_of_the_model(llm):
    assert llm.model_config.max_model_len == 256
    assert llm.model_config.get_vocab_size() == llm.config.facts.vocab_size
    assert llm.model_config.embedding_size == llm.model_config.hf_config["hidden_size"]


@pytest.mark.parametrize(
    ("parameter", "words"),
    [({"spaces_between_special_tokens": False}, "tokenizer"), ({"truncate_prompt_tokens": 3}, "tokenization_kwargs")],
)  # fmt: skip
def test_parameters_that_cannot_be_had(parameter, words):
    with pytest.raises(vllm.VLLMValidationError, match=words):
        vllm.SamplingParams(**parameter)


def test_what_only_vllm_says_is_not_sent():
    delta = vllm.RequestOutputKind.DELTA
    params = vllm.SamplingParams(output_kind=delta, extra_args={}, skip_clone=True, max_tokens=3)
    assert params.kind is delta
    assert msgspec.json.decode(msgspec.json.encode(params)) == {"max_tokens": 3}
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams).max_tokens == 3


def test_arguments_of_a_script():
    parser = vllm.EngineArgs.add_cli_args(vllm.FlexibleArgumentParser())
    parser.set_defaults(model="embedded", runner="generate")
    parser.add_argument("--own", type=int)
    args = parser.parse_args(["--dtype", "half", "--max_model_len", "128", "--own", "3"])
    assert isinstance(args, argparse.Namespace)
    own = args.own
    del args.own
    engine_args = vllm.EngineArgs.from_cli_args(args)
    assert own == 3
    assert engine_args.model == "embedded"
    assert engine_args.dtype == "float16"


def test_a_program_runs_as_it_is(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "import vllm.entrypoints\n"
        "from vllm import LLM, SamplingParams\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "try:\n    from vllm.config import get_config\nexcept ImportError as error:\n    print('no', error)\n"
        "print(LLM.__module__, vllm.SamplingParams is SamplingParams, sys.argv[1:])\n"
    )
    command = [sys.executable, "-m", "quire.vllm", str(script), "--own"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "quire.interfaces.compat.vllm_engine True ['--own']" in answer.stdout
    assert "no cannot import name 'get_config'" in answer.stdout


@pytest.mark.parametrize(
    ("program", "words"),
    [("from vllm import LLM; LLM('embedded', worker_cls='a.B')", "worker_cls=.*cannot be had here"),
     ("from vllm.config import get_config", "get_config.*nothing of this name")],
)  # fmt: skip
def test_what_a_program_cannot_have_is_one_line(tmp_path, program, words):
    script = tmp_path / "script.py"
    script.write_text(program)
    answer = subprocess.run(
        [sys.executable, "-m", "quire.vllm", str(script)], capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 1
    assert re.fullmatch(f".*script.py: .*{words}.*\n", answer.stderr)


def test_a_program_that_is_not_there_is_one_line(tmp_path):
    script = str(tmp_path / "nothing.py")
    answer = subprocess.run([sys.executable, "-m", "quire.vllm", script], capture_output=True, text=True, timeout=120)
    assert answer.returncode == 1
    assert answer.stderr == f"{script}: there is no such file. usage: python -m quire.vllm SCRIPT [ARGUMENTS]\n"


def test_tokenizers_agree(llm):
    theirs = llm.get_tokenizer()
    ours = OwnTokenizer(llm.renderer)
    messages = [{"role": "user", "content": "Hi"}]
    assert type(theirs).__module__.startswith("transformers")
    assert ours.encode("Once upon") == theirs.encode("Once upon")
    assert ours.decode(ours("Once upon")["input_ids"]) == "Once upon"
    assert ours.get_vocab() == theirs.get_vocab()
    assert len(ours) == len(theirs)
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.convert_ids_to_tokens([300, 301]) == theirs.convert_ids_to_tokens([300, 301])
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == text
    assert ours.decode(ours.apply_chat_template(messages, add_generation_prompt=True)) == text


def test_the_page_about_names_is_up_to_date():
    written = (Path(__file__).parents[2] / "docs" / coming_from.NAME).read_text(encoding="utf-8")
    assert written == coming_from.markdown(), "run: python -m tests.pages --write docs"


def test_all_log_probabilities_of_an_engine_in_its_own_process():
    with vllm.LLM("embedded", max_logprobs=-1, engine_process=True, **OPTIONS) as engine:
        params = vllm.SamplingParams(max_tokens=1, temperature=0, logprobs=-1, prompt_logprobs=-1)
        (answer,) = engine.generate("Once upon", params, False)
        vocab_size = engine.renderer.vocab_size
        assert len(answer.outputs[0].logprobs[0]) == vocab_size
        assert len(answer.prompt_logprobs[-1]) == vocab_size


def test_tokens_alone():
    with vllm.LLM("embedded", skip_tokenizer_init=True, disable_log_stats=False, **OPTIONS) as engine:
        (output,) = engine.generate({"prompt_token_ids": [40, 50]}, vllm.SamplingParams(max_tokens=4, temperature=0))
        assert (len(output.outputs[0].token_ids), output.outputs[0].text) == (4, "")
        times = output.metrics
        assert times.num_generation_tokens == 4
        assert times.queued_ts <= times.scheduled_ts <= times.first_token_ts <= times.last_token_ts
        assert times.first_token_latency > 0
        for prompt, words in ((" a", "no tokenizer"), ({"prompt_token_ids": [10**6]}, "out of vocabulary")):
            with pytest.raises(vllm.VLLMValidationError, match=words):
                engine.generate(prompt)


def test_beams_leave_out_the_token_that_ends_them(llm):
    params = vllm.BeamSearchParams(beam_width=4, max_tokens=48)
    prompt = llm.renderer.render_prompt([{"role": "user", "content": "Hi"}]).token_ids
    (found,) = llm.beam_search([{"prompt_token_ids": prompt}], params)
    (whole,) = our.LLM.beam_search(llm, [{"prompt_token_ids": prompt}], params)
    assert any(beam.finish_reason == "stop" for beam in whole.sequences)
    for beam, other in zip(found.sequences, whole.sequences, strict=True):
        has_ended = other.finish_reason == "stop"
        assert beam.tokens == (other.tokens[:-1] if has_ended else other.tokens)
        assert not has_ended or other.tokens[-1] in llm.renderer.eos_token_ids
