"""structured_outputs with the embedded model and the real core: exact, and the same on every way."""

import asyncio
import itertools
import json
import random
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from tests.support.beam_requests import CLOSE_CALL

from quire import LLM, AsyncLLM, BeamSearchParams, RequestError, SamplingParams
from quire import StructuredOutputsParams as Form
from quire.config.model_source import embedded_path
from quire.engine_core import launch
from quire.engine_core.scheduler.speculation import SpeculationCosts
from quire.structured_output import walk as walks
from quire.structured_output.grammar import Form as CompiledForm
from quire.structured_output.tool_calls import tool_calls_form
from quire.structured_output.vocabulary import Vocabulary
from quire.testing.beam_reference import BeamSettings, beam_search, logits_of_transformers
from quire.worker.sampler.beside import BesideSteps

PROMPTS = ["Give me JSON: ", "A person, as JSON:", "2+3=", "Once upon a time"]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMS = {
    "schema": Form(json=PERSON),
    "tight": Form(json=PERSON, disable_any_whitespace=True),
    "object": Form(json_object=True),
    "regex": Form(regex=r"\d{3}-[a-z]{2,6}( and \d+){0,3}"),
    "choice": Form(choice=["yes", "no", "perhaps, if it does not rain"]),
    "grammar": Form(grammar='root ::= "(" root ")" | [0-9]+ " " root | "x"'),
}
SMALL = {"max_num_seqs": 16, "check_invariants": True, "num_threads": 1, "dtype": "float32"}


def greedy(form, **values):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 48, "structured_outputs": form, **values})


def sampled(form, seed=1, **values):
    return greedy(form, **{"temperature": 1.0, "seed": seed, **values})


def beams(form):
    return BeamSearchParams(beam_width=3, max_tokens=24, structured_outputs=form)


def jobs():
    """Prompts and parameters: every form, greedy, sampled and as beams; and some without a form."""
    each = [
        (prompt, params)
        for form in FORMS.values()
        for prompt in PROMPTS[:2]
        for params in (greedy(form), sampled(form, n=3), sampled(form, temperature=2.0, repetition_penalty=1.2))
    ]
    each += [(PROMPTS[0], beams(form)) for form in FORMS.values()]
    return [*each, *[(prompt, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)) for prompt in PROMPTS]]


def run(llm, given):
    outputs = llm.generate([prompt for prompt, _ in given], [params for _, params in given], use_tqdm=False)
    return [[(one.token_ids, one.finish_reason) for one in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def llm():
    with LLM(**SMALL, async_scheduling=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm):
    return run(llm, jobs())


def test_every_output_has_its_form(llm, expected):
    num_complete = 0
    for (_, params), outputs in zip(jobs(), expected, strict=True):
        form = params.structured_outputs
        for token_ids, finish_reason in outputs:
            if form is None or finish_reason != "stop":
                assert finish_reason == "length"
                continue
            text = llm.renderer.decode(token_ids)
            num_complete += 1
            match form.kind:
                case "json":
                    jsonschema.validate(json.loads(text), PERSON)
                    tight = json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":"))
                    assert text == tight or not form.disable_any_whitespace
                case "json_object":
                    assert isinstance(json.loads(text), dict)
                case "regex":
                    assert re.fullmatch(form.regex, text)
                case "choice":
                    assert text in form.choice
                case "grammar":
                    assert re.fullmatch(r"(\(|\d+ )*x\)*", text)
                    assert text.count("(") == text.count(")")
    assert num_complete > 30


def tokenizer_of(llm, model):
    tokens, special = llm.renderer.token_table(model.config.vocab_size)
    return Vocabulary.of(tokens, special, llm.renderer.eos_token_ids).tokenizer()


def allowed_by(matcher, vocab_size):
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    return bits[:vocab_size] == 1


def test_beams_are_those_of_a_plain_search_with_the_same_masks(llm, expected):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(embedded_path(), dtype=torch.float32)
    tokenizer = tokenizer_of(llm, model)
    ends = tuple(llm.renderer.eos_token_ids)
    num_compared = 0
    for (prompt, params), outputs in zip(jobs(), expected, strict=True):
        if not isinstance(params, BeamSearchParams):
            continue
        form = CompiledForm(params.structured_outputs, tokenizer)

        def allowed(said, form=form):
            matcher = form.hard.deep_copy()
            assert matcher.consume_tokens(list(said))
            return allowed_by(matcher, model.config.vocab_size)

        settings = BeamSettings(params.beam_width, params.max_tokens, ends, allowed=allowed)
        found = beam_search(logits_of_transformers(model), llm.renderer.encode(prompt), settings)
        if found.margin > CLOSE_CALL:
            num_compared += 1
            assert outputs == [(one.tokens, one.finish_reason) for one in found.hypotheses]
    assert num_compared >= 4


