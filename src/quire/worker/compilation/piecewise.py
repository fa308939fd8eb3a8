"""A model cut into pieces at the operators that look at its caches, and code made of each by torch's compiler (4.6.3).

    ids, positions -> | piece 0 | attention | piece 1 | attention | ... | piece L | -> hidden states

The forward pass is traced once, for any number of tokens above none. Weights are arguments of a piece, so that pieces
which are alike are one function: a model of 28 layers has 29 pieces and three functions. What the compiler has made
lies in a folder and is found there at the next start, by what the piece computes.

Owns the functions and the order in which they are called. Called by the model runner in the place of `forward`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from quire.cache_folder import cache_folder, check_private
from quire.errors import one_line
from quire.worker.attention import attention_layers
from quire.worker.forward_context import ForwardContext, current_forward_context, forward_context, profiling_context
from quire.worker.kernels import operators
from quire.worker.layers.experts import Experts
from quire.worker.state_cache import recurrent_layers

_logger = logging.getLogger(__name__)
# These read and write what is kept of sequences: no compiler may look into them, move or copy them.
_LOOKS_AT_CACHES = (torch.ops.quire.attention.default, torch.ops.quire.recurrent.default)
# Of the trace: like no other size of a model, so that nothing else is taken for a number of tokens.
_TRACED_TOKENS = 499
_TRIED_TOKENS = (1, 2)
# the place of `counts` among the arguments of grouped_linear
_COUNTS = 5


class CannotCompileError(Exception):
    """Why a model cannot be cut into pieces."""


@dataclass(frozen=True)
class _Segment:
    """Operators between two cuts, or the one at a cut. `inputs` and `outputs` are nodes of the whole trace."""

    module: fx.GraphModule
    is_piece: bool
    takes_num_tokens: bool
    inputs: list[fx.Node]
    weights: list[Tensor]
    outputs: list[fx.Node]

    @property
    def name(self) -> str:
        """The same for what computes the same."""
        placeholders = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        shapes = [_description(node.meta["val"]) for node in placeholders]
        return "\n".join([self.module.code, *shapes])


@dataclass(frozen=True)
class _Call:
    """A segment as it is called: values have numbers."""

    run: Callable[..., Any]
    takes_num_tokens: bool
    inputs: tuple[int, ...]
    weights: tuple[Tensor, ...]
    outputs: tuple[int, ...]
    # that nobody needs behind it
    last_used: tuple[int, ...]


class PiecewiseForward:
    """Stands in the place of a model's `forward`, and takes what it takes."""

    def __init__(self, model: nn.Module, max_tokens: int, device: torch.device, *, has_adapters: bool) -> None:
        """After weights are packed. Raises CannotCompileError."""
        self._forward: Callable[..., Tensor] = model.forward
        # what a step may leave out: then no token has an adapter, and none is nobody's
        self._no_slots = torch.full((max_tokens,), -1, dtype=torch.int32, device=device) if has_adapters else None
        self._no_padding = None
        if any(isinstance(module, Experts) for module in model.modules()):
            self._no_padding = torch.zeros(max_tokens, dtype=torch.bool, device=device)
        self._max_tokens = max_tokens
        ids = torch.zeros(_TRACED_TOKENS, dtype=torch.int64, device=device)
        inputs = [ids, torch.zeros_like(ids)]
        if self._no_slots is not None:
            inputs.append(torch.full((_TRACED_TOKENS,), -1, dtype=torch.int32, device=device))
        if self._no_padding is not None:
            inputs.append(torch.zeros(_TRACED_TOKENS, dtype=torch.bool, device=device))
        with torch.no_grad():
            traced = self._trace(inputs)
            segments = _cut(traced)
            functions = _functions(segments)
        self.num_pieces = sum(segment.is_piece for segment in segments)
        self.num_functions = len(functions)
        self._calls, self._result = _program(traced, segments, functions)
        _logger.info("the forward pass is %d pieces, which are %d functions", self.num_pieces, self.num_functions)

    def _trace(self, inputs: list[Tensor]) -> fx.GraphModule:
        from torch.fx.experimental.proxy_tensor import make_fx

        def run(input_ids: Tensor, positions: Tensor, *more: Tensor) -> Tensor:
            left = list(more)
            slots = None if self._no_slots is None else left.pop(0)
            padding = None if self._no_padding is None else left.pop(0)
            with forward_context(ForwardContext((), adapter_slots=slots, is_padding_T=padding, is_traced=True)):
                return self._forward(input_ids, positions)

        try:
            return make_fx(run, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)
        except Exception as error:  # whatever a model does that has no meaning without numbers
            raise CannotCompileError(f"its forward pass cannot be traced ({_told(error)})") from error

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        input_embeds: Tensor | None = None,
        intermediate_tensors: Any = None,
    ) -> Tensor:
        num_tokens = len(input_ids)
        is_other = input_embeds is not None or intermediate_tensors is not None or positions.ndim != 1
        if is_other or not 1 <= num_tokens <= self._max_tokens:
            more = () if input_embeds is None and intermediate_tensors is None else (input_embeds, intermediate_tensors)
            return self._forward(input_ids, positions, *more)
        values: list[Any] = [input_ids, positions]
        context = current_forward_context()
        if self._no_slots is not None:
            slots = context.adapter_slots
            values.append(self._no_slots[:num_tokens] if slots is None else slots)
        if self._no_padding is not None:
            padding = context.is_padding_T
            values.append(self._no_padding[:num_tokens] if padding is None else padding)
        values += [None] * (self._result + 1 - len(values))
        for call in self._calls:
            arguments = [values[index] for index in call.inputs]
            head = (num_tokens,) if call.takes_num_tokens else ()
            results = call.run(*head, *arguments, *call.weights)
            del arguments
            for index in call.last_used:
                values[index] = None
            for index, result in zip(call.outputs, results, strict=True):
                values[index] = result
        hidden: Tensor = values[self._result]
        return hidden


