"""From StructuredOutputsParams to a matcher of llguidance. Raises GrammarError for what is none.

Owns the limits of what following a form may take. They count work, so they end the same request in the same place on
every run. Called in the checking process, and by the worker for what has passed there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quire.errors import one_line
from quire.failpoints import failpoint
from quire.panics import PanicError, panics_are_errors
from quire.structured_outputs_params import StructuredOutputsParams

# Of a lexer's states, each 1 to 2 kB: what one grammar may hold in memory while it is followed.
_MOST_LEXER_STATES = 30_000
# Of what may come next in one place: an object of 1,000 optional properties has 4,000.
_MOST_ITEMS_IN_ROW = 20_000
# how the library says that there are so many
_LEXER_IS_FULL = "lexer error: too many"
# Steps of the lexer for one mask: at most 20 ms of one core.
_MOST_LEXER_STEPS = 200_000
# Where only one text can follow, the library would allow that text in one division into tokens only, its own. Here
# every token that fits is allowed, and the model chooses.
_ANY_TOKEN = '%llguidance {"no_forcing": true}\nstart: @form'
# fits nothing that can be followed
_NO_TOKEN = 2**32 - 1
_TAG_FIELDS = {"begin", "schema", "end"}


class GrammarError(Exception):
    """There is no grammar in what was given, or it allows nothing, or following it takes too much work."""


@dataclass(frozen=True)
class Limits:
    """What one mask may take. `num_items`: of the parser, each a rule that may be in progress. An item takes 1 to 5
    microseconds, and more the longer an ambiguous output becomes."""

    num_items: int


# Nearly every mask of a form that people use takes less: milliseconds at the worst.
EASY = Limits(num_items=2_000)
# An object of some 700 optional properties, an ambiguous rule behind twelve tokens: at most 0.3 s of one core.
HARD = Limits(num_items=20_000)


class Form:
    """What a form compiles to, when it is first needed: matchers at the beginning of an output, which are shared and
    never moved."""

    def __init__(self, params: StructuredOutputsParams, tokenizer: Any) -> None:
        failpoint("in_grammar_compile")
        self._tokenizer = tokenizer
        self._grammar = grammar_of(params)
        # its memory is full: whoever follows it still has the other limits, and who comes next needs a new one
        self.is_spent = False

    def note(self, error: str) -> None:
        """Why a matcher of it has stopped. All of them share the states of one lexer, which stay as long as it does."""
        self.is_spent |= error.startswith(_LEXER_IS_FULL)

    @cached_property
    def easy(self) -> Any:
        return matcher_of(self._grammar, self._tokenizer, EASY)

    @cached_property
    def companion(self) -> Any:
        """Another one, spoiled: it takes nothing and has nothing to do (`walk._Beside`)."""
        companion = self.easy.deep_copy()
        companion.consume_token(_NO_TOKEN)
        return companion

    @cached_property
    def hard(self) -> Any:
        return matcher_of(self._grammar, self._tokenizer, HARD)


def matcher_of(grammar: str, tokenizer: Any, limits: Limits = HARD) -> Any:
    """An LLMatcher of a grammar in the library's form: a text of Lark, or JSON with a list of grammars."""
    from llguidance import LLMatcher, LLParserLimits

    inner = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    inner[0]["name"] = "form"
    grammar = json.dumps({"grammars": [{"lark_grammar": _ANY_TOKEN}, *inner]})
    library_limits = LLParserLimits(
        max_lexer_states=_MOST_LEXER_STATES,
        max_items_in_row=_MOST_ITEMS_IN_ROW,
        step_lexer_fuel=_MOST_LEXER_STEPS,
        step_max_items=limits.num_items,
        verbose_errors=False,
    )
    try:
        with panics_are_errors:
            matcher = LLMatcher(tokenizer, grammar, limits=library_limits, log_level=0)
    except PanicError as error:
        raise GrammarError(str(error)) from None
    if matcher.is_error():
        raise GrammarError(reason_of(matcher))
    return matcher


def reason_of(matcher: Any) -> str:
    """What a matcher says of its error, without its state and the grammar."""
    text = str(matcher.get_error()).split("<state>")[0].replace("<non-verbose/>", "")
    return one_line(Exception(text))


def grammar_of(params: StructuredOutputsParams) -> str:
    """The same in the library's own form."""
    from llguidance import LLMatcher, grammar_from

    match params.kind:
        case "json":
            return json_grammar(json.loads(str(params.json)), params)
        case "json_object":
            return json_grammar({"type": "object"}, params)
        case "regex":
            return str(LLMatcher.grammar_from_regex(str(params.regex)))
        case "choice":
            return str(grammar_from("choice", json.dumps(params.choice)))
        case "grammar":
            try:
                return str(grammar_from("grammar", str(params.grammar)))
            except (ValueError, RecursionError) as error:
                raise GrammarError(one_line(error)) from None
        case _:
            return str(LLMatcher.grammar_from_lark(_tags(json.loads(str(params.structural_tag)))))


def json_grammar(schema: Any, params: StructuredOutputsParams) -> str:
    """A schema as a grammar; `params` says what may stand between the parts of a value."""
    from llguidance import LLMatcher

    # Also against what a schema says in "x-guidance": a keyword that is left out, or taken for a weaker one, would make
    # a promise that is not kept.
    options: Any = {"lenient": False, "coerce_one_of": False}
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    if schema is False:
        raise GrammarError("false forbids every output")
    schema = {} if schema is True else schema
    if params.disable_additional_properties:
        schema = _closed(schema)
    try:
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))
    except ValueError as error:
        raise GrammarError(one_line(error)) from None


def _closed(schema: Any) -> Any:
    """Every object with properties holds nothing else, unless it says so itself."""
    if isinstance(schema, list):
        return [_closed(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: _closed(value) for name, value in schema.items()}
    has_properties = isinstance(schema.get("properties"), dict) or isinstance(schema.get("patternProperties"), dict)
    return {"additionalProperties": False, **inner} if has_properties else inner


def _tags(asked: Any) -> str:
    """vLLM's structural tags: `triggers`, and `structures` of which each begins with one of them."""
    from llguidance import StructTag

    triggers, structures = asked.get("triggers"), asked.get("structures")
    if not _is_texts(triggers) or not isinstance(structures, list) or not structures or set(asked) - _KNOWN:
        raise GrammarError('must be {"structures": [{"begin", "schema", "end"}, ...], "triggers": [text, ...]}')
    tags = []
    for number, structure in enumerate(structures):
        if not isinstance(structure, dict) or set(structure) != _TAG_FIELDS:
            raise GrammarError(f"at /structures/{number}: must have begin, schema and end, and nothing else")
        begin, end, schema = structure["begin"], structure["end"], structure["schema"]
        if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict):
            raise GrammarError(f"at /structures/{number}: begin and end must be texts, schema an object")
        trigger = next((text for text in triggers if begin.startswith(text)), None)
        if trigger is None:
            raise GrammarError(f"at /structures/{number}/begin: {begin!r} begins with none of the triggers")
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
    return StructTag.to_grammar(tags, assume_special=False)


_KNOWN = {"type", "structures", "triggers"}


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) and text for text in value)
