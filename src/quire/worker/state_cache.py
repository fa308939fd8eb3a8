"""What recurrent layers keep of a sequence: states in blocks of the KV cache's pool, gathered, changed, put back.

A state is spread over the chunks of the blocks that its sequence holds (`quire/state_layout.py`). For the rows of a
step it is gathered to one contiguous piece of memory, which a kernel changes in place:

    header   int64: how many tokens this state has absorbed
    tensors  of each name that the layer declares, one after the other, each on a boundary of 16 bytes

Which tokens are absorbed: those whose value is certain. Drafts are computed from the state and leave it as it is. A
state that stands one token further than the step begins has absorbed the first token of the step before (its mask was
late, or a fork and a stream's end step back by one): that token is read from the state as it is, which gives the same
bits, and not absorbed again. At position 0 a state is zeros, whatever the blocks hold.

Owns: nothing that outlives a step but the places of the chunks. Must never decide which blocks a row has. Called by the
operator of a recurrent layer; `undo` and `forget` by StepComputation.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from quire.errors import ModelError
from quire.messages import IntArray, LayerSpec
from quire.state_layout import STATE_HEADER_BYTES, StateLayout
from quire.worker.forward_context import current_forward_context
from quire.worker.row_table import RowTable
from quire.worker.staging import to_device

_ALIGNMENT = 16
_STRANGE_STATE = "a recurrent state stands at another token than its sequence: this is a mistake of Quire's"


@dataclass(frozen=True)
class StateTensor:
    """One tensor of what a layer keeps of a sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return -(-math.prod(self.shape) * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class TokenSpans:
    """Which tokens of a step belong to which sequence, and what becomes of them. Suffix S: sequences of the step."""

    # the tokens of sequence s are query_starts[s] ... query_starts[s + 1] - 1
    query_starts_S1: Tensor
    # how many of them, from the first one on, the state has absorbed when the step is done
    num_kept_S: Tensor
    # 1: the state has absorbed the first of them already
    num_read_S: Tensor


class StateBatch:
    """The states of a step's rows, for all recurrent layers."""

    def __init__(
        self, tables_Sn: Tensor, starts_S: Tensor, kept_S: Tensor, query_starts_S1: Tensor, new: Tensor, undone: Tensor
    ) -> None:
        """`new`, `undone`: indices of sequences that begin, and of those whose state is remembered until the step has
        gone well. A sequence that absorbs one token need not be: it can read it again."""
        self._tables_Sn = tables_Sn
        self._starts_S = starts_S
        self._kept_S = kept_S
        self._query_starts_S1 = query_starts_S1
        self._new = new
        self._undone = undone
        self._before: list[tuple[RecurrentLayer, Tensor]] = []
        # what is on its way into the blocks: an exception may come between two of its chunks
        self._on_its_way: list[tuple[RecurrentLayer, Tensor]] = []

    def gather(self, layer: RecurrentLayer) -> tuple[Tensor, TokenSpans]:
        """The states of this layer, [S, bytes], and what its kernel must know about the tokens."""
        buffer = torch.cat([place[self._tables_Sn[:, entry]] for entry, place in layer.chunks], dim=1)
        if len(self._undone):
            self._before.append((layer, buffer[self._undone]))
        position_S = _header(buffer)
        num_read_S = position_S - self._starts_S
        if len(self._new):
            buffer[self._new] = 0
            num_read_S[self._new] = 0
        torch._assert_async(((num_read_S == 0) | (num_read_S == 1)).all(), _STRANGE_STATE)
        return buffer, TokenSpans(self._query_starts_S1, self._kept_S, num_read_S)

    def scatter(self, layer: RecurrentLayer, buffer: Tensor) -> None:
        """After the kernel: into the blocks."""
        _header(buffer).copy_(self._starts_S + self._kept_S)
        self._on_its_way = [(layer, buffer)]
        _put(layer, self._tables_Sn, buffer)
        self._on_its_way = []

    def undo(self) -> None:
        """The step has failed: states are as they were, or one token further than that."""
        for layer, buffer in self._on_its_way:
            _put(layer, self._tables_Sn, buffer)
        for layer, buffer in self._before:
            _put(layer, self._tables_Sn[self._undone], buffer)
        self.forget()

    def forget(self) -> None:
        """The step counts, or has been undone."""
        self._on_its_way.clear()
        self._before.clear()


def _header(buffer: Tensor) -> Tensor:
    return buffer[:, :8].view(torch.int64).squeeze(1)


def _put(layer: RecurrentLayer, tables_Sn: Tensor, buffer: Tensor) -> None:
    pieces = buffer.chunk(len(layer.chunks), dim=1)
    for (entry, place), piece in zip(layer.chunks, pieces, strict=True):
        place.index_copy_(0, tables_Sn[:, entry], piece)


class StateTables:
    """Makes the StateBatch of a step out of the row table."""

    def __init__(self, table: RowTable, layout: StateLayout, device: torch.device) -> None:
        self._table = table
        self._num_blocks = layout.num_blocks
        self._device = device

    def build(self, rows_S: IntArray, num_tokens_S: IntArray, query_starts_S1: Tensor) -> StateBatch:
        """As BatchBuilder is asked for these rows."""
        table = self._table
        starts_S = table.num_computed[rows_S]
        kept_S = np.minimum(num_tokens_S, table.num_verified(rows_S) - starts_S)
        is_new_S = starts_S == 0
        arrays = [
            table.block_tables[-1][rows_S, : self._num_blocks].astype(np.int64),
            starts_S,
            kept_S,
            np.flatnonzero(is_new_S),
            np.flatnonzero(~is_new_S & (kept_S > 1)),
        ]
        tables_Sn, starts, kept, new, undone = to_device(arrays, self._device)
        return StateBatch(tables_Sn, starts, kept, query_starts_S1, new, undone)


class NoStates:
    """For a model without recurrent layers."""

    def build(self, rows_S: IntArray, num_tokens_S: IntArray, query_starts_S1: Tensor) -> NoStateBatch:
        return NO_STATE_BATCH


class NoStateBatch:
    """Nothing to put back."""

    def undo(self) -> None:
        pass

    def forget(self) -> None:
        pass


NO_STATE_BATCH = NoStateBatch()


# The operator gets a number, because a tensor operator cannot take a module. A number is never used twice.
_layers: weakref.WeakValueDictionary[int, RecurrentLayer] = weakref.WeakValueDictionary()
_next_index = 0


class RecurrentLayer(nn.Module, ABC):
    """A layer that keeps a state of each sequence instead of keys and values of each token.

    A subclass declares its tensors and says in `compute` what a step does with them. Its recurrence goes token by
    token, whatever the grant, so that no bit depends on how a prompt is cut.
    """

    def __init__(self, name: str, tensors: Mapping[str, StateTensor]) -> None:
        super().__init__()
        self.name = name
        self.tensors = dict(tensors)
        # (entry of the block table, chunks of all blocks in one place [num_blocks, chunk bytes]) of each of its chunks
        self.chunks: list[tuple[int, Tensor]] = []
        self.index = _number(self)

    @property
    def spec(self) -> LayerSpec:
        """What this layer keeps of a sequence, as the engine core plans with it."""
        num_bytes = STATE_HEADER_BYTES + sum(tensor.num_bytes for tensor in self.tensors.values())
        return LayerSpec(
            name=self.name, num_kv_heads=0, key_dim=0, value_dim=0, bytes_per_element=0, state_bytes=num_bytes
        )

    def bind(self, layout: StateLayout, places: Sequence[Tensor]) -> None:
        """`places`: the memory of all blocks in each place, [num_blocks, chunk bytes]."""
        first = layout.first_chunk_by_layer[self.name]
        num_chunks = -(-self.spec.state_bytes // layout.chunk_bytes)
        locations = [layout.place_of(first + number) for number in range(num_chunks)]
        self.chunks = [(entry, places[place]) for entry, place in locations]

    def run(self, inputs: list[Tensor], out: Tensor) -> Tensor:
        """The step of this layer: fills `out`, whose rows are the tokens of the step as those of the inputs are."""
        _operator(inputs, out, self.index)
        return out

    @abstractmethod
    def compute(self, states: dict[str, Tensor], inputs: list[Tensor], out: Tensor, spans: TokenSpans) -> None:
        """Fill `out`, and change `states` ([S, *shape] by name) in place. Inputs and `out` are contiguous float32."""

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The declared tensors inside of gathered states."""
        views: dict[str, Tensor] = {}
        offset = STATE_HEADER_BYTES
        for name, tensor in self.tensors.items():
            num_bytes = math.prod(tensor.shape) * tensor.dtype.itemsize
            piece = buffer[:, offset : offset + num_bytes]
            views[name] = piece.view(tensor.dtype).unflatten(1, tensor.shape)
            offset += tensor.num_bytes
        return views


def recurrent_layers(model: nn.Module) -> dict[str, RecurrentLayer]:
    """The recurrent layers of a model by name, in the model's order."""
    found: dict[str, RecurrentLayer] = {}
    for module in model.modules():
        if isinstance(module, RecurrentLayer):
            if module.name in found:
                raise ModelError(
                    f"{module.name}: two recurrent layers have this name, by which their states are found. Give each "
                    "a name of its own, such as one with the number of its layer."
                )
            found[module.name] = module
    return found


def _number(layer: RecurrentLayer) -> int:
    global _next_index
    index = _next_index
    _next_index += 1
    _layers[index] = layer
    return index


def _recurrent(inputs: list[Tensor], out: Tensor, layer_index: int) -> None:
    layer = _layers[layer_index]
    context = current_forward_context()
    if context.is_profiling:
        out.zero_()
        return
    if not layer.chunks or not isinstance(context.states, StateBatch):
        raise RuntimeError(f"{layer.name}: a recurrent layer was called before its states were bound")
    buffer, spans = context.states.gather(layer)
    inputs = [tensor.float().contiguous() for tensor in inputs]
    out_float = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    layer.compute(layer.views(buffer), inputs, out_float, spans)
    if out_float is not out:
        out.copy_(out_float)
    context.states.scatter(layer, buffer)


_library = torch.library.Library("quire", "FRAGMENT")
_library.define("recurrent(Tensor[] inputs, Tensor(a!) out, SymInt layer) -> ()")
_library.impl("recurrent", _recurrent, "CompositeExplicitAutograd")
torch.library.register_fake("quire::recurrent", lambda inputs, out, layer: None, lib=_library)
# Bound once: looking an operator up costs more than calling it.
_operator = torch.ops.quire.recurrent.default
