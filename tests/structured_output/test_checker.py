"""What is no form is refused with its place, within a time, and does no harm to the next one."""

import os
import signal
import threading
import time

import pytest

from quire import RequestError
from quire import StructuredOutputsParams as Params
from quire.structured_output.checker import Checker
from quire.structured_output.vocabulary import Vocabulary

TOKENS = [bytes([byte]) for byte in range(256)] + [b"<end>"]
END = 256


def vocabulary():
    return Vocabulary.of(TOKENS, special_ids=[END], end_ids=[END])


@pytest.fixture(scope="module")
def checker():
    checker = Checker(vocabulary)
    yield checker
    checker.close()


def in_properties(value):
    return {"type": "object", "properties": {"a": {"type": "integer"}, "b": value}}


# (where, what) of schemas that cannot be followed
KEYWORDS = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 2}},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"type": "object"}}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "unknown type": {"type": "strng"},
    "type of a number": {"type": 3},
    "unknown format": {"type": "string", "format": "foo"},
    "bad pattern": {"type": "string", "pattern": "(a"},
    "look-ahead": {"type": "string", "pattern": "(?=a)b"},
    "backward reference": {"type": "string", "pattern": r"(a)\1"},
    "negative length": {"type": "string", "minLength": -1},
    "oneOf that overlaps": {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    "enum of no list": {"enum": "a"},
    "http": {"$ref": "http://127.0.0.1:1/schema.json"},
    "file": {"$ref": "file:///etc/passwd"},
    "no such definition": {"$ref": "#/$defs/nothing"},
}
# and of those that nothing follows: where they stand, something else may be possible
IMPOSSIBLE = {
    "numbers that exclude each other": {"type": "integer", "minimum": 5, "maximum": 3},
    "lengths that exclude each other": {"type": "string", "minLength": 5, "maxLength": 3},
    "required and forbidden": {"type": "object", "properties": {"x": False}, "required": ["x"]},
    "empty enum": {"enum": []},
}
PLACES = {
    "the root": ("#:", lambda bad: bad),
    "a property": ("#/properties/b:", lambda bad: {**in_properties(bad), "required": ["b"]}),
    "deep": (
        "#/items/properties/b/anyOf/1:",
        lambda bad: {"items": in_properties({"anyOf": [{"type": "null"}, bad]})},
    ),
}
BAD_SCHEMAS = {f"{name} in {place}": (PLACES[place], KEYWORDS[name]) for name in KEYWORDS for place in PLACES} | {
    f"{name} in {place}": (PLACES[place], IMPOSSIBLE[name]) for name in IMPOSSIBLE for place in list(PLACES)[:2]
}


@pytest.mark.parametrize("case", BAD_SCHEMAS)
def test_a_bad_schema_is_refused_at_its_place(checker, case):
    (pointer, around), bad = BAD_SCHEMAS[case]
    with pytest.raises(RequestError) as caught:
        checker.check(Params(json=around(bad)))
    assert caught.value.param == "structured_outputs"
    assert str(caught.value).startswith(f"structured_outputs: json: at {pointer}")
    checker.check(Params(json=around({"type": "string"})))


def test_who_refers_to_a_bad_definition_is_not_to_blame(checker):
    schema = {"properties": {"a/b": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"properties": {"~": {"type": "strng"}}}}}
    with pytest.raises(RequestError, match=r"json: at #/\$defs/x/properties/~0: Invalid type: strng"):
        checker.check(Params(json=schema))