def test_a_form_with_fewer_answers_than_beams(llm):
    params = BeamSearchParams(beam_width=16, structured_outputs=Form(regex="a"))
    [output] = llm.beam_search(["x"], params, use_tqdm=False)
    # one for each token that ends a text
    assert 1 <= len(output.sequences) < 16
    assert {one.output_text for one in output.sequences} == {"a"}


def test_greedy_output_is_that_of_a_plain_loop_with_the_same_mask(llm, expected):
    """Transformers' logits, a mask of the library for each step, and argmax."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(embedded_path(), dtype=torch.float32)
    ends = llm.renderer.eos_token_ids
    tokenizer = tokenizer_of(llm, model)
    num_compared = 0
    for (prompt, params), outputs in zip(jobs(), expected, strict=True):
        if params.structured_outputs is None or params.temperature or isinstance(params, BeamSearchParams):
            continue
        matcher = CompiledForm(params.structured_outputs, tokenizer).hard
        step, said, cache = llm.renderer.encode(prompt), [], None
        while len(said) < params.max_tokens and not (said and said[-1] in ends):
            with torch.no_grad():
                result = model(torch.tensor([step]), past_key_values=cache, use_cache=True)
            logits, cache = result.logits[0, -1], result.past_key_values
            logits[torch.from_numpy(~allowed_by(matcher, len(logits)))] = -torch.inf
            step = [int(logits.argmax())]
            said += step
            matcher.consume_token(said[-1])
        assert outputs[0][0] == said, params.structured_outputs
        num_compared += 1
    assert num_compared == 12


WAYS = {
    "asynchronous": {"async_scheduling": True},
    "chunks": {"max_num_batched_tokens": 5, "async_scheduling": True, "max_num_seqs": 4},
    "preempted": {"num_gpu_blocks_override": 14, "preemption_mode": "recompute", "max_model_len": 128},
    "swapped": {"num_gpu_blocks_override": 14, "preemption_mode": "swap", "max_model_len": 128},
    "n-grams": {"speculative_config": {"method": "ngram"}, "async_scheduling": True},
    "a draft model": {"speculative_config": {"model": "embedded-draft"}, "async_scheduling": True},
    "a draft model, in step": {"speculative_config": {"model": "embedded-draft"}, "async_scheduling": False},
    "a process": {"engine_process": True},
}


def some(of_all):
    """Every second: every form, and every kind of parameters."""
    return of_all[::2]


@pytest.mark.parametrize("way", WAYS)
def test_the_same_on_every_way(expected, way, monkeypatch):
    # on a machine that is busy while it measures, drafts may not pay
    monkeypatch.setattr(launch, "SpeculationCosts", lambda **measured: SpeculationCosts())
    with LLM(**{**SMALL, **WAYS[way]}) as llm:
        assert run(llm, some(jobs())) == some(expected)
        statistics = llm.statistics()
        if "gpu_blocks" in str(WAYS[way]):
            assert statistics["num_preemptions_total"] > 0
        if "speculative_config" in WAYS[way]:
            assert statistics["num_draft_tokens_total"] > 0


@pytest.mark.parametrize("way", ["asynchronous", "preempted", "a draft model"])
def test_the_same_whatever_comes_late(expected, way, monkeypatch):
    """No step can afford a mask in two cases of three: rows wait, and get the tokens that they would have got."""
    cases = itertools.count()
    monkeypatch.setattr(BesideSteps, "can_afford", lambda self, seconds: next(cases) % 3 == 0)
    monkeypatch.setattr(launch, "SpeculationCosts", lambda **measured: SpeculationCosts())
    with LLM(**{**SMALL, **WAYS[way]}) as llm:
        assert run(llm, some(jobs())) == some(expected)
        assert llm.statistics()["num_late_rows_total"] > 100
        llm.control("worker.check_invariants")


# Much may follow in many places: each token makes the next mask harder.
AMBIGUOUS = """
start: e
e: e e | e "+" e | "(" e ")" | /[a-z]/ | " " | e e e | e e e e
"""


def test_a_hard_grammar_ends_its_request_alone(llm, expected, monkeypatch):
    """With many outputs of it, everybody else gets what they would have got; it is refused, with the reason."""
    monkeypatch.setattr(walks, "MOST_HARD_MASKS", 24)
    hard = sampled(Form(grammar=AMBIGUOUS), n=12, max_tokens=60)
    given = jobs()[:12]
    outputs = run(llm, [(PROMPTS[0], hard), *given])
    # some end before it becomes hard
    assert "error" in {reason for _, reason in outputs[0]} <= {"error", "stop"}
    assert outputs[1:] == expected[:12]
    with pytest.raises(RequestError, match=r"structured_outputs.*(Make the form simpler|masks that are hard)"):
        stream_of(hard)
    llm.control("worker.check_invariants")


ALTERNATIVES = [f"([a-z ]*[{letter}-z][a-z ]{{{place}}})" for place, letter in enumerate("abcdefghijklmnopqrst", 5)]
LIMITS_OF_THE_LIBRARY = {
    "nested counters": Form(regex="(.{0,3000}){0,3000}"),
    "optional properties": Form(
        json={"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(5000)}}
    ),
    # reached after some tokens
    "overlapping alternatives": Form(regex=f"({'|'.join(ALTERNATIVES)}){{10}}"),
}


@pytest.mark.parametrize("form", LIMITS_OF_THE_LIBRARY)
def test_a_limit_of_the_library_is_the_clients_error(form):
    """Whenever it is reached: when the form is checked, when it is compiled, or in the middle of the output."""
    params = sampled(LIMITS_OF_THE_LIBRARY[form], n=8, max_tokens=40)
    with pytest.raises(RequestError, match="structured_outputs"):
        stream_of(params)


def stream_of(params):
    async def main():
        async with AsyncLLM(**SMALL) as engine:
            return [output async for output in engine.stream(PROMPTS[0], params)]

    return asyncio.run(main())


def random_schema(rng, depth=0):
    """What people write, with bounds, so that even a model that knows nothing comes to an end."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kind = rng.choice(kinds if depth > 2 else [*kinds, "object", "object", "object", "array", "array", "anyOf"])
    match kind:
        case "string":
            return {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randrange(3, 9)}
        case "integer":
            low = rng.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1000)}
        case "number":
            return {"type": "number", "minimum": 0, "exclusiveMaximum": rng.randrange(1, 9)}
        case "enum":
            return {"enum": rng.sample(["a", "b\n", 'c"', 1, 2.5, None, True, ["x"], {"y": 1}], rng.randrange(1, 5))}
        case "const":
            return {"const": rng.choice(["fixed", 7, {"k": [1, 2]}, "é"])}
        case "pattern":
            return {"type": "string", "pattern": rng.choice([r"^[a-z]{1,4}$", r"^\d{2}-\d{2}$", "^(x|yz)+$"])}
        case "object":
            names = rng.sample(["name", "id", "a b", "ü", "tags", 'q"'], rng.randrange(1, 4))
            properties = {name: random_schema(rng, depth + 1) for name in names}
            required = rng.sample(names, rng.randrange(len(names) + 1))
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            least = rng.randrange(2)
            items = random_schema(rng, depth + 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randrange(3)}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
    return {"type": kind}


