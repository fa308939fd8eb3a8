"""Inputs gathered with array operations equal those of the obvious loop."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.worker.input_batch import BatchBuilder
from quire.worker.row_table import RowTable

BLOCK_SIZE = 4
NUM_GROUPS = 2
MAX_LEN = 32


def filled_table(num_rows, seed):
    """Rows with random tokens and blocks; the two numbers are set by the test."""
    random = np.random.default_rng(seed)
    table = RowTable(num_rows, MAX_LEN)
    table.open_groups(NUM_GROUPS, MAX_LEN // BLOCK_SIZE, num_blocks=1000)
    table.token_ids[:] = random.integers(0, 500, table.token_ids.shape)
    table.block_tables[:] = random.integers(0, 1000, table.block_tables.shape)
    return table


@st.composite
def steps(draw):
    num_rows = draw(st.integers(1, 8))
    rows = draw(st.permutations(range(num_rows)))[: draw(st.integers(1, num_rows))]
    spans = []
    for _ in rows:
        computed = draw(st.integers(0, MAX_LEN - 1))
        count = draw(st.integers(1, MAX_LEN - computed))
        total = draw(st.integers(computed + count, MAX_LEN))
        is_final = draw(st.booleans())
        # a token that is not computed comes before the drafts
        drafts = draw(st.integers(0, total - computed - 1)) if is_final else 0
        spans.append((computed, count, total, is_final, drafts))
    return num_rows, rows, spans


@given(steps(), st.integers(0, 100))
def test_equals_a_loop_over_sequences(step, seed):
    num_rows, rows, spans = step
    table = filled_table(num_rows, seed)
    for row, (computed, _, total, is_final, drafts) in zip(rows, spans, strict=True):
        table.num_computed[row], table.num_total[row], table.is_final[row] = computed, total, is_final
        table.num_drafts[row] = drafts

    counts = [span[1] for span in spans]
    batch = BatchBuilder(table, BLOCK_SIZE, torch.device("cpu")).build(np.array(rows), np.array(counts))

    ids, positions, starts, sampling, sampling_lengths, indices = [], [], [0], [], [], []
    slots = [[] for _ in range(NUM_GROUPS)]
    for row, (computed, count, total, is_final, drafts) in zip(rows, spans, strict=True):
        for position in range(computed, computed + count):
            # a draft follows, or nothing does
            if is_final and position + 1 >= total - drafts:
                sampling.append(row)
                sampling_lengths.append(position + 1)
                indices.append(len(ids))
            ids.append(int(table.token_ids[row, position]))
            positions.append(position)
            for group in range(NUM_GROUPS):
                block = int(table.block_tables[group, row, position // BLOCK_SIZE])
                slots[group].append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        starts.append(len(ids))
    lengths = [computed + count for computed, count, *_ in spans]
    width = -(-max(lengths) // BLOCK_SIZE)

    assert batch.input_ids_T.tolist() == ids
    assert batch.positions_T.tolist() == positions
    assert batch.sampling_rows_N.tolist() == sampling
    assert batch.lengths_N.tolist() == sampling_lengths
    assert batch.logits_indices_N.tolist() == indices
    for group, attention in enumerate(batch.attention):
        assert attention.query_starts_S1.tolist() == starts
        assert attention.seq_lens_S.tolist() == lengths
        assert attention.slots_T.tolist() == slots[group]
        assert attention.block_tables_SM.tolist() == table.block_tables[group, rows, :width].tolist()
        assert (attention.max_query_len, attention.max_seq_len) == (max(counts), max(lengths))


def test_types_are_those_of_the_kernels():
    table = filled_table(2, 0)
    table.num_total[:] = 3
    batch = BatchBuilder(table, BLOCK_SIZE, torch.device("cpu")).build(np.array([1, 0]), np.array([1, 2]))

    assert batch.input_ids_T.dtype == batch.positions_T.dtype == torch.int64
    attention = batch.attention[0]
    assert attention.slots_T.dtype == torch.int64
    assert {attention.query_starts_S1.dtype, attention.seq_lens_S.dtype} == {torch.int32}
    assert attention.block_tables_SM.dtype == torch.int32
    assert attention.block_tables_SM.is_contiguous()


def slots_of(table, rows, counts):
    batch = BatchBuilder(table, BLOCK_SIZE, torch.device("cpu")).build(np.array(rows), np.array(counts))
    return batch.attention[0].slots_T.tolist()


def test_a_token_that_is_computed_once_more_is_not_written_again():
    """Others may hold its block by now; unless the row has got another one."""
    table = filled_table(2, 0)
    table.num_total[:] = 8
    table.num_computed[:] = [7, 5]
    written = slots_of(table, [0, 1], [1, 3])
    table.advance(np.array([0, 1]), np.array([1, 3]))
    table.step_back(np.array([0]))
    table.num_computed[1] = 5
    assert slots_of(table, [0, 1], [1, 3]) == [-1, *written[1:]]

    table.write_blocks(np.array([[0], [0], [1], [33]]))
    assert slots_of(table, [0, 1], [1, 3]) == [33 * BLOCK_SIZE + 3, *written[1:]]


def test_a_row_that_goes_on_from_elsewhere_writes_what_it_computes():
    table = filled_table(1, 0)
    table.num_total[:], table.num_computed[:] = 8, 8
    table.step_back(np.array([0]))
    table.set_progress([(0, 7)])
    assert slots_of(table, [0], [1]) != [-1]
