"""The fields that ask for a form, on a fake engine: what reaches it, and what is refused under which name."""

import pytest

from quire import StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAGS = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}

ASKED = {
    "json_object": ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"json": SCHEMA},
    ),
    "not strict": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": None}}},
        {"json": SCHEMA},
    ),
    "structural_tag": (
        {"response_format": {"type": "structural_tag", **TAGS}},
        {"structural_tag": {"type": "structural_tag", **TAGS}},
    ),
    "structured_outputs": (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        {"json": SCHEMA, "disable_any_whitespace": True},
    ),
    "guided_json": ({"guided_json": SCHEMA}, {"json": SCHEMA}),
    "guided_json, text": ({"guided_json": '{"type": "null"}'}, {"json": '{"type": "null"}'}),
    "guided_regex": ({"guided_regex": "a+"}, {"regex": "a+"}),
    "guided_choice": ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    "guided_grammar": ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    "beside text": (
        {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}},
        {"regex": "a"},
    ),
}


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_what_reaches_the_engine(run, served, endpoint):
    async def main():
        async with served() as server:
            for fields, expected in ASKED.values():
                response = await getattr(server, endpoint)(**fields)
                assert response.status_code == 200, response.text
                assert server.requests()[-1].sampling.structured_outputs == StructuredOutputsParams(**expected)
            beams = await getattr(server, endpoint)(guided_regex="a", use_beam_search=True, n=2)
            assert beams.status_code == 200, beams.text
            assert server.requests()[-1].sampling.structured_outputs == StructuredOutputsParams(regex="a")
            await getattr(server, endpoint)(response_format={"type": "text"})
            assert server.requests()[-1].sampling.structured_outputs is None

    run(main())


def schema_format(schema, **more):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


REFUSED = {
    "unknown type": ({"response_format": {"type": "xml"}}, "response_format", "response_format.type='xml'"),
    "no type": ({"response_format": {}}, "response_format", "must be one of text, json_object"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format", "response_format.json_schema"),
    "misspelt": (schema_format(SCHEMA, strickt=True), "response_format", 'Did you mean "strict"'),
    "strict, no flag": (schema_format(SCHEMA, strict="yes"), "response_format", "strict='yes'"),
    "unsupported keyword": (
        schema_format({"properties": {"a": {"type": "array", "uniqueItems": True}}}),
        "response_format",
        'response_format: json: at #/properties/a: Unimplemented keys: ["uniqueItems"].',
    ),
    "json_object false": ({"structured_outputs": {"json_object": False}}, "structured_outputs", "json_object=False"),
    "empty json": ({"structured_outputs": {"json": ""}}, "structured_outputs", "json: must be a text"),
    "empty": ({"structured_outputs": {}}, "structured_outputs", "none was given"),
    "two in one": ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "json and regex"),
    "two fields": ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "not together with guided_regex"),
    "bad regex": ({"guided_regex": "(a"}, "guided_regex", "guided_regex: regex: "),
    "bad choice": ({"guided_choice": []}, "guided_choice", "guided_choice: choice: "),
    "choice, no list": ({"guided_choice": "a"}, "guided_choice", ""),
    "bad grammar": ({"guided_grammar": "root ::= foo"}, "guided_grammar", "guided_grammar: grammar: "),
    "no object": ({"response_format": "json"}, "response_format", ""),
    "with ignore_eos": ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "not together"),
    "a backend": ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "one backend"),
}


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_what_is_refused(run, served, endpoint):
    async def main():
        async with served() as server:
            for case, (fields, param, words) in REFUSED.items():
                response = await getattr(server, endpoint)(**fields)
                error = response.json()["error"]
                assert (response.status_code, error["param"]) == (400, param), (case, error)
                assert words in error["message"], (case, error)
            assert server.requests() == []
            assert (await getattr(server, endpoint)(guided_regex="a")).status_code == 200

    run(main())
