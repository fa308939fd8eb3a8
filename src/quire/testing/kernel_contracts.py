"""What every home of a kernel must do: grids of cases, each compared with the reference or with dense PyTorch.

This file has the kernels on the KV cache; `fused_contracts.py` has the small operations.

A twin is anything with the functions of `quire.worker.kernels`, as `quire.worker.kernels.reference` is. A new home runs

    @pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
    def test_attention(case):
        check_paged_attention(my_twin, case, device="cuda")

The caches of every case are hostile: places that no sequence owns hold NaN, blocks are scattered, the tail of each row
of the block table and what a window has left behind are ids that do not exist. Tensors are slices of wider ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.testing.attention_cases import TOLERANCE, AttentionCase
from quire.worker.kernels import reference
from quire.worker.kernels.cache_format import codes_of, decoded, has_scales, row_elements, scales_of
from quire.worker.kernels.reference.paged_attention import first_visible


@dataclass
class PagedBatch:
    """The tensors of a case. Keys and values are also kept as they were before they were cut into blocks."""

    query_THD: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables_SM: Tensor
    seq_lens_S: Tensor
    query_starts_S1: Tensor
    sinks_H: Tensor | None
    scale: float
    slots: Tensor
    key_TKD: Tensor
    value_TKE: Tensor
    ends_T: Tensor | None = None
    slopes_H: Tensor | None = None
    begins_S: Tensor | None = None
    bias_HR: Tensor | None = None
    options: dict[str, float | int] = field(default_factory=dict)

    @property
    def rows_to_keep(self) -> tuple[Tensor, Tensor | None]:
        """Keys, and values where they are no parts of keys."""
        return self.key_TKD, None if self.v_cache is self.k_cache else self.value_TKE

    def attend(self, kernels: Any) -> Tensor:
        out = self.query_THD.new_full((*self.query_THD.shape[:2], self.value_TKE.shape[-1]), 77.0)
        soft_cap, window = float(self.options.get("soft_cap", 0.0)), int(self.options.get("sliding_window", 0))
        kernels.paged_attention(
            self.query_THD,
            self.k_cache,
            self.v_cache,
            self.block_tables_SM,
            self.seq_lens_S,
            self.query_starts_S1,
            out,
            scale=self.scale,
            sliding_window=window,
            is_chunked=bool(self.options.get("is_chunked", False)),
            soft_cap=soft_cap,
            sinks_H=self.sinks_H,
            ends_T=self.ends_T,
            **self.position_options,
        )
        return out

    @property
    def position_options(self) -> dict[str, Tensor]:
        """Those of few layers, which not every home has."""
        given = {"slopes_H": self.slopes_H, "begins_S": self.begins_S, "bias_HR": self.bias_HR}
        return {name: tensor for name, tensor in given.items() if tensor is not None}


def make_batch(case: AttentionCase, device: str = "cpu", seed: int = 0) -> PagedBatch:
    """Random tensors for a case, the caches filled through the reference."""
    random = torch.Generator().manual_seed(seed)
    value_dim = case.value_dim or case.head_dim
    tables, num_blocks = _block_tables(case, random)
    rows, tokens = sum(n for n, _ in case.sequences), sum(length for _, length in case.sequences)

    def cache(num_layers: int, dim: int) -> Tensor:
        # All layers in one tensor: each is a view with a wide stride over blocks. NaN, or codes with scales of NaN.
        shape = (num_blocks, num_layers, case.num_kv_heads, case.block_size, row_elements(dim, case.kept_as))
        layers = torch.empty(shape, dtype=case.kept_as)
        layers.view(torch.uint8).fill_(0xFF)
        return layers.to(device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(case.dtype).to(device)

    # Slices of one wider tensor, as a fused projection of query, key and value gives them.
    query_THD = normal(rows, case.num_heads + 1, case.head_dim)[:, 1:]
    fused = normal(tokens, case.num_kv_heads, case.head_dim + value_dim)
    slots = [
        int(tables[s, p // case.block_size]) * case.block_size + p % case.block_size
        for s, (_, length) in enumerate(case.sequences)
        for p in range(length)
    ]
    k_cache = cache(2, case.head_dim)[:, 1]
    key_TKD, value_TKE = fused[..., : case.head_dim], fused[..., case.head_dim :]
    batch = PagedBatch(
        query_THD=query_THD,
        k_cache=k_cache,
        v_cache=k_cache if case.values_in_keys else cache(3, value_dim)[:, 0],
        block_tables_SM=tables.to(device),
        seq_lens_S=torch.tensor([length for _, length in case.sequences], dtype=torch.int32, device=device),
        query_starts_S1=torch.tensor([0, *(n for n, _ in case.sequences)], device=device).cumsum(0).int(),
        sinks_H=normal(case.num_heads).float() if case.has_sinks else None,
        scale=case.head_dim**-0.5,
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
        key_TKD=key_TKD,
        value_TKE=key_TKD[..., :value_dim] if case.values_in_keys else value_TKE,
        ends_T=None if case.together is None else torch.tensor(case.ends, dtype=torch.int32, device=device),
        slopes_H=normal(case.num_heads).float().abs() / 32 if case.has_slopes else None,
        begins_S=torch.tensor(case.begins, dtype=torch.int32, device=device) if case.begin else None,
        bias_HR=normal(case.num_heads, case.num_distances) if case.num_distances else None,
        options={"sliding_window": case.sliding_window, "is_chunked": case.is_chunked, "soft_cap": case.soft_cap},
    )
    reference.write_kv(*batch.rows_to_keep, batch.k_cache, batch.v_cache, batch.slots)
    forget_what_windows_left(batch, case)
    return batch


def _block_tables(case: AttentionCase, random: torch.Generator) -> tuple[Tensor, int]:
    counts = [-(-length // case.block_size) for _, length in case.sequences]
    num_blocks = sum(counts) + 3
    ids = torch.randperm(num_blocks, generator=random).int()
    tables = torch.full((len(counts), max(counts) + 2), 2**31 - 1, dtype=torch.int32)
    for s, count in enumerate(counts):
        begin = sum(counts[:s])
        tables[s, :count] = ids[begin : begin + count]
    return tables, num_blocks


def forget_what_windows_left(batch: PagedBatch, case: AttentionCase) -> None:
    """Block ids that no query row can see any more become ids that do not exist."""
    if case.sliding_window > 0 or case.begin:
        for s, (num_rows, length) in enumerate(case.sequences):
            first = max(first_visible(length - num_rows, case.sliding_window, case.is_chunked), case.begins[s])
            batch.block_tables_SM[s, : first // case.block_size] = 2**30


def dense_attention(batch: PagedBatch, case: AttentionCase) -> Tensor:
    """The same with `scaled_dot_product_attention` on contiguous float32 tensors; no soft cap, no sinks."""
    outputs: list[Tensor] = []
    row = token = 0
    for num_rows, length in case.sequences:
        query_HQD = batch.query_THD[row : row + num_rows].float().transpose(0, 1)
        key_KPD = _as_kept(batch.key_TKD[token : token + length], case.kept_as).transpose(0, 1)
        value_KPE = _as_kept(batch.value_TKE[token : token + length], case.kept_as).transpose(0, 1)
        if case.values_in_keys:  # the codes of a value are those of its key
            value_KPE = key_KPD[..., : value_KPE.shape[-1]]
        group_size = case.num_heads // case.num_kv_heads
        distance = torch.arange(length - num_rows, length)[:, None] - torch.arange(length)
        ends = torch.tensor(case.ends[row : row + num_rows]).view(-1, 1)
        visible = (torch.arange(length) < ends) & (distance < (case.sliding_window or length + 1))
        if case.is_chunked:
            chunk = torch.arange(length) // case.sliding_window
            visible &= chunk[length - num_rows :, None] == chunk
        visible &= torch.arange(length) >= case.begins[len(outputs)]
        key_HPD, value_HPE = key_KPD.repeat_interleave(group_size, 0), value_KPE.repeat_interleave(group_size, 0)
        mask = visible.to(query_HQD.device)
        distance = distance.to(query_HQD.device)
        if batch.slopes_H is not None:
            mask = (-batch.slopes_H[:, None, None] * distance).masked_fill(~mask, -torch.inf)
        if batch.bias_HR is not None:
            bias = batch.bias_HR.float()[:, distance.clamp(0, case.num_distances - 1)]
            mask = bias.masked_fill(~mask, -torch.inf)
        out = F.scaled_dot_product_attention(query_HQD, key_HPD, value_HPE, attn_mask=mask, scale=batch.scale)
        outputs.append(out.transpose(0, 1))
        row, token = row + num_rows, token + length
    return torch.cat(outputs).to(case.dtype)


def _as_kept(rows_TKD: Tensor, dtype: torch.dtype) -> Tensor:
    """As float32, after they were in a cache of this type."""
    num_tokens, num_heads, dim = rows_TKD.shape
    cache = torch.zeros((num_tokens, num_heads, 1, row_elements(dim, dtype)), dtype=dtype, device=rows_TKD.device)
    token_T = torch.arange(num_tokens, device=rows_TKD.device)
    reference.write_kv(rows_TKD, rows_TKD, cache, cache, token_T)
    return decoded(cache, token_T)[:, :, 0]


def assert_close(actual: Tensor, expected: Tensor, factor: float = 1.0, tolerance: float | None = None) -> None:
    """Within `factor` times the tolerance of the dtype. NaN is never close: the hostile caches are full of it."""
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    bound = (tolerance or TOLERANCE[actual.dtype]) * factor
    torch.testing.assert_close(actual.float(), expected.float(), rtol=bound, atol=bound, equal_nan=False)


def check_paged_attention(kernels: Any, case: AttentionCase, device: str = "cpu") -> None:
    """A twin against the reference."""
    batch = make_batch(case, device)
    assert_close(batch.attend(kernels), batch.attend(reference), tolerance=case.tolerance)


def check_attention_of_ranks(kernels: Any, case: AttentionCase, size: int, num_shared: int = 0) -> None:
    """Ranks that share the places of each block: merged, their parts are the whole."""
    batch = make_batch(case)
    num_blocks = num_shared // case.block_size
    batch.block_tables_SM[1:, :num_blocks] = batch.block_tables_SM[:1, :num_blocks]
    slots = _slots_of(batch, case).tolist()
    # sequences that share blocks have the same slots there: the last of them writes, as nobody says who is first
    last = {slot: place for place, slot in enumerate(slots)}
    batch.slots = torch.tensor([slot if last[slot] == place else -1 for place, slot in enumerate(slots)])
    reference.write_kv(*batch.rows_to_keep, batch.k_cache, batch.v_cache, batch.slots)
    expected = batch.attend(reference)
    parts = []
    for rank in range(size):
        k_cache = _places_of_a_rank(batch.k_cache, size)
        v_cache = k_cache if case.values_in_keys else _places_of_a_rank(batch.v_cache, size)
        kernels.write_kv(*batch.rows_to_keep, k_cache, v_cache, batch.slots, rank, size)
        parts.append(
            kernels.attention_part(
                batch.query_THD,
                k_cache,
                v_cache,
                batch.block_tables_SM,
                batch.seq_lens_S,
                batch.query_starts_S1,
                scale=batch.scale,
                value_dim=expected.shape[-1],
                rank=rank,
                size=size,
                sliding_window=case.sliding_window,
                is_chunked=case.is_chunked,
                soft_cap=case.soft_cap,
                sinks_H=batch.sinks_H if rank == 0 else None,
                ends_T=batch.ends_T,
                **batch.position_options,
            )
        )
    found = torch.full_like(expected, 77.0)
    kernels.merge_attention(torch.stack(parts, 1), found)
    assert_close(found, expected, tolerance=case.tolerance)


def _places_of_a_rank(cache: Tensor, size: int) -> Tensor:
    """What a rank keeps of the blocks of a cache, empty: NaN."""
    num_blocks, num_heads, block_size, width = cache.shape
    own = torch.empty((num_blocks, num_heads, block_size // size, width), dtype=cache.dtype)
    own.view(torch.uint8).fill_(0xFF)
    return own


def _slots_of(batch: PagedBatch, case: AttentionCase) -> Tensor:
    """Of every position of every sequence; none where its block is gone."""
    exists = batch.block_tables_SM < batch.k_cache.shape[0]
    slots = [
        int(batch.block_tables_SM[s, p // case.block_size]) * case.block_size + p % case.block_size
        if exists[s, p // case.block_size]
        else -1
        for s, (_, length) in enumerate(case.sequences)
        for p in range(length)
    ]
    return torch.tensor(slots, dtype=torch.int64)


def check_reference_attention(case: AttentionCase, device: str = "cpu") -> None:
    """The reference against dense attention, where that has all it needs."""
    batch = make_batch(case, device)
    assert_close(batch.attend(reference), dense_attention(batch, case))


def check_sharing(kernels: Any, case: AttentionCase, num_shared: int, device: str = "cpu") -> None:
    """Sequences that begin with the same blocks: each gets the bits that it gets alone, and the right ones."""
    batch = make_batch(case, device)
    num_blocks = num_shared // case.block_size
    batch.block_tables_SM[1:, :num_blocks] = batch.block_tables_SM[:1, :num_blocks]
    assert_close(batch.attend(kernels), batch.attend(reference), tolerance=case.tolerance)
    check_invariance(kernels, case, device, batch)


def check_invariance(kernels: Any, case: AttentionCase, device: str = "cpu", batch: PagedBatch | None = None) -> None:
    """A row's bits do not depend on the rest of the batch, nor on how its sequence is cut, nor on where blocks lie."""
    batch = batch or make_batch(case, device)
    whole = batch.attend(kernels)
    row = 0
    for s, (num_rows, length) in enumerate(case.sequences):
        for size in {1, 7, num_rows} - {0}:
            for start, stop in _pieces(case, row, num_rows, length, size):
                ends = None if batch.ends_T is None else batch.ends_T[row + start : row + stop]
                piece = PagedBatch(**{
                    **vars(batch),
                    "query_THD": batch.query_THD[row + start : row + stop],
                    "ends_T": ends,
                    "begins_S": None if batch.begins_S is None else batch.begins_S[s : s + 1],
                    "block_tables_SM": batch.block_tables_SM[s : s + 1],
                    "seq_lens_S": torch.tensor([length - num_rows + stop], dtype=torch.int32, device=device),
                    "query_starts_S1": torch.tensor([0, stop - start], dtype=torch.int32, device=device),
                })  # fmt: skip
                assert torch.equal(piece.attend(kernels), whole[row + start : row + stop]), f"sequence {s}, size {size}"
        row += num_rows
    order = torch.randperm(batch.k_cache.shape[0], generator=torch.Generator().manual_seed(9)).to(device)
    exists = batch.block_tables_SM < order.shape[0]
    places = torch.argsort(order)[torch.where(exists, batch.block_tables_SM, 0)].int()
    moved_keys = _taken(batch.k_cache, order)
    moved = PagedBatch(**{
        **vars(batch),
        "k_cache": moved_keys,
        "v_cache": moved_keys if case.values_in_keys else _taken(batch.v_cache, order),
        "block_tables_SM": torch.where(exists, places, batch.block_tables_SM),
    })  # fmt: skip
    assert torch.equal(moved.attend(kernels), whole), "blocks moved"


