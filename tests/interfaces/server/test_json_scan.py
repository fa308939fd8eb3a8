"""Values, names and depth of a JSON text are counted in its bytes; and a body at these bounds costs every endpoint
little, whatever field it is in."""

import json
import random
import sys
from itertools import cycle

import pytest

from quire.interfaces.server.anthropic_messages.fields import RULES as MESSAGES
from quire.interfaces.server.openai.chat import RULES as CHAT
from quire.interfaces.server.openai.completions import RULES as COMPLETIONS
from quire.interfaces.server.openai.embeddings import RULES as EMBEDDINGS
from quire.interfaces.server.openai.requests import DetokenizeRequest, TokenizeRequest
from quire.interfaces.server.openai_responses.fields import RULES as RESPONSES
from quire.interfaces.server.wire import field_rules
from quire.interfaces.server.wire.errors import ApiError
from quire.interfaces.server.wire.field_rules import FieldRules
from quire.interfaces.server.wire.json_scan import JsonBounds, JsonScan

ANY = JsonBounds(values=10**9, names=10**9, depth=10**9)


def counted(text, rng=None, bounds=ANY):
    """Values, names and the greatest depth that is let through."""
    scan, start = JsonScan(bounds), 0
    while start < len(text):
        end = start + rng.randrange(1, 9) if rng is not None else len(text)
        scan.feed(text[start:end])
        start = end
    return scan.num_values, scan.num_names


def of(value):
    """The same of what a text stands for. Commas stand between values, so the first of each list has none."""
    if isinstance(value, dict):
        inside = [of(item) for item in value.values()]
        own = 1 + max(0, len(value) - 1), len(value)
    elif isinstance(value, list):
        inside = [of(item) for item in value]
        own = 1 + max(0, len(value) - 1), 0
    else:
        return 0, 0
    return own[0] + sum(values for values, _ in inside), own[1] + sum(names for _, names in inside)


def random_value(rng, depth=0):
    kind = rng.randrange(7 if depth < 5 else 4)
    if kind < 3:
        return "".join(
            rng.choice(['"', "\\", ",", ":", "[", "{", "}", "]", "a", "é", "\n", "\\\\"])
            for _ in range(rng.randrange(9))
        )
    if kind == 3:
        return rng.choice([1, -2.5, None, True])
    if kind == 4:
        return {
            random_value(rng, 9) if rng.random() < 0 else f'k"\\{i}': random_value(rng, depth + 1)
            for i in range(rng.randrange(4))
        }
    return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]


def test_the_count_is_that_of_what_is_decoded():
    """However the text is cut, and whatever stands in its strings."""
    rng = random.Random(3)
    for _ in range(400):
        value = {"a": random_value(rng), "b": random_value(rng)}
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
        assert counted(text, rng) == counted(text) == of(value), text


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"[" + b"1," * 20 + b"1]", "values"),
        (b"[" + b"[]," * 10 + b"[]]", "values"),
        (b'{"a":' * 11 + b"1" + b"}" * 11, "names"),
        (b"[" * 9, "nested more than 8 levels"),
        (b'["\\"' + b"x" * 40 + b'",' + b"[" * 8, "nested more than 8 levels"),
    ],
)
def test_what_is_beyond_a_bound_is_refused_while_it_comes(text, what):
    bounds = JsonBounds(values=20, names=10, depth=100 if what == "names" else 8)
    with pytest.raises(ApiError, match=what):
        counted(text, bounds=bounds)
    with pytest.raises(ApiError, match=what):
        counted(text, random.Random(1), bounds)


def test_punctuation_in_strings_counts_for_nothing():
    text = json.dumps({"a": '",:[{' * 1000, "b": "\\" * 999 + '"' + "[" * 100}).encode()
    assert counted(text, bounds=JsonBounds(values=2, names=2, depth=1)) == (2, 2)


