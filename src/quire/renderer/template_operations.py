"""The filters and methods that a chat template may use, and what each may make.

Those that can make much from little are weighed before they run. What no chat template needs and cannot be weighed
simply is not offered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import BlockReference, Context
from jinja2.utils import pass_context

from quire.renderer.template_budget import STEPS_OF_CALL, Budget, TemplateBudgetError

# A check is given what the operation is given: the budget, the value, and the arguments. It returns the value, which
# may have become a list.
Check = Callable[..., Any]

_MOST_INDENT = 16
_STEPS_OF_ELEMENT = 16
_BYTES_OF_PAIR = 192
_MOST_DIFFERENT = 1_000
_MOST_DIGITS = 100
# Texts of which no operation without arguments makes much.
_SMALL = 4_096


def _wide(budget: Budget, text: Any, width: int = 80, *rest: Any) -> Any:
    budget.check_room(4 * max(int(width), len(text)))
    return text


def _tabs(budget: Budget, text: str, tabsize: int = 8) -> str:
    budget.check_room(len(text) * 4 + text.count("\t") * max(0, tabsize))
    return text


def _replace(budget: Budget, text: Any, old: str = "", new: str = "", *rest: Any, **named: Any) -> Any:
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        budget.check_room(4 * (len(text) + text.count(old) * len(new)))
    return text


def _join(budget: Budget, values: Any, d: Any = "", attribute: Any = None) -> Any:
    values = budget.listed(values)
    if isinstance(values, str):
        budget.check_room(4 * len(values) * (1 + len(str(d))))
    elif hasattr(values, "__len__"):
        budget.check_room(budget.weight(values) + len(values) * budget.weight(d))
    return values


def _method_join(budget: Budget, separator: str, values: Any = ()) -> Any:
    return _join(budget, values, separator)


def _split(budget: Budget, text: str, sep: str | None = None, maxsplit: int = -1) -> str:
    parts = text.count(sep) if isinstance(sep, str) and sep else len(text) // 2
    budget.check_room(32 * (parts if maxsplit < 0 else min(parts, maxsplit)))
    budget.check_search(text, sep)
    return text


def _search(budget: Budget, text: Any, chars: Any = None, *rest: Any) -> Any:
    budget.check_search(text, chars)
    return text


def _format(budget: Budget, text: Any, *arguments: Any, **named: Any) -> Any:
    budget.check_format(str(text), [*arguments, *named.values()])
    return text


def _of_characters(budget: Budget, value: Any, *rest: Any, **named: Any) -> Any:
    """Each character may become an object."""
    value = budget.listed(value)
    if isinstance(value, str):
        budget.check_room(32 * len(value))
    return value


def _indent(budget: Budget, text: Any, width: int | str = 4, *rest: Any, **named: Any) -> Any:
    text = str(text)
    budget.check_room(4 * (len(text) + (1 + text.count("\n")) * (len(width) if isinstance(width, str) else int(width))))
    return text


def _round(budget: Budget, value: Any, precision: int = 0, *rest: Any, **named: Any) -> Any:
    if abs(int(precision)) > _MOST_DIGITS:
        raise TemplateBudgetError(f"it rounds to more than {_MOST_DIGITS} digits")
    return value


def _sum(budget: Budget, values: Any, attribute: Any = None, start: Any = 0) -> Any:
    if not isinstance(start, (int, float)):
        raise TemplateBudgetError("it adds up something else than numbers")
    return values


def _batch(budget: Budget, values: Any, linecount: int, fill_with: Any = None) -> Any:
    budget.check_room(max(0, int(linecount)) * budget.weight(fill_with))
    return values


def _slice(budget: Budget, values: Any, slices: int, fill_with: Any = None) -> Any:
    return _batch(budget, values, slices, fill_with)


def _end(budget: Budget, text: Any, *rest: Any, **named: Any) -> Any:
    budget.check_room(sum(map(budget.weight, (*rest, *named.values()))))
    return text


def _each(budget: Budget, values: Any, *rest: Any, **named: Any) -> Any:
    """Each element, of a text each character, is looked at by Jinja's own code, which takes some 20 steps."""
    values = budget.listed(values)
    if hasattr(values, "__len__"):
        budget.spend(_STEPS_OF_ELEMENT * len(values))
    return values


def _sorted_items(budget: Budget, values: Any, *rest: Any, **named: Any) -> Any:
    """Each pair is an object."""
    values = _each(budget, values)
    budget.take(_BYTES_OF_PAIR * len(values))
    return values


def _unique(budget: Budget, values: Any, *rest: Any, **named: Any) -> Any:
    values = _each(budget, values)
    if len(values) > _MOST_DIFFERENT:
        raise TemplateBudgetError(f"it looks for different ones among more than {_MOST_DIFFERENT:,}")
    return values


def _written(budget: Budget, value: Any, *rest: Any, **named: Any) -> Any:
    """Lists and objects have been weighed when they were made."""
    if isinstance(value, str):
        budget.check_room(5 * budget.weight(value))
    return value


_FILTERS: dict[str, Check | None] = {
    **dict.fromkeys(("abs", "attr", "count", "d", "default", "first", "float", "int", "items", "last", "length")),
    **dict.fromkeys(("reverse", "safe")),
    **dict.fromkeys(("groupby", "map", "max", "min", "reject", "rejectattr", "select", "selectattr", "sort"), _each),
    **dict.fromkeys(("capitalize", "lower", "upper", "string", "e", "escape", "urlencode", "tojson"), _written),
    **dict.fromkeys(("list", "title", "wordcount"), _of_characters),
    "batch": _batch,
    "slice": _slice,
    "center": _wide,
    "dictsort": _sorted_items,
    "unique": _unique,
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "sum": _sum,
    "trim": _search,
    "truncate": _end,
}

