"""The states of a step's sequences in the blocks of the cache, as the kernels of recurrent layers take them.

A state is spread over the chunks of the blocks that its sequence holds (`quire/state_layout.py`). One after the other,
the chunks are

    header   int64: how many tokens this state has absorbed; 8 bytes of padding
    tensors  of each name that the layer declares, one after the other, each on a boundary of 16 bytes

C++ reads and writes them where they lie. Whatever is written in Python gathers them, changes them and puts them back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.state_layout import STATE_HEADER_BYTES

_STRANGE_STATE = "a recurrent state stands at another token than its sequence: this is a mistake of Quire's"


@dataclass(frozen=True)
class HostSpans:
    """Of the sequences of a step, on the host: where their tokens begin, and how many of them are absorbed."""

    query_starts_S1: list[int]
    num_kept_S: list[int]


@dataclass(frozen=True)
class SequenceStates:
    """Of one layer. Suffix S: sequences of the step, n: blocks of states that each of them holds."""

    # the memory of all blocks in each place, bytes [num_blocks, chunk bytes]
    places: list[Tensor]
    first_chunk: int
    tables_Sn: Tensor
    # how many tokens came before this step. At 0 a state is zeros, whatever the blocks hold
    starts_S: Tensor
    # the tokens of sequence s are query_starts[s] ... query_starts[s + 1] - 1
    query_starts_S1: Tensor
    # how many of them, from the first one on, the state has absorbed when the step is done
    num_kept_S: Tensor
    # None: whoever needs them there fetches them, and waits for the device
    on_host: HostSpans | None = None

    def arguments(self) -> tuple[list[Tensor], int, Tensor, Tensor, Tensor, Tensor]:
        """As operators take them."""
        return (
            self.places,
            self.first_chunk,
            self.tables_Sn,
            self.starts_S,
            self.query_starts_S1,
            self.num_kept_S,
        )

    def gather(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        """Bytes of the states with their headers, [S, num_bytes or more]; and where the first token is absorbed
        already, so that it is read only: 1, else 0."""
        pieces = [self.places[place][self.tables_Sn[:, entry].long()] for entry, place in self.chunks(num_bytes)]
        buffer = torch.cat(pieces, dim=1)
        num_read_S = _header(buffer) - self.starts_S
        is_new_S = self.starts_S == 0
        buffer.masked_fill_(is_new_S.unsqueeze(1), 0)
        num_read_S = num_read_S.masked_fill(is_new_S, 0)
        torch._assert_async(((num_read_S == 0) | (num_read_S == 1)).all(), _STRANGE_STATE)
        return buffer, num_read_S

    def scatter(self, buffer: Tensor) -> None:
        """What `gather` gave, changed, back into the blocks."""
        _header(buffer).copy_(self.starts_S + self.num_kept_S)
        chunk_bytes = self.places[0].shape[1]
        pieces = buffer.split(chunk_bytes, dim=1)
        for (entry, place), piece in zip(self.chunks(buffer.shape[1]), pieces, strict=True):
            put(self.places[place], self.tables_Sn[:, entry].long(), piece)

    def chunks(self, num_bytes: int) -> list[tuple[int, int]]:
        """(entry of the block table, place) of each chunk."""
        num_chunks = -(-num_bytes // self.places[0].shape[1])
        return [divmod(self.first_chunk + number, len(self.places)) for number in range(num_chunks)]


def put(place: Tensor, blocks: Tensor, rows: Tensor) -> None:
    """Bytes into these blocks of a place."""
    place.index_copy_(0, blocks, rows)


def bytes_of(*shape: int) -> int:
    """A state that is one float32 tensor, with its header."""
    return STATE_HEADER_BYTES + 4 * math.prod(shape)


def floats_of(buffer: Tensor, *shape: int) -> Tensor:
    """This tensor of gathered states, [S, *shape], in place."""
    return buffer[:, STATE_HEADER_BYTES : bytes_of(*shape)].view(torch.float32).unflatten(1, shape)


def _header(buffer: Tensor) -> Tensor:
    return buffer[:, :8].view(torch.int64).squeeze(1)
