"""Block tables on the device follow those of the host, and a step gets of them what the host would have gathered."""

import numpy as np
import pytest
import torch
from tests.worker.kernels.triton.conftest import DEVICE

from quire.messages import ForkedSequence
from quire.worker import device_tables
from quire.worker.input_batch import BatchBuilder
from quire.worker.row_table import RowTable

NUM_ROWS, MAX_LEN, BLOCK_SIZE, NUM_GROUPS = 6, 40, 4, 2


def changed(table, random):
    """What a step brings: some blocks, sometimes a fork, which may come between two writes of one entry."""
    for _ in range(random.integers(0, 3)):
        count = random.integers(1, 9)
        columns = (NUM_GROUPS + 1, NUM_ROWS, MAX_LEN // BLOCK_SIZE, 1000)
        table.write_blocks(np.stack([random.integers(0, most, count) for most in columns]))
        if random.random() < 0.4:
            parent, row = random.permutation(NUM_ROWS)[:2].tolist()
            names = {"parent_row": parent, "row": row, "sequence_id": 1, "seed": 0}
            table.fork(ForkedSequence(**names, num_computed_tokens=3, num_total_tokens=5))


@pytest.mark.parametrize("seed", range(3))
def test_steps_equal_those_of_the_host(triton_kernels, monkeypatch, seed):
    random = np.random.default_rng(seed)
    table = RowTable(NUM_ROWS, MAX_LEN)
    table.open_groups(NUM_GROUPS + 1, MAX_LEN // BLOCK_SIZE, num_blocks=1000, num_state_blocks=2)
    table.num_total[:] = MAX_LEN
    cpu = torch.device("cpu")
    on_host = BatchBuilder(table, BLOCK_SIZE, cpu)
    monkeypatch.setattr(device_tables.triton, "serves", lambda device: True)
    on_device = BatchBuilder(table, BLOCK_SIZE, torch.device(DEVICE or "cpu"))
    for _ in range(5):
        changed(table, random)
        rows = random.permutation(NUM_ROWS)[: random.integers(1, NUM_ROWS + 1)]
        table.num_computed[rows] = random.integers(0, MAX_LEN - 8, len(rows))
        table.is_written[rows] = random.random(len(rows)) < 0.3
        counts = random.integers(1, 9, len(rows))
        expected, found = (builder.build(rows, counts).attention for builder in (on_host, on_device))
        assert len(found) == NUM_GROUPS
        for theirs, mine in zip(expected, found, strict=True):
            assert mine.slots_T.tolist() == theirs.slots_T.tolist()
            assert torch.equal(mine.block_tables_SM.cpu(), theirs.block_tables_SM)
            assert mine.block_tables_SM.is_contiguous()
            assert (mine.slots_T.dtype, mine.block_tables_SM.dtype) == (torch.int64, torch.int32)
    assert len(table.take_changes()) == 0