@pytest.mark.parametrize("num_schemas", [80, pytest.param(400, marks=pytest.mark.nightly)])
def test_outputs_of_random_schemas_parse_and_validate(llm, num_schemas):
    rng = random.Random(20)
    schemas = [random_schema(rng) for _ in range(num_schemas)]
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.0, 1.5]),
            seed=number,
            n=2,
            max_tokens=160,
            structured_outputs=Form(json=schema, disable_any_whitespace=number % 4 != 0),
        )
        for number, schema in enumerate(schemas)
    ]
    outputs = llm.generate([rng.choice(PROMPTS) for _ in schemas], params, use_tqdm=False)
    num_complete = 0
    for schema, output in zip(schemas, outputs, strict=True):
        for one in output.outputs:
            assert one.finish_reason in ("stop", "length"), one.stop_reason
            if one.finish_reason == "stop":
                jsonschema.validate(json.loads(one.text), schema)
                num_complete += 1
    assert num_complete > 1.7 * num_schemas


def test_tags_stand_in_free_text(llm):
    """The trigger is a word that every story has."""
    tag = {"begin": " the=", "schema": {"enum": [{"x": 1}, "cat"]}, "end": "!"}
    form = Form(structural_tag={"structures": [tag], "triggers": [" the"]})
    outputs = llm.generate("Once upon a time", sampled(form, n=16, max_tokens=100), use_tqdm=False)[0].outputs
    complete = [one.text for one in outputs if one.finish_reason == "stop"]
    num_tags = 0
    for text in complete:
        for rest in text.split(" the")[1:]:
            assert re.match(r'=(\{\s*"x"\s*:\s*1\s*\}|"cat")!', rest), text
            num_tags += 1
    assert num_tags > 3


