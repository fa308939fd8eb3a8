"""StructuredOutputsParams: what costs little to find out is found out at once, and names the field."""

import json

import msgspec
import pytest

from quire import RequestError, SamplingParams, StructuredOutputsParams


def nested(depth):
    value = {"type": "string"}
    for _ in range(depth):
        value = {"not": value}
    return value


REFUSED = {
    "nothing": ({}, "none was given"),
    "two": ({"json": {}, "regex": "a"}, "json and regex were given"),
    "empty json": ({"json": ""}, "json: must be a text"),
    "no json": ({"json": "{"}, "is no JSON"),
    "a list": ({"json": "[]"}, "must be an object, not list"),
    "a number": ({"json": 3}, "must be an object, not int"),
    "infinity": ({"json": {"minimum": float("inf")}}, "cannot be written as JSON"),
    "not json": ({"json": {"const": {1, 2}}}, "cannot be written as JSON"),
    "deep": ({"json": nested(65)}, "more than 64 deep"),
    "very deep": ({"json": nested(10_000)}, "more than 64 deep"),
    "deep text": ({"json": '{"a":' * 10_000 + "1" + "}" * 10_000}, "json: is"),
    "long": ({"json": {"enum": ["x" * 300_000]}}, "at most 262144"),
    "json_object false": ({"json_object": False}, "json_object=False"),
    "json_object 1": ({"json_object": 1}, "json_object=1"),
    "empty regex": ({"regex": ""}, "regex: must be a text"),
    "regex of bytes": ({"regex": b"a"}, "regex: must be a text"),
    "surrogate": ({"regex": "\ud800"}, "surrogate"),
    "no choice": ({"choice": []}, "choice: must be a list"),
    "an empty choice": ({"choice": ["a", ""]}, "choice: must be a list"),
    "choice of numbers": ({"choice": [1, 2]}, "choice: must be a list"),
    "many choices": ({"choice": [str(n) for n in range(5000)]}, "at most 4096"),
    "empty grammar": ({"grammar": " "}, "grammar: must be a text"),
    "both about spaces": (
        {"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " ?"},
        "not together",
    ),
    "no flag": ({"json_object": True, "disable_any_whitespace": "yes"}, "must be True or False"),
    "misspelt": ({"jsn": {}}, 'Did you mean "json"'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    values, reason = REFUSED[case]
    with pytest.raises(RequestError, match=reason.replace("(", r"\(")) as caught:
        StructuredOutputsParams(**values)
    assert caught.value.param is not None


def test_a_schema_is_text_on_its_way_and_comes_back_the_same():
    sampling = SamplingParams(structured_outputs=StructuredOutputsParams(json=nested(60)))
    assert json.loads(sampling.structured_outputs.json) == nested(60)
    sent = msgspec.msgpack.encode(sampling)
    assert msgspec.msgpack.decode(sent, type=SamplingParams) == sampling
    assert sampling.replace(max_tokens=5).structured_outputs == sampling.structured_outputs


def test_a_dictionary_will_do():
    assert SamplingParams(structured_outputs={"choice": "yes"}).structured_outputs.choice == ["yes"]
    with pytest.raises(RequestError, match="must be StructuredOutputsParams"):
        SamplingParams(structured_outputs="json")


def test_not_together_with_ignore_eos():
    with pytest.raises(RequestError, match="ignore_eos: not together"):
        SamplingParams(structured_outputs={"choice": ["a"]}, ignore_eos=True)
