"""What recurrent layers keep of a sequence: states in blocks of the KV cache's pool, changed where they lie.

How a state lies there: `kernels/sequence_states.py`.

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
from quire.worker.kernels import cpu
from quire.worker.kernels.sequence_states import HostSpans, SequenceStates, put
from quire.worker.row_table import RowTable
from quire.worker.staging import to_device

_ALIGNMENT = 16


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
    # the first two on the host, for a recurrence that loops over tokens
    on_host: HostSpans


class StateBatch:
    """The states of a step's rows, for all recurrent layers."""

    def __init__(
        self,
        places: list[Tensor],
        tables_Sn: Tensor,
        starts_S: Tensor,
        num_kept_S: Tensor,
        query_starts_S1: Tensor,
        undone: Tensor | None = None,
        on_host: HostSpans | None = None,
    ) -> None:
        """`undone`: indices of sequences whose states are remembered until the step has gone well. See StateTables."""
        self.on_host = on_host
        self.tables_Sn = tables_Sn
        self.starts_S = starts_S
        self.num_kept_S = num_kept_S
        self.query_starts_S1 = query_starts_S1
        self._places = places
        self._before: list[Tensor] = []
        if undone is not None and len(undone):
            self._blocks = tables_Sn[undone].flatten()
            self._before = [place[self._blocks] for place in places]

    def of(self, layer: StatefulLayer) -> SequenceStates:
        """Those of one layer."""
        return SequenceStates(
            self._places,
            layer.first_chunk,
            self.tables_Sn,
            self.starts_S,
            self.query_starts_S1,
            self.num_kept_S,
            self.on_host,
        )

    def undo(self) -> None:
        """The step has failed: states are as they were, or one token further than that."""
        for place, rows in zip(self._places, self._before, strict=False):
            put(place, self._blocks, rows)
        self.forget()

    def forget(self) -> None:
        """The step counts, or has been undone."""
        self._before = []


class StateTables:
    """Makes the StateBatch of a step out of the row table."""

    def __init__(self, table: RowTable, layers: Sequence[StatefulLayer], device: torch.device) -> None:
        self._table = table
        self._device = device
        self._places = layers[0].places
        self._num_blocks = layers[0].num_blocks
        # An exception may come between two chunks of a state that Python puts back.
        self._can_be_torn = not all(layer.is_changed_by_one_call for layer in layers)

    def build(self, rows_S: IntArray, num_tokens_S: IntArray, query_starts_S1: Tensor) -> StateBatch:
        """As BatchBuilder is asked for these rows."""
        table = self._table
        starts_S = table.num_computed[rows_S]
        kept_S = np.minimum(num_tokens_S, table.num_verified(rows_S) - starts_S)
        # A sequence that begins has zeros again, and one that absorbs a token can read it again.
        is_undone_S = (starts_S > 0) & ((kept_S > 1) | self._can_be_torn)
        arrays = [
            table.block_tables[-1][rows_S, : self._num_blocks].astype(np.int64),
            starts_S,
            kept_S,
            np.flatnonzero(is_undone_S),
        ]
        tables_Sn, starts, kept, undone = to_device(arrays, self._device)
        on_host = HostSpans([0, *np.cumsum(num_tokens_S).tolist()], kept_S.tolist())
        return StateBatch(self._places, tables_Sn, starts, kept, query_starts_S1, undone, on_host)


# The operator gets a number, because a tensor operator cannot take a module. A number is never used twice.
_layers: weakref.WeakValueDictionary[int, StatefulLayer] = weakref.WeakValueDictionary()
_next_index = 0