# They do not go through what they are given.
_AT_ONCE = frozenset({"attr", "count", "d", "default", "first", "items", "last", "length", "safe"})

# They make a text of what they test.
_OF_TEXTS = frozenset({"lower", "upper"})

_TEXT_METHODS: dict[str, Check | None] = {
    **dict.fromkeys(("capitalize", "casefold", "count", "endswith", "find", "index", "lower", "partition")),
    **dict.fromkeys(("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric")),
    **dict.fromkeys(("isprintable", "isspace", "istitle", "isupper", "removeprefix", "removesuffix", "startswith")),
    **dict.fromkeys(("swapcase", "title", "upper")),
    **dict.fromkeys(("lstrip", "rstrip", "strip", "rfind", "rindex", "rpartition"), _search),
    **dict.fromkeys(("split", "rsplit"), _split),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _wide),
    "expandtabs": _tabs,
    "format": _format,
    "join": _method_join,
    "replace": _replace,
    "splitlines": _of_characters,
}
# Of lists, objects and numbers. The sandbox refuses those that change something.
_OTHER_METHODS = frozenset(
    {"copy", "count", "get", "index", "items", "keys", "values", "bit_length", "is_integer", "isdisjoint"}
)
# What the code of a loop or a block adds to a call for Jinja itself.
_FOR_JINJA = frozenset({"_loop_vars", "_block_vars"})
_OTHERS = (bytes, int, float, list, tuple, dict, set, frozenset, range, type, *map(type, ({}.keys(), {}.values())))


def counted_filters(filters: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Those that are offered, each of which counts what it does."""
    return {name: _counted(name, filters[name], check) for name, check in _FILTERS.items()}


def _counted(name: str, function: Callable[..., Any], check: Check | None) -> Callable[..., Any]:
    function = _given_context(function)

    @wraps(function)
    def counted(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget: Budget = context.budget  # type: ignore[attr-defined]
        budget.spend(STEPS_OF_CALL)
        if name in _AT_ONCE:
            pass
        elif args or kwargs or type(value) is not str or len(value) > _SMALL:
            budget.look_through(value)
            if check is not None:
                value = check(budget, value, *args, **kwargs)
        return budget.made(function(context, value, *args, **kwargs))

    return pass_context(counted)


def counted_tests(tests: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """What stands behind `is`, and in quotes in filters that choose."""
    return {name: _counted_test(name, test) for name, test in tests.items()}


def _counted_test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    function = _given_context(function)

    @wraps(function)
    def counted(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget: Budget = context.budget  # type: ignore[attr-defined]
        budget.step()
        if name in _OF_TEXTS:
            value = budget.text(value)
            budget.look_through(value)
        for other in (*args, *kwargs.values()):
            budget.look_through(value)
            budget.look_through(other)
        return function(context, value, *args, **kwargs)

    return pass_context(counted)


def _given_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """Some of Jinja's own take something of it before the value, or all of it."""
    needs = getattr(getattr(function, "jinja_pass_arg", None), "name", None)
    if needs == "context":
        return function

    @wraps(function)
    def called(context: Context, *args: Any, **kwargs: Any) -> Any:
        first = {None: (), "eval_context": (context.eval_ctx,), "environment": (context.environment,)}[needs]
        return function(*first, *args, **kwargs)

    return called


def check_call(budget: Budget, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments, which may have become lists."""
    if kwargs:
        kwargs = {name: value for name, value in kwargs.items() if name not in _FOR_JINJA}
    owner = getattr(function, "__self__", None)
    if owner is None:
        # the sandbox wraps a text's `format`
        function = getattr(function, "__wrapped__", function)
        owner = getattr(function, "__self__", None)
    if isinstance(owner, str):
        return _check_method(budget, owner, function.__name__, args, kwargs)
    if isinstance(owner, _OTHERS):
        if function.__name__ not in _OTHER_METHODS:
            raise _not_offered(function.__name__, type(owner).__name__)
        budget.look_through(owner)
    elif isinstance(function, BlockReference):
        raise SecurityError("it calls a block, which is not offered to chat templates")
    elif args or kwargs:
        budget.given((*args, *kwargs.values()))
    return args


def _check_method(
    budget: Budget, text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    if name not in _TEXT_METHODS:
        raise _not_offered(name, "text")
    budget.look_through(text)
    check = _TEXT_METHODS[name]
    if check is None:
        return args
    value = check(budget, text, *args, **kwargs)
    return (value,) if name == "join" else args


def _not_offered(name: str, kind: str) -> SecurityError:
    return SecurityError(f"it calls {name} of a {kind}, which is not offered to chat templates")


def to_json(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML and sorts keys; a prompt wants neither."""
    for text in (*(separators or ()), indent):
        if (len(text) if isinstance(text, str) else text or 0) > _MOST_INDENT:
            raise TemplateBudgetError(f"it writes JSON with more than {_MOST_INDENT} characters between two values")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(value)
    budget: Budget = context.budget  # type: ignore[attr-defined]
    return budget.concat(encoder.iterencode(value))
