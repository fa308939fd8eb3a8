"""A short convolution over the tokens of a sequence, each channel by itself, token by token.

A program has some channels of a sequence. The window of the last inputs lies in registers, one row after the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.worker.kernels.sequence_states import bytes_of
from quire.worker.kernels.triton.example_inputs import floats, given, raw
from quire.worker.kernels.triton.launch import Example, launch
from quire.worker.kernels.triton.rows import block_of
from quire.worker.kernels.triton.state_memory import place_of, states_of

_BLOCK = 128


@triton.jit(do_not_specialize=["starts", "num_kept"])
def _causal_conv(
    x, weight, bias, chunks, starts, query_starts, num_kept, num_read, out,
    x_stride, out_stride, num_channels, num_chunks, chunk_bytes,
    width: tl.constexpr, width_block: tl.constexpr, has_bias: tl.constexpr, has_silu: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    is_channel = channel < num_channels
    place = tl.arange(0, width_block)
    is_window = (place < width)[:, None] & is_channel[None, :]
    weights = tl.load(weight + place[:, None] * num_channels + channel[None, :], is_window, 0.0).to(tl.float32)
    start = tl.load(starts + sequence)
    own = place_of(chunks, sequence, place[:, None] * num_channels + channel[None, :], num_chunks, chunk_bytes)
    window = tl.load(own, is_window & (start > 0), 0.0)
    first = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - first
    kept = tl.load(num_kept + sequence)
    read = tl.load(num_read + sequence)
    for number in range(count):
        token = (first + number).to(tl.int64)
        if number >= read:
            new = tl.load(x + token * x_stride + channel, is_channel, 0.0).to(tl.float32)
            # every input moves one place on
            moved = tl.zeros([width_block, block], tl.float32)
            for w in tl.static_range(width - 1):
                row = tl.sum(tl.where(place[:, None] == w + 1, window, 0.0), axis=0)
                moved = tl.where(place[:, None] == w, row[None, :], moved)
            window = tl.where(place[:, None] == width - 1, new[None, :], moved)
        total = tl.zeros([block], tl.float32)
        if has_bias:
            total += tl.load(bias + channel, is_channel, 0.0).to(tl.float32)
        # in the order of the window
        for w in tl.static_range(width):
            total += tl.sum(tl.where(place[:, None] == w, window * weights, 0.0), axis=0)
        if has_silu:
            total = total * tl.math.div_rn(1.0, 1.0 + tl.exp(-total))
        tl.store(out + token * out_stride + channel, total.to(out.dtype.element_ty), is_channel)
        if number == kept - 1:
            tl.store(own, window, is_window)


def causal_conv(
    x_TC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    places: list[Tensor],
    first_chunk: int,
    tables_Sn: Tensor,
    starts_S: Tensor,
    query_starts_S1: Tensor,
    num_kept_S: Tensor,
    out_TC: Tensor,
    has_silu: bool,
) -> None:
    width, num_channels = weight_WC.shape
    memory = states_of(places, first_chunk, tables_Sn, starts_S, num_kept_S, bytes_of(width, num_channels))
    launch(
        _causal_conv,
        (len(tables_Sn), triton.cdiv(num_channels, _BLOCK)),
        x_TC,
        weight_WC.contiguous(),
        x_TC if bias_C is None else bias_C,
        memory.chunks,
        starts_S,
        query_starts_S1,
        num_kept_S,
        memory.num_read_S,
        out_TC,
        x_TC.stride(0),
        out_TC.stride(0),
        num_channels,
        memory.num_chunks,
        memory.chunk_bytes,
        width=width,
        width_block=block_of(width),
        has_bias=bias_C is not None,
        has_silu=has_silu,
        block=_BLOCK,
    )


def _example() -> object:
    """Qwen3-Next: 8,192 channels, four inputs."""
    x = floats(512, 8192)
    tables = given(range(32)).view(8, 4)
    starts = given(range(0, 513, 64), torch.int32)
    places = [raw(32, 65536)]
    states = places, 0, tables, given([0] * 8), starts, given([64] * 8)
    causal_conv(x, floats(4, 8192), None, *states, torch.empty_like(x), True)
    return places


EXAMPLES = (Example("Qwen3-Next", _example),)