ENDPOINTS = {
    "/v1/completions": (COMPLETIONS, {"prompt": "hi", "max_tokens": 1}),
    "/v1/chat/completions": (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
    "/v1/responses": (RESPONSES, {"input": "hi"}),
    "/v1/messages": (MESSAGES, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
    "/v1/embeddings": (EMBEDDINGS, {"input": "hi"}),
    "/tokenize": (FieldRules(TokenizeRequest, {}), {"prompt": "hi"}),
    "/detokenize": (FieldRules(DetokenizeRequest, {}), {"tokens": [1]}),
}
NAMES = {f"name{number}": number for number in range(30_000)}
SHAPES = {
    "numbers": [7] * 120_000,
    "texts": ["a"] * 120_000,
    "lists": [[]] * 60_000,
    "objects": [{"a": 1}] * 30_000,
    "names": NAMES,
    "messages": [{"role": "user", "content": "hi"}] * 15_000,
    "a message": [{"role": "user", "content": "hi", **NAMES}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 15_000}],
    "ids as names": {str(number): 1 for number in range(30_000)},
}
# A request of one message makes 3,000. Three for each part of a message are 10 ms; three for each value of the long
# lists would be ten times as many.
MOST_CALLS = 50_000


async def num_calls_of(server, path, body):
    """Calls of Python functions, in the thread of the event loop, while it is answered."""
    calls = 0

    def on_event(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    text = json.dumps(body).encode()
    sys.setprofile(on_event)
    try:
        answer = await server.http.post(path, content=text, headers={"content-type": "application/json"})
    finally:
        sys.setprofile(None)
    assert answer.status_code < 500, answer.text
    return calls


async def fields_of_many_calls(served, path, fields):
    """Of fields, each a name and the shape of its value."""
    most = {}
    async with served() as server:
        # what is made once is made
        await server.http.post(path, json=ENDPOINTS[path][1])
        for name, shape in fields:
            num_calls = await num_calls_of(server, path, {**ENDPOINTS[path][1], name: SHAPES[shape]})
            if num_calls > MOST_CALLS:
                most[name, shape] = num_calls
    return most


def names_of(path):
    rules, _ = ENDPOINTS[path]
    return [*rules.implemented, *rules.refused, "nobody_knows"]


def fields_by_day():
    """Every tenth field of every endpoint. The shapes take turns, also from one endpoint to the next."""
    shapes = cycle(SHAPES)
    return {path: [(name, next(shapes)) for name in names_of(path)[::-10]] for path in ENDPOINTS}


def test_every_shape_is_tried_by_day():
    assert {shape for fields in fields_by_day().values() for _, shape in fields} == set(SHAPES)


@pytest.mark.parametrize(("path", "fields"), fields_by_day().items(), ids=list(ENDPOINTS))
def test_a_body_at_its_bounds_costs_few_calls(run, served, path, fields):
    """In the nightly run all fields have all shapes."""
    assert run(fields_of_many_calls(served, path, fields)) == {}


@pytest.mark.nightly
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_field_with_every_shape(run, served, path, shape):
    assert run(fields_of_many_calls(served, path, [(name, shape) for name in names_of(path)])) == {}


def test_few_names_are_compared_and_told(monkeypatch, caplog):
    """However many are unknown."""
    num_comparisons = 0

    def counting(name, known):
        nonlocal num_comparisons
        num_comparisons += 1
        return ""

    monkeypatch.setattr(field_rules, "suggestion", counting)
    rules = FieldRules(TokenizeRequest, {})
    with pytest.raises(ApiError, match="10000 fields are unknown here, at most 32"):
        rules.check({f"name{number}": 1 for number in range(10_000)})
    assert num_comparisons == 0
    for request in range(20):
        rules.check({f"name{request}_{number}": 1 for number in range(30)})
    assert num_comparisons == 600
    assert sum(record.getMessage().count("name") for record in caplog.records) <= 32
    assert len(caplog.records) <= 2
    # what was told is not compared again
    rules.check({f"name0_{number}": 1 for number in range(30)})
    assert num_comparisons == 600