def test_calls_of_tools(llm):
    tools = [
        {"type": "function", "function": {"name": "person", "parameters": PERSON}},
        {"type": "function", "function": {"name": "stop"}},
        {
            "type": "function",
            "function": {"name": "colour", "parameters": {"$defs": {"c": {"enum": ["red"]}}, "$ref": "#/$defs/c"}},
        },
    ]
    outputs = llm.generate(PROMPTS[0], sampled(tool_calls_form(tools, name="person"), n=4, max_tokens=160))[0].outputs
    for one in outputs:
        assert one.finish_reason == "stop"
        call = json.loads(re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", one.text, re.DOTALL).group(1))
        assert list(call) == ["name", "arguments"]
        assert call["name"] == "person"
        jsonschema.validate(call["arguments"], PERSON)
    form = tool_calls_form([tools[2]], begin="", end="", arguments="parameters", between=";", most_calls=3)
    for one in llm.generate(PROMPTS[0], sampled(form, n=4, max_tokens=160))[0].outputs:
        calls = [json.loads(text) for text in one.text.split(";")]
        assert calls == [{"name": "colour", "parameters": "red"}] * len(calls)
        assert len(calls) <= 3


def test_an_exception_in_the_matcher_ends_its_request_alone(llm, expected, monkeypatch):
    """Also a panic of the library, which is no Exception."""

    class PanicException(BaseException):
        pass

    fill = walks.Walk._fill_easy

    # in the step and beside it, because the time that a mask took decides where the next one is made
    def failing(self, form, tokens, num_sure, mask, library):
        if self._form is broken[0] and len(tokens) == 5:
            raise PanicException("the library fell over")
        return fill(self, form, tokens, num_sure, mask, library)

    broken = []
    child = Form(regex="[a-z]{40}")
    walk = walks.Walk.__init__

    def noticing(self, start, *others):
        walk(self, start, *others)
        if start.result().easy.deep_copy().validate_tokens(list(ids)) == len(ids):
            broken.append(start)

    # the request that is to fail is known by its grammar: the only one that takes forty letters
    ids = llm.renderer.encode("abcdefghijklmnop", add_special_tokens=False)
    monkeypatch.setattr(walks.Walk, "__init__", noticing)
    monkeypatch.setattr(walks.Walk, "_fill_easy", failing)
    given = jobs()[:8]
    outputs = run(llm, [*given, (PROMPTS[0], greedy(child, n=2))])
    assert outputs[:-1] == expected[:8]
    assert [reason for _, reason in outputs[-1]] == ["error", "error"]
    assert run(llm, given[:2]) == expected[:2]
    llm.control("worker.check_invariants")


def test_what_is_refused(llm):
    with pytest.raises(RequestError, match="at #/properties/a: Invalid type: strng") as caught:
        llm.generate(["a", "b"], [greedy(None), greedy(Form(json={"properties": {"a": {"type": "strng"}}}))])
    assert caught.value.param == "structured_outputs"
    assert "prompt number 1" in caught.value.__notes__[0]
    with pytest.raises(RequestError, match="ignore_eos: not together with structured_outputs"):
        BeamSearchParams(beam_width=2, structured_outputs=FORMS["choice"], ignore_eos=True)
    [output] = llm.generate("a", greedy(Form(choice=["yes"]), min_tokens=30), use_tqdm=False)
    assert (output.outputs[0].finish_reason, "structured_outputs" in output.outputs[0].stop_reason) == ("error", True)


def test_a_form_that_is_set_later_is_checked_and_taken(llm):
    params = greedy(None)
    params.structured_outputs = {"choice": ["yes"]}
    [output] = llm.generate("a", params, use_tqdm=False)
    assert (output.outputs[0].text, params.structured_outputs) == ("yes", {"choice": ["yes"]})
    params.structured_outputs = 3
    with pytest.raises(RequestError, match="must be StructuredOutputsParams"):
        llm.generate("a", params, use_tqdm=False)


def test_sessions_and_streamed_prompts():
    async def pieces():
        for piece in ("Give me", " JSON", ": "):
            yield piece

    async def main():
        async with asyncio.timeout(120), AsyncLLM(**SMALL) as engine:
            whole = [output async for output in engine.generate(PROMPTS[0], greedy(FORMS["tight"]))][-1]
            parts = [output async for output in engine.generate(pieces(), greedy(FORMS["tight"]))][-1]
            assert parts.outputs[0].token_ids == whole.outputs[0].token_ids
            jsonschema.validate(json.loads(whole.outputs[0].text), PERSON)
            session = await engine.open_session()
            first = await session.generate(PROMPTS[0], greedy(FORMS["choice"]))
            again = await session.generate(" And", greedy(FORMS["regex"]))
            assert first.outputs[0].text in FORMS["choice"].choice
            assert re.fullmatch(FORMS["regex"].regex, again.outputs[0].text)
            with pytest.raises(RequestError, match="unclosed group"):
                await session.generate(" And", greedy(Form(regex="(")))
            await session.close()
            with pytest.raises(RequestError, match="structured_outputs"):
                async for _ in engine.stream(PROMPTS[0], greedy(FORMS["choice"], min_tokens=40)):
                    pass

    asyncio.run(main())
    assert Path(embedded_path()).exists()