BAD_GRAMMARS = {
    "regex, open": {"regex": "(a"},
    "regex, look-around": {"regex": "(?!a)b"},
    "regex, backward reference": {"regex": r"(a)\1"},
    "regex, class": {"regex": "[z-a]"},
    "regex, count": {"regex": "a{3,1}"},
    "regex, nothing": {"regex": r"[^\s\S]"},
    "regex, deep": {"regex": "(" * 3000 + "a" + ")" * 3000},
    "lark, undefined": {"grammar": "start: foo"},
    "lark, twice": {"grammar": 'start: "a"\nstart: "b"'},
    "lark, no start": {"grammar": 'foo: "a"'},
    "lark, open": {"grammar": "start: ("},
    "lark, endless": {"grammar": "start: start"},
    "lark, deep": {"grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000},
    "lark, no such token": {"grammar": 'start: <|nothing|> "a"'},
    "lark, bad schema inside": {"grammar": 'start: %json {"type": "strng"}'},
    "gbnf, undefined": {"grammar": "root ::= foo"},
    "gbnf, open": {"grammar": 'root ::= ("a"'},
    "braces": {"grammar": "{"},
    "tags, empty": {"structural_tag": {}},
    "tags, none": {"structural_tag": {"structures": [], "triggers": ["<"]}},
    "tags, misspelt": {"structural_tag": {"structures": [{"start": "<a>"}], "triggers": ["<"]}},
    "tags, no trigger": {
        "structural_tag": {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["["]}
    },
    "tags, bad schema": {
        "structural_tag": {"structures": [{"begin": "<a>", "schema": {"type": "x"}, "end": ""}], "triggers": ["<"]}
    },
    "endless schema": {"json": {"$ref": "#"}},
    "forbidden": {"json": False},
    "lenient": {"json": {"not": {"type": "string"}, "x-guidance": {"lenient": True}}},
    "coerced": {"json": {**KEYWORDS["oneOf that overlaps"], "x-guidance": {"coerce_one_of": True}}},
    "x-guidance": {"json": {"type": "string", "x-guidance": {"nothing": 1}}},
}


@pytest.mark.parametrize("case", BAD_GRAMMARS)
def test_a_bad_grammar_is_refused_and_the_next_good_one_taken(checker, case):
    with pytest.raises(RequestError, match=r"^structured_outputs: ") as caught:
        checker.check(Params(**BAD_GRAMMARS[case]))
    assert len(str(caught.value)) < 400
    checker.check(Params(regex=f"(ab)*{len(case)}"))
    checker.check(Params(json=in_properties({"type": "string", "maxLength": len(case)})))


GOOD = {
    "recursive": {
        "json": {"$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}
    },
    "long string": {"json": {"type": "string", "minLength": 10**9}},
    "many items": {"json": {"type": "array", "minItems": 10**9, "items": {"type": "integer"}}},
    "deep": {"json": '{"properties":{"a":' * 31 + "{}" + "}}" * 31},
    "any": {"json": True},
    "large enum": {"json": {"enum": [f"{number:x}" for number in range(28_000)]}},
    "object": {"json_object": True},
    "count": {"regex": "a{0,100000}"},
    "catastrophe": {"regex": "(a+)+b"},
    "counts of counts": {"regex": "((a{0,1000}){0,1000}){0,1000}"},
    "left recursion": {"grammar": 'start: start "a" | "b"'},
    "ambiguous": {"grammar": 'start: e\ne: e e e | e e | "a" |'},
    "gbnf": {"grammar": 'root ::= "a" | "b" root'},
    "special token": {"grammar": 'start: "a" <end>'},
    "choice": {"choice": ["a", '"', "\n"]},
    "spaces": {"json": {"type": "object"}, "whitespace_pattern": " ?"},
    "tags": {"structural_tag": {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<"]}},
}


@pytest.mark.parametrize("case", GOOD)
def test_what_can_be_followed_is_taken(checker, case):
    began = time.monotonic()
    checker.check(Params(**GOOD[case]))
    assert time.monotonic() - began < 5


def test_one_that_takes_too_long_is_refused_and_its_process_killed():
    checker = Checker(vocabulary, seconds=0.5)
    checker.check(Params(regex="a"))
    first = checker._process.popen
    os.kill(first.pid, signal.SIGSTOP)  # stands for a grammar that is compiled for ever
    with pytest.raises(RequestError, match=r"takes more than 0\.5 s to compile"):
        checker.check(Params(regex="b"))
    assert first.poll() == -signal.SIGKILL
    checker.check(Params(regex="b"))
    assert checker._process.popen.pid != first.pid
    checker.close()


def test_one_that_crashes_its_process_is_refused():
    checker = Checker(vocabulary, seconds=30)
    checker.check(Params(regex="a"))
    process = checker._process.popen
    os.kill(process.pid, signal.SIGSTOP)
    threading.Timer(0.2, process.kill).start()
    with pytest.raises(RequestError, match="cannot be compiled with 512 MiB"):
        checker.check(Params(regex="b"))
    checker.check(Params(regex="b"))
    checker.close()
    assert checker._process.popen.poll() is not None


def test_an_answer_is_remembered():
    checker = Checker(vocabulary)
    checker.check(Params(regex="a"))
    with pytest.raises(RequestError):
        checker.check(Params(regex="("))
    checker.close()
    checker.check(Params(regex="a"))
    with pytest.raises(RequestError):
        checker.check(Params(regex="("))
    assert checker._process.popen.poll() is not None, "asked once more"


def test_one_that_is_known_does_not_wait_for_one_that_is_slow(checker):
    """The process is busy for as long as its lock is held."""
    checker.check(Params(regex="[ab]+c"))
    with pytest.raises(RequestError):
        checker.check(Params(regex="["))
    with checker._lock:
        assert checker.is_known(Params(regex="[ab]+c"))
        assert not checker.check(Params(regex="[ab]+c"))
        assert not checker.is_known(Params(regex="nobody asked for it"))
        with pytest.raises(RequestError, match="regex"):
            checker.is_known(Params(regex="["))