def _cut(traced: fx.GraphModule) -> list[_Segment]:
    """In the order of the trace."""
    runs: list[list[fx.Node]] = [[]]
    for node in traced.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or _is_size(node):
            continue
        if node.target in _LOOKS_AT_CACHES:
            runs += [[node], []]
        else:
            runs[-1].append(node)
    runs = [nodes for nodes in runs if nodes]
    _check_memory(runs)
    return [_segment(traced, nodes) for nodes in runs]


def _segment(traced: fx.GraphModule, nodes: list[fx.Node]) -> _Segment:
    inside = set(nodes)
    needed: dict[fx.Node, None] = {}

    def note(node: fx.Node) -> None:
        if node in inside:
            return
        if _is_size(node) and not _is_num_tokens(node):
            for argument in node.all_input_nodes:
                note(argument)
        else:
            needed.setdefault(node)

    for node in nodes:
        for argument in node.all_input_nodes:
            note(argument)
    sizes = [node for node in needed if _is_size(node)]
    weights = [node for node in needed if node.op == "get_attr"]
    inputs = [node for node in needed if node not in sizes and node not in weights]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    if sizes:
        tokens = graph.placeholder("num_tokens")
        tokens.meta["val"] = sizes[0].meta["val"]
        copies.update(dict.fromkeys(sizes, tokens))
    for number, node in enumerate([*inputs, *weights]):
        copies[node] = graph.placeholder(f"x{number}")
        copies[node].meta["val"] = node.meta["val"] if node in inputs else None

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:
            target, arguments = _without_counts(node)
            arguments = fx.map_arg(arguments, copy_of)
            keywords = fx.map_arg(node.kwargs, copy_of)
            # named by its place: of the piece, not of the trace
            copies[node] = graph.create_node(node.op, target, arguments, keywords, f"v{len(copies)}")
        return copies[node]

    for node in nodes:
        copy_of(node)
    outputs = [node for node in nodes if any(not _is_size(user) and user not in inside for user in node.users)]
    graph.output(tuple(copies[node] for node in outputs))
    tensors = [getattr(traced, str(node.target)) for node in weights]
    mode = _fake_mode(traced)
    for node, tensor in zip(weights, tensors, strict=True):
        copies[node].meta["val"] = mode.from_tensor(tensor, static_shapes=True)
    is_piece = nodes[0].target not in _LOOKS_AT_CACHES
    return _Segment(fx.GraphModule(nn.Module(), graph), is_piece, bool(sizes), inputs, tensors, outputs)


# Where nothing is counted: of an operator that could write to an argument and is given none, torch's compiler (2.13)
# takes the result for a tuple.
_library = torch.library.Library("quire", "FRAGMENT")
_library.define(
    "uncounted_linear(Tensor x, Tensor? ids, Tensor[] packed, Tensor[] biases, SymInt num_rows, int first=0) -> Tensor"
)


def _uncounted_linear(
    x: Tensor, ids: Tensor | None, packed: list[Tensor], biases: list[Tensor], num_rows: int, first: int = 0
) -> Tensor:
    result: Tensor = operators.grouped_linear(x, ids, packed, biases, num_rows, None, first)
    return result


_library.impl("uncounted_linear", _uncounted_linear, "CompositeExplicitAutograd")
torch.library.register_fake("quire::uncounted_linear", _uncounted_linear, lib=_library)


