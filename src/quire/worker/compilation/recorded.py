"""A model's forward pass as one program of C++ steps: recorded once, run for any number of tokens, without Python.

The model is called once with tensors of the largest step, in which nothing is computed: each operator of `kernels`
leaves its pointers and strides in the program instead. Views cost nothing and leave nothing. Operators of torch that
have a twin among the kernels (`_TWINS`) are exchanged; any other makes the model unfit, and it runs as it is written,
operator by operator. Between two steps of a program lies a barrier of a microsecond instead of several calls from
Python, and neighbours that treat every token by itself (norms, rotary positions, gates, the KV write) run together
while a token is in the cache: this is how Quire fuses on a CPU, and why model code needs no fused operators.

What changes from step to step is copied into buffers that stay where they are: token ids, positions, block tables and
numbers of states, slots of adapters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from quire.messages import TEXT
from quire.worker.attention import AttentionBatch, attention_layers
from quire.worker.forward_context import ForwardContext, current_forward_context, forward_context
from quire.worker.kernels import operators
from quire.worker.kernels.cpu.decode import DecodeGroup
from quire.worker.kernels.cpu.program import Program
from quire.worker.kernels.reference.activate import ACTIVATIONS
from quire.worker.state_cache import StateBatch, recurrent_layers

_logger = logging.getLogger(__name__)
_aten = torch.ops.aten

_VIEWS = {
    _aten.alias.default,
    _aten.detach.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.squeeze.dim,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.view.default,
    _aten._unsafe_view.default,
}


def _of_two(operator: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A sum or product of tensors of one shape, or of every row with a vector; the shorter type is converted first."""

    def run(x: Tensor, y: Tensor, **keywords: Any) -> Tensor:
        if isinstance(y, Tensor) and y.ndim == 1 and y.shape == x.shape[-1:]:
            y = y.expand_as(x)
        if keywords or not isinstance(y, Tensor) or x.shape != y.shape:
            raise CannotRecordError("a sum or product of unlike tensors")
        dtype = torch.promote_types(x.dtype, y.dtype)
        return operator(*(z if z.dtype == dtype else operators.convert(z, dtype) for z in (x, y)))

    return run


_product = _of_two(operators.multiply)


def _multiply(x: Tensor, y: Any) -> Tensor:
    return operators.scale(x, y, False) if isinstance(y, float | int) else _product(x, y)


def _divide(x: Tensor, y: Any) -> Tensor:
    if not isinstance(y, float | int):
        raise CannotRecordError("a quotient of tensors")
    return operators.scale(x, y, True)


def _copy(x: Tensor, *, memory_format: Any = None) -> Tensor:
    return operators.join([x])


def _to_type(x: Tensor, *, dtype: torch.dtype | None = None, **keywords: Any) -> Tensor:
    if dtype is None or any(value not in (None, False) for value in keywords.values()):
        raise CannotRecordError("a copy to somewhere else")
    return operators.convert(x, dtype)


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    kind = ACTIVATIONS.index(name)
    return lambda x: operators.activate(x, kind)


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return _activation("gelu" if approximate == "none" else "gelu_tanh")(x)


