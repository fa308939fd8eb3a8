"""What a load of many requests asks for: which kinds, how many of each, and what each answer is held against.

Of a hundred requests sixty are streams; ten are left in the middle, ten have two to four answers, five end at a stop
string, five are wrong and must be refused, five have a form, five show log-probabilities. A request follows from its
number alone.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.support.load.plain_client import Answer, Choice

_NUM_PROMPTS = 64
_MOST_TOKENS = 16
KINDS = ("plain", "left", "several", "stopped", "refused", "form", "logprobs")
# of a warm-up
_EACH_FIRST = 5
_FORM_TOKENS = 64
# Rows that are computed beside others may differ in their last bits.
LOGPROB_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Form:
    """A schema, the fields that ask for it, and whether a value follows it."""

    fields: dict[str, Any]
    holds: Callable[[Any], bool]


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _compact(schema: dict[str, Any]) -> dict[str, Any]:
    """A small model goes on with white space for ever where it may."""
    return {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}


def _is_paint(value: Any) -> bool:
    is_whole = isinstance(value, dict) and list(value) == ["colour", "size"] and type(value["size"]) is int
    return is_whole and value["colour"] in ("red", "green", "blue") and 0 <= value["size"] <= 99


def _is_party(value: Any) -> bool:
    if not isinstance(value, dict) or list(value) != ["known", "names"] or not isinstance(value["names"], list):
        return False
    return isinstance(value["known"], bool) and 1 <= len(value["names"]) <= 3 and set(value["names"]) <= {"Ada", "Bo"}


def _is_words(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(re.fullmatch("[a-z]{3}", str(word)) for word in value)


_PAINT = _object(colour={"enum": ["red", "green", "blue"]}, size={"type": "integer", "minimum": 0, "maximum": 99})
_PARTY = _object(
    known={"type": "boolean"}, names={"type": "array", "items": {"enum": ["Ada", "Bo"]}, "minItems": 1, "maxItems": 3}
)
_WORDS = {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{3}$"}, "minItems": 2, "maxItems": 2}
FORMS = (
    Form({"response_format": {"type": "json_schema", "json_schema": {"name": "paint", "schema": _PAINT}}}, _is_paint),
    Form(_compact(_PARTY), _is_party),
    Form(_compact(_WORDS), _is_words),
)


@dataclass(frozen=True)
class Request:
    """What is sent, and of which kind it is."""

    kind: str
    fields: dict[str, Any]
    leave_after: float | None = None
    form: Form | None = None

    @property
    def key(self) -> str:
        """The same for requests with the same answer: a stream says what a whole answer says."""
        return json.dumps({name: value for name, value in self.fields.items() if name != "stream"}, sort_keys=True)


def _prompt(number: int) -> str:
    return f"Number {number} is"


def request(number: int, seed: int | str) -> Request:
    """Number `number` of the load."""
    draw = random.Random(f"{seed}:{number}")
    fields: dict[str, Any] = {
        "prompt": _prompt(draw.randrange(_NUM_PROMPTS)),
        "max_tokens": draw.randint(1, _MOST_TOKENS),
        "temperature": 0,
        "ignore_eos": True,
        "stream": draw.random() < 0.6,
    }
    chance = draw.random()
    if chance < 0.1:
        return Request("left", {**fields, "max_tokens": 200}, leave_after=draw.random() * 0.02)
    if chance < 0.2:
        return Request("several", {**fields, "n": draw.randint(2, 4), "seed": 1})
    if chance < 0.25:
        return Request("stopped", {**fields, "stop": [" the", "e"]})
    if chance < 0.3:
        return Request("refused", {**fields, **draw.choice([{"temperature": 9}, {"n": 0}, {"max_tokens": "x"}])})
    if chance < 0.35:
        form = draw.choice(FORMS)
        return Request("form", {**fields, **form.fields, "max_tokens": _FORM_TOKENS, "ignore_eos": False}, form=form)
    if chance < 0.4:
        return Request("logprobs", {**fields, "logprobs": draw.randint(0, 3)})
    return Request("plain", fields)


def warm_up(most_tokens: int) -> Iterator[Request]:
    """Of every kind some streams and some whole answers. Who leaves does so long before the end, which `most_tokens`,
    all that one may ask for, put off for long enough."""
    missing = Counter({(kind, is_stream): _EACH_FIRST for kind in KINDS for is_stream in (False, True)})
    numbers = itertools.count()
    while missing.total():
        asked = request(next(numbers), "warm-up")
        what = asked.kind, asked.fields["stream"]
        if missing[what]:
            missing[what] -= 1
            is_left = asked.kind == "left"
            yield Request("left", {**asked.fields, "max_tokens": most_tokens}, leave_after=0.05) if is_left else asked


def logprob_questions() -> list[dict[str, Any]]:
    """For an idle server: each prompt once, with as many tokens as anybody asks for with log-probabilities."""
    common = {"max_tokens": _MOST_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    return [{"prompt": _prompt(number), **common} for number in range(_NUM_PROMPTS)]


def fault_of(
    asked: Request, answer: Answer, right: list[str], alone: Choice | None, *, follows_forms: bool
) -> str | None:
    """What is wrong with an answer with status 200. `right`: its texts; `alone`: what an idle server said to its
    prompt, with log-probabilities. `follows_forms`: not so of a core without a model."""
    choices = answer.choices()
    texts = [choice.text for choice in choices]
    if texts != right:
        return f"{texts!r}, not {right!r}"
    if asked.form is not None and follows_forms:
        return _form_fault(asked.form, choices[0])
    if asked.kind == "logprobs" and alone is not None:
        return _logprobs_fault(choices[0], alone, asked.fields["max_tokens"])
    return None


def _form_fault(form: Form, choice: Choice) -> str | None:
    try:
        is_right = choice.finish_reason == "stop" and form.holds(json.loads(choice.text))
    except ValueError:
        is_right = False
    return None if is_right else f"{choice.text!r} ({choice.finish_reason}) does not follow its schema"


def _logprobs_fault(choice: Choice, alone: Choice, count: int) -> str | None:
    found, expected = choice.logprobs, alone.logprobs[:count]
    if len(found) != count or len(choice.tokens) != count:
        return f"{len(found)} log-probabilities and {len(choice.tokens)} tokens, not {count}"
    if choice.tokens != alone.tokens[:count]:
        return f"tokens {choice.tokens!r}, not {alone.tokens[:count]!r}"
    if not all(math.isfinite(value) and value <= 0 for value in found):
        return f"log-probabilities {found!r}: must be finite and at most 0"
    worst = max(abs(value - other) for value, other in zip(found, expected, strict=True))
    return None if worst <= LOGPROB_TOLERANCE else f"log-probabilities {found!r}, not {expected!r}: {worst:.2g} apart"