def _without_counts(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """The operator of a node and its arguments."""
    if node.target is not operators.grouped_linear or node.args[_COUNTS] is not None:
        return node.target, node.args
    return torch.ops.quire.uncounted_linear.default, node.args[:_COUNTS] + node.args[_COUNTS + 1 :]


def _check_memory(runs: Sequence[list[fx.Node]]) -> None:
    """A piece gives out what it computes, and where that shares memory with what another piece was given, is not kept:
    none may write there."""
    made_in: dict[int, int] = {}
    for number, nodes in enumerate(runs):
        for node in nodes:
            if node.target in _LOOKS_AT_CACHES:
                continue
            for tensor in _written(node):
                if made_in.get(_storage(tensor), number) != number:
                    raise CannotCompileError(f"{node.target} changes in place what was computed before attention")
            for tensor in _tensors(node.meta.get("val")):
                made_in.setdefault(_storage(tensor), number)


def _written(node: fx.Node) -> Iterator[Tensor]:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for argument, value in zip(schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, fx.Node):
            if value.op == "placeholder":
                raise CannotCompileError(f"{node.target} changes an input")
            if value.op != "get_attr":
                yield from _tensors(value.meta["val"])


def compiled(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """What torch's compiler makes of a piece. `inputs`: fake tensors, and the number of tokens."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx

    _set_compiler_folder()
    mode = next(value.fake_mode for value in inputs if isinstance(value, Tensor))
    try:
        with tracing(TracingContext(mode)):
            # of operators in lower precision each result is rounded, as it is where nothing is compiled
            function: Callable[..., Any] = compile_fx(module, inputs, config_patches={"emulate_precision_casts": True})
    except Exception as error:  # the compiler's own, and those of the compiler that it calls
        raise CannotCompileError(f"a piece cannot be compiled ({_told(error)})") from error
    num_tokens = next((value for value in inputs if isinstance(value, torch.SymInt)), None)
    if num_tokens is not None and num_tokens.node.maybe_as_int() is not None:
        raise CannotCompileError("its code is for one number of tokens")
    return function


def _functions(segments: Sequence[_Segment]) -> dict[str, Callable[..., Any]]:
    """A function for each kind of piece."""
    functions: dict[str, Callable[..., Any]] = {}
    for segment in segments:
        if segment.is_piece and segment.name not in functions:
            inputs = [node.meta["val"] for node in segment.module.graph.nodes if node.op == "placeholder"]
            functions[segment.name] = compiled(segment.module, inputs)
    return functions


def _program(
    traced: fx.GraphModule, segments: Sequence[_Segment], functions: dict[str, Callable[..., Any]]
) -> tuple[list[_Call], int]:
    """Calls with numbers in the place of nodes, and the number of the result, which is the last one."""
    output = next(node for node in traced.graph.nodes if node.op == "output")
    result = output.args[0]
    nodes = [node for node in traced.graph.nodes if node.op == "placeholder"]
    nodes += [node for segment in segments for node in segment.outputs if node is not result]
    if not isinstance(result, fx.Node) or result.op == "placeholder":
        raise CannotCompileError("its hidden states are not computed")
    numbers = {node: number for number, node in enumerate([*nodes, result])}
    last: dict[int, int] = {}
    for place, segment in enumerate(segments):
        last.update(dict.fromkeys([numbers[node] for node in segment.inputs], place))
    calls = []
    for place, segment in enumerate(segments):
        calls.append(
            _Call(
                run=functions[segment.name] if segment.is_piece else segment.module.forward,
                takes_num_tokens=segment.takes_num_tokens,
                inputs=tuple(numbers[node] for node in segment.inputs),
                weights=tuple(segment.weights),
                outputs=tuple(numbers[node] for node in segment.outputs),
                last_used=tuple(number for number, at in last.items() if at == place),
            )
        )
    return calls, numbers[result]


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _is_num_tokens(node: fx.Node) -> bool:
    """Not something that is computed of it."""
    return bool(node.meta["val"].node.expr.is_symbol)


def _fake_mode(traced: fx.GraphModule) -> Any:
    first = next(iter(traced.graph.nodes))
    return first.meta["val"].fake_mode


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [one for one in values if isinstance(one, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


def _description(value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    return f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()}"


def _set_compiler_folder() -> None:
    """torch keeps what it has compiled in a folder that others may write to, unless it is told another one."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    if name in os.environ:
        return
    try:
        folder = cache_folder() / "compiled"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        check_private(folder)
    except OSError as error:
        raise CannotCompileError(str(error)) from error
    os.environ[name] = str(folder)


def compile_model(model: Any, max_tokens: int, device: torch.device, *, has_adapters: bool) -> PiecewiseForward:
    """Exchange a model's forward pass for compiled pieces. Before caches are there. Raises CannotCompileError."""
    if not attention_layers(model) and not recurrent_layers(model):
        raise CannotCompileError("it has no layer that keeps anything of a sequence")
    try:
        compiled = PiecewiseForward(model, max_tokens, device, has_adapters=has_adapters)
    except CannotCompileError:
        raise
    except Exception as error:  # a trace of a kind that nobody has seen: the model still runs as it is
        raise CannotCompileError(f"it cannot be cut ({_told(error)})") from error
    for num_tokens in _TRIED_TOKENS[:max_tokens]:
        # before anybody waits for a step: code that fails, and what is only made at a first call
        ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        try:
            with torch.inference_mode(), forward_context(profiling_context()):
                compiled(ids, ids)
        except Exception as error:
            raise CannotCompileError(f"its code does not run ({_told(error)})") from error
    model.forward = compiled
    return compiled