class StatefulLayer(nn.Module, ABC):
    """A layer that keeps a state of each sequence instead of keys and values of each token.

    Its recurrence goes token by token, whatever the grant, so that no bit depends on how a prompt is cut.
    """

    # whether `change` is one operator of Quire's
    is_kernel = False

    def __init__(self, name: str, tensors: Mapping[str, StateTensor]) -> None:
        super().__init__()
        self.name = name
        self.tensors = dict(tensors)
        # the memory of all blocks in each place, [num_blocks, chunk bytes]; those of all layers
        self.places: list[Tensor] = []
        # blocks of states that a sequence has, for all layers
        self.num_blocks = 0
        self.first_chunk = 0
        self.index = _number(self)

    @property
    def spec(self) -> LayerSpec:
        """What this layer keeps of a sequence, as the engine core plans with it."""
        return LayerSpec(
            name=self.name, num_kv_heads=0, key_dim=0, value_dim=0, bytes_per_element=0, state_bytes=self.state_bytes
        )

    @property
    def state_bytes(self) -> int:
        return STATE_HEADER_BYTES + sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def is_changed_by_one_call(self) -> bool:
        """No exception comes in the middle of it, and a recorded program can hold it."""
        return self.is_kernel and all(place.is_cpu for place in self.places) and cpu.load()

    def bind(self, layout: StateLayout, places: list[Tensor]) -> None:
        """`places`: the memory of all blocks in each place."""
        self.first_chunk = layout.first_chunk_by_layer[self.name]
        self.num_blocks = layout.num_blocks
        self.places = places

    def run(self, inputs: list[Tensor], out: Tensor) -> Tensor:
        """The step of this layer: fills `out`, whose rows are the tokens of the step as those of the inputs are."""
        _operator(inputs, out, self.index)
        return out

    @abstractmethod
    def change(self, states: SequenceStates, inputs: list[Tensor], out: Tensor) -> None:
        """Fill `out`, and let the states absorb what they are to keep."""


class RecurrentLayer(StatefulLayer):
    """One whose recurrence is written in Python: a subclass declares its tensors and says in `compute` what a step does
    with them."""

    def change(self, states: SequenceStates, inputs: list[Tensor], out: Tensor) -> None:
        buffer, num_read_S = states.gather(self.state_bytes)
        on_host = states.on_host or HostSpans(states.query_starts_S1.tolist(), states.num_kept_S.tolist())
        spans = TokenSpans(states.query_starts_S1, states.num_kept_S, num_read_S, on_host)
        inputs = [tensor.float().contiguous() for tensor in inputs]
        out_float = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        self.compute(self._views(buffer), inputs, out_float, spans)
        if out_float is not out:
            out.copy_(out_float)
        states.scatter(buffer)

    @abstractmethod
    def compute(self, states: dict[str, Tensor], inputs: list[Tensor], out: Tensor, spans: TokenSpans) -> None:
        """Fill `out`, and change `states` ([S, *shape] by name) in place. Inputs and `out` are contiguous float32."""

    def _views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The declared tensors inside of gathered states."""
        views: dict[str, Tensor] = {}
        offset = STATE_HEADER_BYTES
        for name, tensor in self.tensors.items():
            num_bytes = math.prod(tensor.shape) * tensor.dtype.itemsize
            piece = buffer[:, offset : offset + num_bytes]
            views[name] = piece.view(tensor.dtype).unflatten(1, tensor.shape)
            offset += tensor.num_bytes
        return views


def recurrent_layers(model: nn.Module) -> dict[str, StatefulLayer]:
    """The recurrent layers of a model by name, in the model's order."""
    found: dict[str, StatefulLayer] = {}
    for module in model.modules():
        if isinstance(module, StatefulLayer):
            if module.name in found:
                raise ModelError(
                    f"{module.name}: two recurrent layers have this name, by which their states are found. Give each "
                    "a name of its own, such as one with the number of its layer."
                )
            found[module.name] = module
    return found


def layer_of(index: int) -> StatefulLayer:
    """The layer that an operator's number stands for."""
    return _layers[index]


def _number(layer: StatefulLayer) -> int:
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
    if not layer.places or not isinstance(context.states, StateBatch):
        raise RuntimeError(f"{layer.name}: a recurrent layer was called before its states were bound")
    layer.change(context.states.of(layer), inputs, out)


_library = torch.library.Library("quire", "FRAGMENT")
_library.define("recurrent(Tensor[] inputs, Tensor(a!) out, SymInt layer) -> ()")
_library.impl("recurrent", _recurrent, "CompositeExplicitAutograd")
torch.library.register_fake("quire::recurrent", lambda inputs, out, layer: None, lib=_library)
# Bound once: looking an operator up costs more than calling it.
_operator = torch.ops.quire.recurrent.default
