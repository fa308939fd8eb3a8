"""The Jinja environment in which chat templates run: what they may use, and what they can never reach.

A template comes with a checkpoint, so it is foreign code. It runs in Jinja's immutable sandbox, sees plain data only,
and spends a budget (`template_budget`): the code that Jinja makes of it counts its steps. The names and filters are
those that Transformers offers, so a template renders the same text here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from types import CodeType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

from quire.renderer.template_budget import STEPS_OF_CALL, WHOLE, Allowance, Budget
from quire.renderer.template_operations import check_call, counted_filters, counted_tests, to_json

# Real ones have up to 30,000 characters.
_MOST_CHARACTERS = 262_144
_MOST_CHARACTERS_OF_DATE = 200
_MOST_SUMMANDS = 8
# A rendering makes no greater ones either (template_budget.py).
_GREATEST_NUMBER = 1 << 60


@dataclass(frozen=True)
class CompileLimits:
    """What a template may be, and the Python code that Jinja makes of it."""

    num_nodes: int
    num_characters: int


# Of one that comes with a request. Python compiles all of the code at once and lets nobody else run meanwhile: at most
# half a microsecond a character. Real templates of 25,000 characters become so much code.
OF_REQUEST = CompileLimits(num_nodes=4_096, num_characters=96_000)


def compile_template(
    source: str, now: Callable[[], datetime] = datetime.now, limits: CompileLimits | None = None
) -> jinja2.Template:
    """Raises jinja2.TemplateError if the source is no template, or is beyond these limits."""
    environment = ChatSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
    environment.limits = limits

    def strftime_now(pattern: str) -> str:
        if len(pattern) > _MOST_CHARACTERS_OF_DATE:
            raise SecurityError(f"a date's format has more than {_MOST_CHARACTERS_OF_DATE} characters")
        return now().strftime(pattern)

    environment.filters = counted_filters({**environment.filters, "tojson": pass_context(to_json)})
    environment.tests.update(counted_tests(environment.tests))
    # it makes a text of any length, of no use in a prompt
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = strftime_now
    environment.globals["namespace"] = PlainNamespace
    environment.globals["dict"] = _PlainDict()
    tree = parse_template(source, environment)
    with _template_errors():
        for count, node in enumerate(tree.find_all(nodes.Node)):
            if isinstance(node, nodes.Const) and isinstance(node.value, int) and abs(node.value) > _GREATEST_NUMBER:
                raise jinja2.TemplateError(f"it holds a number greater than {_GREATEST_NUMBER:,}")
            if limits is not None and count >= limits.num_nodes:
                text = f"it has more than {limits.num_nodes:,} nodes, the most that a request brings"
                raise jinja2.TemplateError(text)
        return environment.from_string(tree)


def parse_template(source: str, environment: jinja2.Environment | None = None) -> nodes.Template:
    """Its tree. Raises jinja2.TemplateError if the source is no template."""
    if len(source) > _MOST_CHARACTERS:
        raise jinja2.TemplateError(f"it has {len(source):,} characters, at most {_MOST_CHARACTERS:,} are allowed")
    with _template_errors():
        return (environment or ChatSandbox(extensions=[GenerationTag, loopcontrols])).parse(source)


@contextlib.contextmanager
def _template_errors() -> Iterator[None]:
    """The code that Jinja makes of a template may be too much for Python, which says so in several ways."""
    try:
        yield
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise jinja2.TemplateError(f"it is nested too deep, or holds a value of no use ({error})") from error


def render(template: jinja2.Template, values: dict[str, Any], allowance: Allowance = WHOLE) -> str:
    """Raises TemplateBudgetError if the template spends more, and whatever the template raises."""
    context = template.new_context(values)
    budget = context.budget = Budget(allowance)  # type: ignore[attr-defined]
    return budget.concat(template.root_render_func(context))


class _BudgetContext(Context):
    """Carries the budget to whatever runs in it."""

    budget: Budget

    def derived(self, locals: dict[str, Any] | None = None) -> Context:  # noqa: A002
        inner = super().derived(locals)
        inner.budget = self.budget  # type: ignore[attr-defined]
        return inner


class _CountingCode(CodeGenerator):
    """Writes the Python code of a template, with the budget's counting in it. The methods have Jinja's names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # by identity, with what it is the identity of
        self._loop_bodies: dict[int, Any] = {}

    def write_commons(self) -> None:
        super().write_commons()
        for name in ("step", "made", "copied", "joined", "add", "text", "concat", "looked"):
            self.writeline(f"{name} = context.budget.{name}")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        if node.test is not None:
            # a comparison without an operator: its value is that of its expression, and it is counted
            node.test = nodes.Compare(node.test, [], lineno=node.lineno, environment=self.environment)
        self._loop_bodies[id(node.body)] = node.body
        super().visit_For(node, frame)

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        if id(nodes) in self._loop_bodies:
            self.writeline("step()")
        super().blockvisit(nodes, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        is_brief = len(node.ops) == 1 and node.ops[0].op in ("eq", "ne") and isinstance(node.ops[0].expr, nodes.Const)
        self.write("(" if is_brief else "(step() and ")
        super().visit_Compare(node, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:  # noqa: N802
        """What is compared may be long."""
        if isinstance(node.expr, nodes.Const):
            super().visit_Operand(node, frame)
            return
        self.write(f" {operators[node.op]} looked(")
        self.visit(node.expr, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("joined((")
        for side in node.nodes:
            self.visit(side, frame)
            self.write(", ")
        self.write("))")

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        """Some of a chain at once."""
        summands: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add) and len(summands) < _MOST_SUMMANDS:
            summands.insert(0, left.right)
            left = left.left
        self.write("add(")
        for summand in (left, *summands):
            self.visit(summand, frame)
            self.write(", ")
        self.write(")")

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: CodeGenerator._FinalizeInfo) -> None:
        self.write("text(")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self._visit_made(super().visit_List, node, frame, node.items)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        self._visit_made(super().visit_Tuple, node, frame, node.items if node.ctx == "load" else [])

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self._visit_made(super().visit_Dict, node, frame, [item.value for item in node.items])

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("copied(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def _visit_made(
        self, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame, items: Iterable[nodes.Node]
    ) -> None:
        """What holds constants only is as small as it looks."""
        if all(isinstance(item, nodes.Const) for item in items):
            visit(node, frame)
            return
        self.write("made(")
        visit(node, frame)
        self.write(")")


class ChatSandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, whose templates count what they spend."""

    intercepted_binops = frozenset({"*", "**", "%", "-"})
    code_generator_class = _CountingCode
    context_class = _BudgetContext
    limits: CompileLimits | None = None

    def _compile(self, source: str, filename: str) -> CodeType:
        """Jinja's hook: the Python code that it has made of a template is compiled."""
        if self.limits is not None and len(source) > self.limits.num_characters:
            text = f"it becomes {len(source):,} characters of code, and a request brings at most "
            raise jinja2.TemplateError(f"{text}{self.limits.num_characters:,}")
        return super()._compile(source, filename)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget: Budget = context.budget  # type: ignore[attr-defined]
        budget.step()
        if operator == "*":
            budget.check_product(left, right)
        elif operator == "**":
            budget.check_power(left, right)
        elif isinstance(left, str):
            budget.check_format(left, right if isinstance(right, tuple) else (right,))
        return budget.made(super().call_binop(context, operator, left, right))

    # no `self`, which may be a key
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget: Budget = __context.budget  # type: ignore[attr-defined]
        budget.spend(STEPS_OF_CALL)
        args = check_call(budget, __obj, args, kwargs)
        return budget.made(super().call(__context, __obj, *args, **kwargs))


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training. Here its body is simply rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class PlainNamespace(Namespace):
    """`namespace(...)` without names that begin with an underscore: those lead into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`, which may be a key
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        """Not what it holds, which may be others that hold others."""
        return "<Namespace>"


class _PlainDict:
    """`dict(...)` as a function: the class itself would offer more than its instances."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace must not hold {name!r}: names that begin with an underscore are refused")


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