def _layer_norm(
    x: Tensor, shape: list[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *_: Any
) -> Tensor:
    if len(shape) != 1:
        raise CannotRecordError("a norm over several dimensions")
    return operators.layer_norm(x, weight, bias, eps)


def _join(tensors: list[Tensor], dim: int = 0) -> Tensor:
    if dim not in (-1, tensors[0].ndim - 1):
        raise CannotRecordError("tensors one below the other")
    return operators.join(tensors)


def _embedding(weight: Tensor, ids: Tensor, *_: Any, **__: Any) -> Tensor:
    return operators.look_up(weight, ids, None)


def _new_empty(like: Tensor, size: list[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    if dtype not in (None, like.dtype):
        raise CannotRecordError("memory of another type than that of the tensor it is to be like")
    return operators.new_rows(like, size)


# What models may use of torch itself.
_TWINS: dict[Any, Callable[..., Any]] = {
    _aten.add.Tensor: _of_two(operators.add),
    _aten.mul.Tensor: _multiply,
    _aten.div.Tensor: _divide,
    _aten.clone.default: _copy,
    _aten._to_copy.default: _to_type,
    _aten.relu.default: _activation("relu"),
    _aten.silu.default: _activation("silu"),
    _aten.sigmoid.default: _activation("sigmoid"),
    _aten.tanh.default: _activation("tanh"),
    _aten.gelu.default: _gelu,
    _aten.layer_norm.default: _layer_norm,
    _aten.embedding.default: _embedding,
    _aten.cat.default: _join,
    _aten.new_empty.default: _new_empty,
}


class CannotRecordError(Exception):
    """Why a model cannot become a program."""


class _OnlyRecorded(TorchDispatchMode):
    """Lets through what leaves a step or nothing."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch asks; a mode that may be compiled loads the compiler at its first use, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func in _VIEWS:
            return func(*args, **keywords)
        if (twin := _TWINS.get(func)) is not None:
            return twin(*args, **keywords)
        if func.namespace == "quire":
            return func(*args, **keywords)
        with self:  # what is made of other operators (flatten, reshape) is judged by these
            if (result := func.decompose(*args, **keywords)) is not NotImplemented:
                return result
        raise CannotRecordError(f"{func} has no kernel of Quire's")


class RecordedForward:
    """Stands in the place of a model's `forward`, and takes what it takes."""

    def __init__(self, model: nn.Module, max_tokens: int, max_sequences: int, blocks_per_row: int) -> None:
        before: Any = model.forward
        self._forward: Callable[..., Any] = before._forward if isinstance(before, RecordedForward) else before
        self._max_tokens = max_tokens
        self._input_ids = np.zeros(max_tokens, dtype=np.int64)
        self._positions = np.zeros(max_tokens, dtype=np.int64)
        self._adapter_slots = np.full(max_tokens, -1, dtype=np.int32)
        groups = sorted({layer.group for layer in attention_layers(model).values()})
        of_text = {layer.group for layer in attention_layers(model).values() if layer.part == TEXT}
        self._groups = {
            group: _GroupBuffers(max_tokens, max_sequences, blocks_per_row, has_begins=group in of_text)
            for group in groups
        }
        recurrent = list(recurrent_layers(model).values())
        self._states = _StateBuffers(max_sequences, recurrent[0].num_blocks, recurrent[0].places) if recurrent else None
        # of a stage of a pipeline: what the one before it has computed
        intermediate = getattr(self._forward, "intermediate", None)
        self._intermediate: Tensor | None = None
        if intermediate is not None:
            width, dtype = intermediate
            self._intermediate = torch.zeros(max_tokens, width, dtype=dtype)
        self.program = Program()
        self.hidden = self._record()
        _logger.info("the forward pass is a program of %d steps", len(self.program))

    @property
    def reads_tokens_alone(self) -> bool:
        """Neither states nor what another stage has made."""
        return self._states is None and self._intermediate is None

    def input_addresses(self) -> dict[str, int]:
        """As DecodeArgs names them."""
        return {
            "input_ids": self._input_ids.ctypes.data,
            "positions": self._positions.ctypes.data,
            "batch_adapter_slots": self._adapter_slots.ctypes.data,
        }

    def decode_group(self, group: int, tables: npt.NDArray[np.int32]) -> DecodeGroup:
        """`tables`: those of all rows."""
        return self._groups[group].addresses(tables)

    def _record(self) -> Tensor:
        metadata: list[Any] = [None] * (max(self._groups, default=-1) + 1)
        for group, buffers in self._groups.items():
            metadata[group] = buffers.batch
        inputs = torch.from_numpy(self._input_ids), torch.from_numpy(self._positions)
        slots = torch.from_numpy(self._adapter_slots)
        more = () if self._intermediate is None else (None, self._intermediate)
        states = self._states.batch if self._states is not None else None
        context = ForwardContext(tuple(metadata), states, adapter_slots=slots)
        by_token = [*inputs, slots, *more[1:]]
        with forward_context(context), self.program.recording(self._max_tokens, by_token), _OnlyRecorded():
            hidden: Tensor = self._forward(*inputs, *more)
        if hidden.shape[0] != self._max_tokens or not hidden.is_contiguous():
            raise CannotRecordError("the hidden states are not one row for each token")
        return hidden

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        input_embeds: Tensor | None = None,
        intermediate_tensors: Any = None,
    ) -> Tensor:
        num_tokens = len(input_ids)
        context = current_forward_context()
        is_recorded = input_embeds is None and positions.ndim == 1 and num_tokens <= self._max_tokens
        # tokens that see beyond themselves
        is_recorded &= all(batch is None or batch.ends_T is None for batch in context.metadata)
        if not is_recorded or (intermediate_tensors is not None and self._intermediate is None):
            hidden: Tensor = self._forward(input_ids, positions, input_embeds, intermediate_tensors)
            return hidden
        if self._intermediate is not None and intermediate_tensors is not None:
            self._intermediate[:num_tokens] = intermediate_tensors
        self._input_ids[:num_tokens] = input_ids.numpy()
        self._positions[:num_tokens] = positions.numpy()
        slots = context.adapter_slots
        self._adapter_slots[:num_tokens] = -1 if slots is None else slots.numpy()
        num_sequences = 0
        for group, buffers in self._groups.items():
            if context.is_profiling:
                buffers.keep_nothing(num_tokens)
            else:
                num_sequences = buffers.fill(context.metadata[group])
        if self._states is not None and not context.is_profiling:
            num_sequences = self._states.fill(context.states)
        wanted_n = context.wanted_n
        self.program.run(num_tokens, num_sequences, wanted_n)
        if wanted_n is not None and len(wanted_n) < num_tokens and self.program.can_narrow:
            self.hidden[wanted_n] = self.hidden[: len(wanted_n)].clone()
        return self.hidden[:num_tokens]


class RecordedLogits:
    """Stands in the place of a model's `compute_logits`.

    The logits are written to the same memory every time, so whoever wants to keep some copies them: fresh memory for 64
    rows of 150,000 words would cost more in page faults than a small model's forward pass.
    """

    def __init__(self, compute: Callable[[Tensor], Tensor], like: Tensor, max_rows: int) -> None:
        self._compute = compute
        self.hidden = like.new_empty(max_rows, like.shape[1])
        self.program = Program()
        with self.program.recording(max_rows), _OnlyRecorded():
            self.logits = compute(self.hidden)
        if self.logits.shape[0] != max_rows or not self.logits.is_contiguous():
            raise CannotRecordError("the logits are not one row for each row of hidden states")

    @property
    def max_rows(self) -> int:
        return self.hidden.shape[0]

    def __call__(self, hidden: Tensor) -> Tensor:
        num_rows = len(hidden)
        if num_rows > len(self.hidden) or hidden.dtype != self.hidden.dtype:
            return self._compute(hidden)
        self.hidden[:num_rows] = hidden
        self.program.run(num_rows, 0)
        return self.logits[:num_rows]


class _GroupBuffers:
    """The inputs of attention for a group of layers, where the program looks for them."""

    def __init__(self, max_tokens: int, max_sequences: int, blocks_per_row: int, *, has_begins: bool) -> None:
        self._starts = np.zeros(max_sequences + 1, dtype=np.int32)
        self._lengths = np.zeros(max_sequences, dtype=np.int32)
        self._tables = np.zeros((max_sequences, blocks_per_row), dtype=np.int32)
        self._slots = np.zeros(max_tokens, dtype=np.int64)
        self._begins = np.zeros(max_sequences, dtype=np.int32)
        self.batch = AttentionBatch(
            query_starts_S1=torch.from_numpy(self._starts),
            seq_lens_S=torch.from_numpy(self._lengths),
            block_tables_SM=torch.from_numpy(self._tables),
            slots_T=torch.from_numpy(self._slots),
            max_query_len=max_tokens,
            max_seq_len=0,
            begins_S=torch.from_numpy(self._begins) if has_begins else None,
        )

    def fill(self, batch: AttentionBatch) -> int:
        """Returns the number of sequences."""
        num_sequences, width = batch.block_tables_SM.shape
        self._starts[: num_sequences + 1] = batch.query_starts_S1.numpy()
        self._lengths[:num_sequences] = batch.seq_lens_S.numpy()
        self._tables[:num_sequences, :width] = batch.block_tables_SM.numpy()
        self._slots[: len(batch.slots_T)] = batch.slots_T.numpy()
        if batch.begins_S is not None:
            self._begins[:num_sequences] = batch.begins_S.numpy()
        return int(num_sequences)

    def addresses(self, tables: npt.NDArray[np.int32]) -> DecodeGroup:
        return DecodeGroup(
            tables=tables.ctypes.data,
            table_stride=tables.shape[1],
            batch_tables=self._tables.ctypes.data,
            batch_table_stride=self._tables.shape[1],
            slots=self._slots.ctypes.data,
            lengths=self._lengths.ctypes.data,
            starts=self._starts.ctypes.data,
        )

    def keep_nothing(self, num_tokens: int) -> None:
        """For a step that is only measured: no sequence, and no slot to write to."""
        self._slots[:num_tokens] = -1


class _StateBuffers:
    """The inputs of recurrent layers."""

    def __init__(self, max_sequences: int, blocks_per_sequence: int, places: list[Tensor]) -> None:
        self._tables = np.zeros((max_sequences, blocks_per_sequence), dtype=np.int64)
        self._numbers = np.zeros((2, max_sequences), dtype=np.int64)
        self._query_starts = np.zeros(max_sequences + 1, dtype=np.int32)
        starts, kept = torch.from_numpy(self._numbers)
        tables, query_starts = torch.from_numpy(self._tables), torch.from_numpy(self._query_starts)
        self.batch = StateBatch(places, tables, starts, kept, query_starts)

    def fill(self, batch: StateBatch) -> int:
        """Returns the number of sequences."""
        num_sequences, width = batch.tables_Sn.shape
        self._tables[:num_sequences, :width] = batch.tables_Sn.numpy()
        self._numbers[0, :num_sequences] = batch.starts_S.numpy()
        self._numbers[1, :num_sequences] = batch.num_kept_S.numpy()
        self._query_starts[: num_sequences + 1] = batch.query_starts_S1.numpy()
        return int(num_sequences)


def record_model(model: Any, max_tokens: int, max_sequences: int, blocks_per_row: int, max_logits: int) -> bool:
    """Exchange a model's two calls for recorded ones, as far as that can be: whether the forward pass was.

    After weights are packed and caches are bound. `max_logits`: rows that most steps ask logits of.
    """
    try:
        with torch.inference_mode():
            forward = RecordedForward(model, max_tokens, max_sequences, blocks_per_row)
    except (CannotRecordError, RuntimeError) as error:
        _logger.info("the forward pass runs operator by operator: %s", error)
        return False
    model.forward = forward
    before = getattr(model, "compute_logits", None)
    try:
        if before is not None:
            plain = before._compute if isinstance(before, RecordedLogits) else before
            with torch.inference_mode():
                model.compute_logits = RecordedLogits(plain, forward.hidden, max_logits)
    except (CannotRecordError, RuntimeError) as error:
        _logger.info("logits are computed operator by operator: %s", error)
    return True