def _pieces(case: AttentionCase, row: int, num_rows: int, length: int, size: int) -> list[tuple[int, int]]:
    """Cuts of about `size` rows, where no row of a piece sees further than the piece."""
    pieces = []
    start = 0
    while start < num_rows:
        stop = min(start + size, num_rows)
        while case.ends[row + stop - 1] > length - num_rows + stop:
            stop += 1
        pieces.append((start, stop))
        start = stop
    return pieces


def _taken(cache: Tensor, blocks: Tensor) -> Tensor:
    return cache.view(torch.uint8)[blocks].view(cache.dtype)


def check_write_kv(
    kernels: Any, case: AttentionCase, device: str = "cpu", slot_dtype: torch.dtype = torch.int64
) -> None:
    """Rows land in their slots, bit by bit; negative slots and all other places stay as they were."""
    batch = make_batch(case, device)
    if has_scales(case.kept_as):
        _add_odd_rows(batch)
    batch.slots = batch.slots.to(slot_dtype)
    slots = batch.slots.clone()
    slots[::3] = -1
    for chosen in (slots, torch.full_like(slots, -1), batch.slots):
        caches = [cache.clone() for cache in (batch.k_cache, batch.v_cache)]
        for cache in caches:
            cache.view(torch.uint8).fill_(5)
        expected = [cache.clone() for cache in caches]
        kernels.write_kv(*batch.rows_to_keep, caches[0], caches[1], chosen)
        if has_scales(case.kept_as):
            reference.write_kv(*batch.rows_to_keep, expected[0], expected[1], chosen)
        else:
            for t, slot in enumerate(chosen.tolist()):
                if slot >= 0:
                    expected[0][slot // case.block_size, :, slot % case.block_size] = batch.key_TKD[t]
                    if not case.values_in_keys:
                        expected[1][slot // case.block_size, :, slot % case.block_size] = batch.value_TKE[t]
        assert all(_are_same(cache, right) for cache, right in zip(caches, expected, strict=True))


def _add_odd_rows(batch: PagedBatch) -> None:
    """Rows of zeros, of hardly anything, of halves between two codes, with a NaN, with an infinity."""
    rows = batch.key_TKD[:6]
    rows[0], rows[1], rows[2] = 0.0, 1e-35, torch.arange(rows.shape[-1]) + 0.5
    rows[2, :, 0] = 127.0
    rows[3, :, 1], rows[4, :, 2] = math.nan, -math.inf
    rows[5] *= 2.0**-9  # below the least normal code
    rows[5, :, 0] = 448.0


def _are_same(cache: Tensor, right: Tensor) -> bool:
    """Bit by bit, but any NaN is as good as another."""
    if not has_scales(cache.dtype):
        return torch.equal(cache, right)
    scales, right_scales = scales_of(cache), scales_of(right)
    return torch.equal(codes_of(cache), codes_of(right)) and torch.equal(
        torch.nan_to_num(scales, -1.0), torch.nan_to_num(right_scales, -1.0)
    )


def check_copy_blocks(kernels: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """Pairs take effect in order, in every cache, also in views; a destination may be a later source."""
    for pairs in ([], [[0, 1]], [[2, 5], [5, 6], [0, 5]], [[3, 3], [1, 4], [2, 1]]):
        wide = torch.randn(7, 2, 3, 4, 8, device=device).to(dtype)
        caches = [wide[:, 0], wide[:, 1], torch.randn(7, 2, 2, 6000, device=device).to(dtype)]
        expected = [cache.clone() for cache in caches]
        for cache in expected:
            for source, destination in pairs:
                cache[destination] = cache[source].clone()
        kernels.copy_blocks(caches, torch.tensor(pairs, dtype=torch.int64).view(-1, 2))
        assert all(torch.equal(cache, right) for cache, right in zip(caches, expected, strict=True)), f"pairs={pairs}"


def check_move_blocks(kernels: Any, dtype: torch.dtype, here: str = "cpu", there: str = "cpu") -> None:
    """To an arena with other strides and back, bit by bit, on another device too."""
    wide = torch.randn(7, 2, 3, 4, 8, device=here).to(dtype)
    sources = [wide[:, 0], wide[:, 1], torch.randn(7, 2, 2, 6000, device=here).to(dtype)]
    arena = torch.full((5, 4 * 96 + 24_000), 9.0, device=there).to(dtype)
    parts = [arena[:, 288:384].view(5, 3, 4, 8), arena[:, :96].view(5, 3, 4, 8), arena[:, 384:].view(5, 2, 2, 6000)]
    for pairs in ([], [[6, 0]], [[2, 4], [5, 1], [0, 0], [3, 2]]):
        pairs_N2 = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
        moved, places = pairs_N2.T.tolist()
        back, before = [torch.full_like(source, 7.0) for source in sources], [part.clone() for part in parts]
        kernels.move_blocks(sources, parts, pairs_N2)
        kernels.move_blocks(parts, back, pairs_N2.flip(1).contiguous())
        for source, part, right, returned in zip(sources, parts, before, back, strict=True):
            right[places] = source[moved].to(there)
            right_back = torch.full_like(source, 7.0)
            right_back[moved] = source[moved]
            assert torch.equal(part, right), f"pairs={pairs}"
            assert torch.equal(returned, right_back), f"pairs={pairs}"
    assert (arena[:, 96:288] == 9.0).all(), "written between the parts of a block"
