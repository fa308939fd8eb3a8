"""Attention over a paged KV cache, for any mix of query lengths (the words are those of the specification).

A program takes a tile of rows of one sequence and head of keys: some tokens times the heads that share these keys. It
reads keys in tiles, and tiles in partitions of `_PARTITION` keys at fixed places of the sequence. Within a partition a
row keeps a running maximum, sum and output; the results of partitions are folded in their order. So a row's chain of
operations depends on its sequence alone: not on the batch, nor on the cut of its prompt, nor on who computes what:

    many rows    one program after the other takes all partitions of its tile, and folds each at its end
    few rows     the same, or, where that would leave processors idle, a program for each partition writes what it has,
                 and a second kernel folds

The shape of tiles follows from the layer and the device. Tiles of few rows have 64 or more as well, of which most may
be empty: with other instructions, or other threads to a row, a token would have other bits after its prompt than in it.
Keys come from memory more slowly than 64 rows are multiplied with them.

The sums of 512 values are more than the threads of a program have registers for. So where values are that wide, as in
latent attention, a program has a slice of their columns, and the scores of a row are computed once for each slice.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.worker.kernels.cache_format import has_scales, row_elements
from quire.worker.kernels.triton.cache import numbers_and_scales
from quire.worker.kernels.triton.example_inputs import floats, given
from quire.worker.kernels.triton.launch import Example, Target, launch, target
from quire.worker.kernels.triton.rows import block_of

# Keys that are folded at once. The merge of long prompts goes through memory, so it must be rare.
_PARTITION = 1024
# A row that has seen nothing: no infinity, so that differences of two stay numbers.
_NOTHING = tl.constexpr(-1e30)
_LOG2_E = math.log2(math.e)


@triton.jit
def _sequence_of(tile, starts, num_sequences, group, block_rows: tl.constexpr, spare_tiles: tl.constexpr = 1):
    """The last sequence whose first tile is not behind this one. Each has room for one tile that is not full; where
    tiles are single rows, none is needed."""
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(starts + middle).to(tl.int32) * group // block_rows + middle * spare_tiles
        if first <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _first_visible(position, window, is_chunked: tl.constexpr):
    if is_chunked:
        return tl.maximum(position, 0) // window * window
    else:
        return tl.maximum(position - window + 1, 0)


@triton.jit
def _shares(maximum, weight, part_maximum, part_weight):
    """How much what is known of some keys, and of those of the next partition, counts in both; maximum, sum of both."""
    highest = tl.maximum(maximum, part_maximum)
    before = tl.exp2(maximum - highest)
    now = tl.exp2(part_maximum - highest)
    return before, now, highest, tl.fma(weight, before, part_weight * now)


@triton.jit
def _folded(total, before, part, now):
    return tl.fma(total, before[:, None] + tl.zeros_like(total), part * now[:, None])


@triton.jit
def _inverse(weight):
    return 1.0 / tl.where(weight == 0, 1.0, weight)


@triton.jit
def _log(maximum, weight):
    return tl.where(weight == 0, float("-inf"), (maximum + tl.log2(weight)) * 0.6931471805599453)


@triton.jit
def _numbers(codes, kind: tl.constexpr):
    """Numbers of the cache as what they are multiplied as. Eight-bit floats that the device does not know come as
    bytes; but for zero their exponents are not 0 (`cache_format.py`)."""
    if codes.dtype == tl.uint8:
        bits = (codes & 0x7F).to(tl.uint16) << 7
        bits = tl.where(bits == 0, bits, bits + (8 << 10)) | ((codes & 0x80).to(tl.uint16) << 8)
        return bits.to(tl.float16, bitcast=True).to(kind)
    elif codes.dtype == kind:
        return codes
    else:
        return codes.to(tl.float32).to(kind)


@triton.jit
def _load(places, is_column, is_whole: tl.constexpr, kind: tl.constexpr):
    """Rows of the cache, which are zero behind their last column."""
    if is_whole:
        codes = tl.load(places)
    else:
        codes = tl.load(places, is_column[None], 0.0)
    return _numbers(codes, kind)


@triton.jit
def _dims_of(number: tl.constexpr, first_column, block_dim: tl.constexpr, num_tiles: tl.constexpr):
    """Of a head, those in a tile."""
    if num_tiles == 1:
        return tl.arange(0, block_dim)
    else:
        first = (first_column + number * block_dim) % (num_tiles * block_dim)
        return tl.multiple_of(first, block_dim) + tl.arange(0, block_dim)


# Numbers and tensors that change from step to step must not make a kernel of their own.
@triton.jit(
    do_not_specialize=["tables", "lengths", "starts", "begins", "ends", "table_row", "num_sequences", "rows_of_few"]
)
def _attention(
    query, k_cache, v_cache, k_scales, v_scales, tables, lengths, starts, sinks, slopes, bias, begins, ends, out, logs,
    totals, maxima, weights,
    q_token, q_head, k_block, k_head, k_place, v_block, v_head, v_place, ks_block, ks_head, vs_block, vs_head,
    table_row, out_token, out_head, log_token, log_head,
    num_sequences, num_heads, num_few, tiles_of_few, rows_of_few, rank, size, scale, window, soft_cap,
    bias_row, num_distances,
    group: tl.constexpr, block_size: tl.constexpr, head_dim: tl.constexpr, value_dim: tl.constexpr,
    kind: tl.constexpr, is_few: tl.constexpr, is_split: tl.constexpr, has_scales: tl.constexpr,
    has_window: tl.constexpr, is_chunked: tl.constexpr, has_cap: tl.constexpr, has_sinks: tl.constexpr,
    has_slopes: tl.constexpr, has_bias: tl.constexpr, has_begins: tl.constexpr, has_ends: tl.constexpr,
    has_logs: tl.constexpr, has_totals: tl.constexpr,
    values_are_keys: tl.constexpr, precision: tl.constexpr, block_rows: tl.constexpr, block_keys: tl.constexpr,
    block_dim: tl.constexpr, block_rest: tl.constexpr, block_value: tl.constexpr, num_slices: tl.constexpr,
    partition_keys: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    kv_head = tl.program_id(1) // num_slices
    first_column = tl.program_id(1) % num_slices * block_value
    if is_few:
        sequence = tile // tiles_of_few
        first_row = tile % tiles_of_few * block_rows
    else:
        sequence = _sequence_of(tile, starts, num_sequences, group, block_rows)
        first_row = (tile - tl.load(starts + sequence).to(tl.int32) * group // block_rows - sequence) * block_rows
    start = tl.load(starts + sequence).to(tl.int32)
    num_tokens = tl.load(starts + sequence + 1).to(tl.int32) - start
    length = tl.load(lengths + sequence).to(tl.int32)
    is_other = num_tokens > num_few
    if not is_few:
        is_other = num_tokens <= num_few
    if is_other | (first_row >= num_tokens * group):
        return

    rows = first_row + tl.arange(0, block_rows)
    is_row = rows < num_tokens * group
    token = start + rows // group
    head = kv_head * group + rows % group
    position = length - num_tokens + rows // group
    if has_ends:
        end = tl.load(ends + token, is_row, 0).to(tl.int32)
    else:
        end = position + 1
    end = tl.where(is_row, end, 0)
    first_key = 0
    if has_window:
        first = tl.min(tl.where(is_row, _first_visible(position, window, is_chunked), 2147483647))
        first_key = tl.maximum(first - rank + size - 1, 0) // size
    if has_begins:
        begin_position = tl.load(begins + sequence).to(tl.int32)
        first_key = tl.maximum(first_key, tl.maximum(begin_position - rank + size - 1, 0) // size)
    end_key = tl.maximum(tl.max(end) - rank + size - 1, 0) // size
    if has_window or has_begins:
        # a rank may have none of those that are seen
        end_key = tl.where(first_key < end_key, end_key, 0)

    first_partition = first_key // partition_keys
    # at least one, which may be empty: rows that see nothing are zero
    end_partition = tl.maximum((end_key + partition_keys - 1) // partition_keys, first_partition + 1)
    if is_split:
        mine = tl.program_id(2)
        if (mine < first_partition) | (mine >= end_partition):
            return
        first_partition = mine
        end_partition = mine + 1

    column = first_column + tl.arange(0, block_value)
    is_column = column < value_dim
    q_rows = query + token.to(tl.int64)[:, None] * q_token + head[:, None] * q_head
    # keys that are values as well come in as many tiles as there are slices, the program's own first
    num_tiles: tl.constexpr = num_slices if values_are_keys else 1
    own = _dims_of(0, first_column, block_dim, num_tiles)
    # longer by one a tile, which is how Triton builds tuples and what a checker of types does not follow
    query_tiles = ()
    for number in tl.static_range(num_tiles):
        dims = _dims_of(number, first_column, block_dim, num_tiles)
        is_number = is_row[:, None] & (dims < head_dim)[None]
        query_tiles = query_tiles + (tl.load(q_rows + dims[None], is_number, 0.0).to(kind),)  # type: ignore[assignment]
    if block_rest > 0:
        rest = num_tiles * block_dim + tl.arange(0, block_rest)
        is_rest = rest < head_dim
        query_rest = tl.load(q_rows + rest[None], is_row[:, None] & is_rest[None], 0.0).to(kind)

    table = tables + sequence * table_row
    k_cache += kv_head * k_head
    v_cache += kv_head * v_head
    k_scales += kv_head * ks_head
    v_scales += kv_head * vs_head
    maximum = tl.full([block_rows], _NOTHING, tl.float32)
    weight = tl.zeros([block_rows], tl.float32)
    if has_sinks and not is_split:
        maximum = tl.load(sinks + head, is_row, 0.0).to(tl.float32) * 1.4426950408889634
        weight += 1.0
    if has_slopes:
        slope = tl.load(slopes + head, is_row, 0.0) * 1.4426950408889634

    for partition in range(first_partition, end_partition):
        part = tl.zeros([block_rows, block_value], tl.float32)
        part_maximum = tl.full([block_rows], _NOTHING, tl.float32)
        part_weight = tl.zeros([block_rows], tl.float32)
        begin = tl.maximum(partition * partition_keys, first_key // block_keys * block_keys)
        stop = tl.minimum((partition + 1) * partition_keys, end_key)
        for key in range(begin, stop, block_keys):
            keys = key + tl.arange(0, block_keys)
            # Instead of one that no row sees, and that may hold anything, the first is read: its share will be zero.
            real = tl.where((keys >= first_key) & (keys < end_key), keys, first_key)
            block = tl.load(table + real // block_size).to(tl.int64)
            place = real % block_size
            k_rows = k_cache + (block * k_block + place * k_place)[:, None]
            key_tile = _load(k_rows + own[None], own < head_dim, head_dim >= num_tiles * block_dim, kind)
            score = tl.dot(query_tiles[0], tl.trans(key_tile), input_precision=precision)  # type: ignore[misc]
            for number in tl.static_range(1, num_tiles):
                other = _dims_of(number, first_column, block_dim, num_tiles)
                other_tile = _load(k_rows + other[None], other < head_dim, True, kind)
                score = tl.dot(query_tiles[number], tl.trans(other_tile), score, input_precision=precision)
            if block_rest > 0:
                rest_tile = _load(k_rows + rest[None], is_rest, head_dim % block_rest == 0, kind)
                score = tl.dot(query_rest, tl.trans(rest_tile), score, input_precision=precision)
            if has_scales:
                score *= tl.load(k_scales + block * ks_block + place)[None]
            score *= scale
            if has_cap:
                # tanh of what the scale has made an exponent
                score = soft_cap * (1.0 - 2.0 / (tl.exp2(score) + 1.0))

            key_position = keys * size + rank
            if has_slopes:
                score += slope[:, None] * key_position.to(tl.float32)[None]
            if has_bias:
                distance = tl.minimum(tl.maximum(position[:, None] - key_position[None], 0), num_distances - 1)
                more = tl.load(bias + head[:, None] * bias_row + distance, is_row[:, None], 0.0)
                score += more.to(tl.float32) * 1.4426950408889634
            is_seen = key_position[None] < end[:, None]
            if has_begins:
                is_seen &= (key_position >= begin_position)[None]
            if has_window:
                if is_chunked:
                    is_seen &= (key_position // window)[None] == (position // window)[:, None]
                else:
                    is_seen &= position[:, None] - key_position[None] < window
            score = tl.where(is_seen, score, float("-inf"))
            highest = tl.maximum(part_maximum, tl.max(score, 1))
            factor = tl.exp2(part_maximum - highest)
            share = tl.exp2(score - highest[:, None])
            part_weight = part_weight * factor + tl.sum(share, 1)
            part_maximum = highest
            if values_are_keys:
                value_tile = key_tile
            else:
                v_rows = v_cache + (block * v_block + place * v_place)[:, None]
                value_tile = _load(v_rows + column[None], is_column, value_dim % block_value == 0, kind)
            if has_scales:
                share *= tl.load(v_scales + block * vs_block + place)[None]
            part = tl.dot(share.to(kind), value_tile, part * factor[:, None], input_precision=precision)

        if is_split:
            place = _place_of_part(sequence, token, start, rows_of_few, head, num_heads, partition, tl.num_programs(2))
            place = place * num_slices + first_column // block_value
            pieces = _quarters(part)
            part_rows = totals + place * block_value
            for number in tl.static_range(4):
                few_columns = _columns_of(number, tl.arange(0, block_value // 4))
                tl.store(part_rows[:, None] + few_columns[None], pieces[number], is_row[:, None])
            tl.store(maxima + place, part_maximum, is_row)
            tl.store(weights + place, part_weight, is_row)
        else:
            is_last = (partition + 1) * partition_keys >= end_key
            before, now, maximum, weight = _shares(maximum, weight, part_maximum, part_weight)
            share_of_out = _inverse(weight)
            kept_rows = totals + (token.to(tl.int64) * num_heads + head) * (num_slices * block_value) + first_column
            out_rows = out + token.to(tl.int64) * out_token + head * out_head + first_column
            if has_logs and is_last and first_column == 0:
                tl.store(logs + token.to(tl.int64) * log_token + head * log_head, _log(maximum, weight), is_row)
            pieces = _quarters(part)
            for number in tl.static_range(4):
                # columns of an eighth of the registers, or less, at a time
                narrow = (pieces[number],)
                if block_value > 128:
                    narrow = _quarters(pieces[number])
                for place in tl.static_range(len(narrow)):
                    piece = narrow[place]
                    few_columns = tl.arange(0, piece.shape[1])
                    if block_value > 128:
                        few_columns = _columns_of(place, few_columns)
                    few_columns = _columns_of(number, few_columns)
                    total = tl.zeros_like(piece)
                    kept = kept_rows[:, None] + few_columns[None]
                    if has_totals:
                        total = tl.load(kept, is_row[:, None] & (partition > first_partition), 0.0)
                    total = _folded(total, before, piece, now)
                    if is_last:
                        result = (total * share_of_out[:, None]).to(out.dtype.element_ty)
                        is_real = is_row[:, None] & (few_columns < value_dim - first_column)[None]
                        tl.store(out_rows[:, None] + few_columns[None], result, is_real)
                    elif has_totals:
                        tl.store(kept, total, is_row[:, None])
            # what a thread has written another may read
            tl.debug_barrier()


@triton.jit
def _quarters(tile):
    """A tile's columns in four pieces, for what is done with one after the other in fewer registers. Of 32 columns each
    has 8 side by side: so all of them are in registers of the same thread, whatever unit has multiplied."""
    rows: tl.constexpr = tile.shape[0]
    columns: tl.constexpr = tile.shape[1]
    even, odd = tl.split(tl.permute(tl.reshape(tile, (rows, columns // 32, 2, 2, 8)), (0, 1, 4, 2, 3)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    shape: tl.constexpr = (rows, columns // 4)
    return tl.reshape(first, shape), tl.reshape(second, shape), tl.reshape(third, shape), tl.reshape(fourth, shape)


@triton.jit
def _columns_of(quarter, column):
    """Where the columns of a quarter were."""
    return column // 8 * 32 + quarter * 8 + column % 8


@triton.jit
def _place_of_part(sequence, token, start, rows_of_few, head, num_heads, partition, num_partitions):
    row = token
    if rows_of_few > 0:
        row = sequence * rows_of_few + token - start
    return (row.to(tl.int64) * num_heads + head) * num_partitions + partition


@triton.jit(do_not_specialize=["lengths", "starts", "begins", "ends", "num_sequences", "rows_of_few", "num_partitions"])
def _merge(
    parts, maxima, weights, lengths, starts, sinks, begins, ends, out, logs,
    out_token, out_head, log_token, log_head,
    num_sequences, num_heads, num_few, rows_of_few, num_partitions, rank, size, window, value_dim,
    has_window: tl.constexpr, is_chunked: tl.constexpr, has_sinks: tl.constexpr, has_begins: tl.constexpr,
    has_ends: tl.constexpr, has_logs: tl.constexpr, block_value: tl.constexpr, num_slices: tl.constexpr,
    partition_keys: tl.constexpr,
):  # fmt: skip
    """Fold the partitions of one row, or of a slice of its columns."""
    number = tl.program_id(0)
    head = tl.program_id(1) // num_slices
    slice_number = tl.program_id(1) % num_slices
    if rows_of_few > 0:
        sequence = number // rows_of_few
        start = tl.load(starts + sequence).to(tl.int32)
        token = start + number % rows_of_few
    else:
        sequence = _sequence_of(number, starts, num_sequences, 1, 1, 0)
        start = tl.load(starts + sequence).to(tl.int32)
        token = number
    num_tokens = tl.load(starts + sequence + 1).to(tl.int32) - start
    if (num_tokens > num_few) | (token - start >= num_tokens):
        return
    position = tl.load(lengths + sequence).to(tl.int32) - num_tokens + token - start
    end = position + 1
    if has_ends:
        end = tl.load(ends + token).to(tl.int32)
    first_key = 0
    if has_window:
        first_key = tl.maximum(_first_visible(position, window, is_chunked) - rank + size - 1, 0) // size
    if has_begins:
        begin_position = tl.load(begins + sequence).to(tl.int32)
        first_key = tl.maximum(first_key, tl.maximum(begin_position - rank + size - 1, 0) // size)
    end_key = tl.maximum(end - rank + size - 1, 0) // size

    one = tl.arange(0, 1)
    column = tl.arange(0, block_value)
    total = tl.zeros([1, block_value], tl.float32)
    maximum = tl.full([1], _NOTHING, tl.float32)
    weight = tl.zeros([1], tl.float32)
    if has_sinks:
        maximum = tl.load(sinks + head + one).to(tl.float32) * 1.4426950408889634
        weight += 1.0
    for partition in range(first_key // partition_keys, (end_key + partition_keys - 1) // partition_keys):
        place = _place_of_part(sequence, token + one, start, rows_of_few, head, num_heads, partition, num_partitions)
        place = place * num_slices + slice_number
        part = tl.load(parts + place[:, None] * block_value + column[None])
        before, now, maximum, weight = _shares(maximum, weight, tl.load(maxima + place), tl.load(weights + place))
        total = _folded(total, before, part, now)
    result = (total * _inverse(weight)[:, None]).to(out.dtype.element_ty)
    token_place = (token + one).to(tl.int64)
    column += slice_number * block_value
    out_rows = out + token_place * out_token + head * out_head
    tl.store(out_rows[:, None] + column[None], result, (column < value_dim)[None])
    if has_logs and slice_number == 0:
        tl.store(logs + token_place * log_token + head * log_head, _log(maximum, weight))


@dataclass(frozen=True)
class _Tiles:
    """Rows and keys of a tile, the warps that share it, and what their threads may have of registers.

    `keys` is the same for many rows and for few, and so are the rows of a warp. What has more than `most_columns` of
    values is cut into slices: a program computes the scores of all its rows, and the sums of one slice.
    """

    many_rows: int
    many_warps: int
    few_rows: int
    few_warps: int
    keys: int
    many_stages: int
    few_stages: int
    many_registers: int | None = None
    few_registers: int | None = None
    most_columns: int = 1 << 30


def _tiles(dtype: torch.dtype, is_coded: bool, key_dim: int, value_dim: int, device: Target) -> _Tiles:
    width = max(key_dim, value_dim)
    if dtype == torch.float32:
        # no tensor cores: each product is a multiplication and an addition in a register
        return _Tiles(16, 4, 16, 4, 32 if width <= 128 else 16, 1, 1)
    if device.has_warpgroups:
        if width > 256 and device.arch == 90:
            # codes, and values that are not their keys, leave room for fewer rows
            rows = 128 if key_dim > value_dim and not is_coded else 64
            return _Tiles(rows, 8, rows, 8, 32, 2, 2, most_columns=256)
        if width > 256:
            return _Tiles(128, 8, 128, 8, 32, 1, 1, most_columns=128)
        if width > 128:
            return _Tiles(128, 8, 64, 4, 32, 2, 2) if device.arch == 90 else _Tiles(64, 8, 64, 8, 32, 2, 2)
        is_capped = device.arch == 90 and not is_coded
        return _Tiles(128, 8, 64, 4, 64, 2, 2, 184 if is_capped else None, 168 if is_capped else None)
    if width > 256:
        warps = 8 if is_coded and device.backend == "cuda" else 4
        return _Tiles(16, warps, 16, warps, 32, 1, 1)
    return _Tiles(32, 4, 32, 4, 32, 2, 2) if width > 128 else _Tiles(64, 4, 64, 4, 32, 2, 2)


def paged_attention(
    query_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    query_starts_S1: Tensor,
    out_THE: Tensor,
    sinks_H: Tensor | None,
    ends_T: Tensor | None,
    scale: float,
    sliding_window: int,
    is_chunked: bool,
    soft_cap: float,
    slopes_H: Tensor | None = None,
    begins_S: Tensor | None = None,
    bias_HR: Tensor | None = None,
) -> None:
    _attend(
        query_THD,
        _Cache(k_cache, v_cache, block_tables_SM, seq_lens_S, query_starts_S1),
        out_THE,
        None,
        _Softmax(sinks_H, slopes_H, bias_HR, begins_S, ends_T, scale, sliding_window, is_chunked, soft_cap),
    )


def attention_part(
    query_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    query_starts_S1: Tensor,
    sinks_H: Tensor | None,
    ends_T: Tensor | None,
    scale: float,
    sliding_window: int,
    is_chunked: bool,
    soft_cap: float,
    value_dim: int,
    rank: int,
    size: int,
    slopes_H: Tensor | None = None,
    begins_S: Tensor | None = None,
    bias_HR: Tensor | None = None,
) -> Tensor:
    part_THE = query_THD.new_zeros((*query_THD.shape[:2], value_dim + 1), dtype=torch.float32)
    _attend(
        query_THD,
        _Cache(k_cache, v_cache, block_tables_SM, seq_lens_S, query_starts_S1, rank, size),
        part_THE[..., :-1],
        part_THE[..., -1],
        _Softmax(sinks_H, slopes_H, bias_HR, begins_S, ends_T, scale, sliding_window, is_chunked, soft_cap),
    )
    return part_THE


@dataclass(frozen=True)
class _Cache:
    k_cache: Tensor
    v_cache: Tensor
    block_tables_SM: Tensor
    seq_lens_S: Tensor
    query_starts_S1: Tensor
    rank: int = 0
    size: int = 1


@dataclass(frozen=True)
class _Softmax:
    sinks_H: Tensor | None
    slopes_H: Tensor | None
    bias_HR: Tensor | None
    begins_S: Tensor | None
    ends_T: Tensor | None
    scale: float
    sliding_window: int
    is_chunked: bool
    soft_cap: float


_KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _attend(query_THD: Tensor, cache: _Cache, out_THE: Tensor, logs_TH: Tensor | None, softmax: _Softmax) -> None:
    num_tokens, num_heads, head_dim = query_THD.shape
    num_sequences, num_blocks = cache.block_tables_SM.shape
    if num_tokens == 0 or num_sequences == 0:
        return
    device = target()
    num_kv_heads, block_size = cache.k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    value_dim = out_THE.shape[2]
    dtype = _dtype_of_products(query_THD.dtype, cache.k_cache.dtype)
    tiles = _tiles(dtype, has_scales(cache.k_cache.dtype), head_dim, value_dim, device)
    k_cache, k_scales = numbers_and_scales(cache.k_cache, device.has_fp8)
    v_cache, v_scales = numbers_and_scales(cache.v_cache, device.has_fp8)
    block_dim = 1 << head_dim.bit_length() - 1
    block_rest = block_of(max(head_dim - block_dim, 16)) if head_dim > block_dim else 0
    # products of tiles have 16 columns at the least
    block_dim = max(block_dim, 16)
    block_value = max(block_of(value_dim), 32)
    num_slices = max(1, block_value // tiles.most_columns)
    block_value //= num_slices
    values_are_keys = cache.v_cache is cache.k_cache and block_dim == value_dim
    if values_are_keys:
        block_dim //= num_slices

    num_partitions = -(-num_blocks * block_size // _PARTITION)
    num_few = max(4, tiles.few_rows // group)
    tiles_of_few = -(-num_few * group // tiles.few_rows)
    programs_of_few = num_sequences * num_kv_heads * num_slices * -(-group // tiles.few_rows)
    is_split = num_partitions > 1 and programs_of_few < 2 * device.num_units
    # a part belongs to a token, or, where tokens are mostly those of prompts, to one of the few that a sequence has
    rows_of_few = 0 if num_tokens <= num_sequences * num_few else num_few
    num_rows = num_tokens if rows_of_few == 0 else num_sequences * num_few

    is_capped = softmax.soft_cap > 0
    cap = softmax.soft_cap * _LOG2_E
    scale = softmax.scale * (2 * _LOG2_E / softmax.soft_cap if is_capped else _LOG2_E)
    # what is not there is never read
    sinks = query_THD if softmax.sinks_H is None else softmax.sinks_H
    slopes = query_THD if softmax.slopes_H is None else softmax.slopes_H
    bias = query_THD if softmax.bias_HR is None else softmax.bias_HR
    begins = query_THD if softmax.begins_S is None else softmax.begins_S
    ends = query_THD if softmax.ends_T is None else softmax.ends_T
    logs = out_THE if logs_TH is None else logs_TH
    constants = {
        "has_window": softmax.sliding_window > 0,
        "is_chunked": softmax.is_chunked and softmax.sliding_window > 0,
        "has_sinks": softmax.sinks_H is not None,
        "has_begins": softmax.begins_S is not None,
        "has_ends": softmax.ends_T is not None,
        "has_logs": logs_TH is not None,
        "block_value": block_value,
        "num_slices": num_slices,
        "partition_keys": _PARTITION,
    }

    def attend(num_tiles: int, is_few: bool, is_split: bool, sums: tuple[Tensor, ...]) -> None:
        launch(
            _attention,
            (num_tiles, num_kv_heads * num_slices, num_partitions if is_split else 1),
            query_THD,
            k_cache,
            v_cache,
            k_scales,
            v_scales,
            cache.block_tables_SM,
            cache.seq_lens_S,
            cache.query_starts_S1,
            sinks,
            slopes,
            bias,
            begins,
            ends,
            out_THE,
            logs,
            *sums,
            *query_THD.stride()[:2],
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            *k_scales.stride()[:2],
            *v_scales.stride()[:2],
            cache.block_tables_SM.stride(0),
            *out_THE.stride()[:2],
            *logs.stride()[:2],
            num_sequences,
            num_heads,
            num_few,
            tiles_of_few,
            rows_of_few,
            cache.rank,
            cache.size,
            scale,
            softmax.sliding_window,
            cap,
            bias.stride(0),
            bias.shape[1],
            group=group,
            block_size=block_size,
            head_dim=head_dim,
            value_dim=value_dim,
            kind=_KINDS[dtype],
            is_few=is_few,
            is_split=is_split,
            has_scales=has_scales(cache.k_cache.dtype),
            has_cap=is_capped,
            has_slopes=softmax.slopes_H is not None,
            has_bias=softmax.bias_HR is not None,
            has_totals=num_partitions > 1,
            values_are_keys=values_are_keys,
            precision="ieee" if dtype == torch.float32 else None,
            block_rows=tiles.few_rows if is_few else tiles.many_rows,
            block_keys=tiles.keys,
            block_dim=block_dim,
            block_rest=block_rest,
            num_warps=tiles.few_warps if is_few else tiles.many_warps,
            num_stages=tiles.few_stages if is_few else tiles.many_stages,
            registers=tiles.few_registers if is_few else tiles.many_registers,
            **constants,
        )

    kept_tokens = 0 if num_partitions == 1 or (is_split and num_tokens <= num_few) else num_tokens
    totals = query_THD.new_empty((kept_tokens, num_heads, num_slices * block_value), dtype=torch.float32)
    folded = totals, totals, totals
    if num_tokens > num_few:
        num_tiles = num_tokens * group // tiles.many_rows + num_sequences
        attend(num_tiles, is_few=False, is_split=False, sums=folded)
    if not is_split:
        attend(num_sequences * tiles_of_few, is_few=True, is_split=False, sums=folded)
        return
    parts = totals.new_empty((num_rows, num_heads, num_partitions, num_slices, block_value))
    sums = parts, parts.new_empty(parts.shape[:4]), parts.new_empty(parts.shape[:4])
    attend(num_sequences * tiles_of_few, is_few=True, is_split=True, sums=sums)
    launch(
        _merge,
        (num_rows, num_heads * num_slices),
        *sums,
        cache.seq_lens_S,
        cache.query_starts_S1,
        sinks,
        begins,
        ends,
        out_THE,
        logs,
        *out_THE.stride()[:2],
        *logs.stride()[:2],
        num_sequences,
        num_heads,
        num_few,
        rows_of_few,
        num_partitions,
        cache.rank,
        cache.size,
        softmax.sliding_window,
        value_dim,
        num_warps=max(1, min(4, block_value // 64)),
        **constants,
    )


def _dtype_of_products(query: torch.dtype, cache: torch.dtype) -> torch.dtype:
    """That of the query, in which codes of a cache are exact; what is mixed otherwise is multiplied in float32."""
    return query if query == cache or has_scales(cache) else torch.float32


def merge_attention(parts_TPHE: Tensor, out_THE: Tensor) -> None:
    num_tokens, num_ranks, num_heads, width = parts_TPHE.shape
    parts_TPHE = parts_TPHE.contiguous()
    block = block_of(width - 1)
    launch(
        _merge_ranks,
        (num_tokens, num_heads),
        parts_TPHE,
        out_THE,
        *out_THE.stride()[:2],
        num_heads,
        num_ranks,
        width - 1,
        block=block,
        num_warps=max(1, min(4, block // 64)),
    )


@triton.jit
def _merge_ranks(parts, out, out_token, out_head, num_heads, num_ranks, width, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, block)
    is_real = column < width
    first = parts + (token * num_ranks * num_heads + head) * (width + 1)
    step = num_heads * (width + 1)
    highest = tl.load(first + width)
    for rank in range(1, num_ranks):
        highest = tl.maximum(highest, tl.load(first + rank * step + width))
    highest = tl.maximum(highest, -3.4028234663852886e38)
    total = tl.zeros([block], tl.float32)
    weight = 0.0
    for rank in range(num_ranks):
        share = tl.exp(tl.load(first + rank * step + width) - highest)
        total += share * tl.load(first + rank * step + column, is_real, 0.0)
        weight += share
    result = tl.where(weight == 0, 0.0, total / weight)
    tl.store(out + token * out_token + head * out_head + column, result.to(out.dtype.element_ty), is_real)


def _example(
    sequences: tuple[tuple[int, int], ...],
    num_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    value_dim: int | None = None,
    **options: Any,
) -> None:
    """So many tokens of sequences that are so long, in blocks of 16. Latent where values are shorter than keys."""
    num_tokens = sum(count for count, _ in sequences)
    num_blocks = max(length for _, length in sequences) // 16
    query = floats(num_tokens, num_heads, head_dim, dtype=dtype)
    kept_as = cache_dtype or dtype
    num_places = len(sequences) * num_blocks
    k_cache, v_cache = (
        floats(num_places, num_kv_heads, 16, row_elements(head_dim, kept_as), dtype=kept_as) for _ in range(2)
    )
    softmax = {"scale": 0.1, "sliding_window": 0, "is_chunked": False, "soft_cap": 0.0} | options
    paged_attention(
        query,
        k_cache,
        v_cache if value_dim is None else k_cache,
        given(range(num_places), torch.int32).view(len(sequences), num_blocks),
        given((length for _, length in sequences), torch.int32),
        given(itertools.accumulate((count for count, _ in sequences), initial=0), torch.int32),
        query.new_empty(num_tokens, num_heads, value_dim or head_dim),
        None,
        None,
        **softmax,
    )


def _cost(sequences: tuple[tuple[int, int], ...], kv_bytes: int, work: int) -> dict[str, int]:
    """Bytes of a token's keys and values, and operations of a token on one of them."""
    pairs = sum(count * length - count * (count - 1) // 2 for count, length in sequences)
    return {"bytes_moved": kv_bytes * sum(length for _, length in sequences), "operations": work * pairs}


_ONES = ((1, 4096),) * 4
_MANY_ONES = ((1, 4096),) * 64
# as many as fill any device
_MOST_ONES = ((1, 4096),) * 160
_PROMPT = ((4096, 4096),)
_OF_8B = 4 * 32 * 128
_LATENT = {"num_heads": 128, "num_kv_heads": 1, "head_dim": 576, "value_dim": 512}
_OF_LATENT = 2 * 128 * (576 + 512)

EXAMPLES = (
    Example("four tokens of 8B", lambda: _example(_ONES), **_cost(_ONES, 4096, _OF_8B)),
    Example("many tokens of 8B", lambda: _example(_MANY_ONES), **_cost(_MANY_ONES, 4096, _OF_8B)),
    Example("a prompt of 8B", lambda: _example(_PROMPT), **_cost(_PROMPT, 4096, _OF_8B)),
    Example(
        "four tokens, eight-bit floats",
        lambda: _example(_ONES, cache_dtype=torch.float8_e4m3fn),
        **_cost(_ONES, 2112, _OF_8B),
    ),
    Example(
        "a prompt with windows and a cap",
        lambda: _example(_PROMPT, 8, 4, 256, sliding_window=1024, soft_cap=50.0),
        bytes_moved=4096 * 4096,
        operations=4 * 8 * 256 * 4096 * 1024,
    ),
    Example("four tokens of latent attention", lambda: _example(_ONES, **_LATENT), **_cost(_ONES, 1152, _OF_LATENT)),
    Example(
        "many tokens of latent attention",
        lambda: _example(_MOST_ONES, **_LATENT),
        **_cost(_MOST_ONES, 1152, _OF_LATENT),
    ),
    Example(
        "four tokens of latent attention, eight-bit floats",
        lambda: _example(_ONES, cache_dtype=torch.float8_e4m3fn, **_LATENT),
        **_cost(_ONES, 580, _OF_LATENT),
    ),
    Example("a prompt of latent attention", lambda: _example(_PROMPT, **_LATENT), **_cost(_PROMPT, 1152, _OF_LATENT)),
    Example(
        "a prompt with heads of 512",
        lambda: _example(_PROMPT, 16, 4, 512),
        **_cost(_PROMPT, 2 * 4 * 512 * 2, 4 * 16 * 512),
    ),
    Example("a prompt in float32", lambda: _example(_PROMPT, dtype=torch.float32), 8192 * 4096),
)
