"""Block tables where the model computes (4.6.2): only what has changed travels there, and one kernel writes it.

Owns the copies on the device. The row table remains the only one that decides what stands in them; it notes which
entries it has changed, and what they are is read from it when a step is built. Called by BatchBuilder.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.messages import IntArray
from quire.worker.arrival import Arrival, arrival_for_one_kernel
from quire.worker.kernels import triton
from quire.worker.row_table import RowTable


class DeviceTables:
    """Of all groups and rows."""

    def __init__(self, table: RowTable, device: torch.device, arrival: Arrival) -> None:
        """`arrival`: how rows and changes come there, each of which one kernel reads once."""
        self._table = table
        self._device = device
        self._arrival = arrival
        # made by the first step: before it the table may have no groups yet
        self._tables_GRM: Tensor | None = None

    def prepare(
        self, rows_S: IntArray, query_starts_S1: Tensor, num_tokens: int, longest: int, block_size: int
    ) -> list[Tensor]:
        """Block tables and slots of a step, one after the other for each group of attention layers."""
        from quire.worker.kernels.triton.prepare_blocks import prepare_blocks

        table = self._table
        tables_GRM = self._up_to_date()
        columns = [rows_S, table.num_computed[rows_S], table.is_written[rows_S].astype(np.int64)]
        num_groups = table.num_attention_groups
        rows, computed, is_written = self._arrival.bring(columns)
        block_tables, slots = prepare_blocks(
            tables_GRM, num_groups, rows, computed, is_written, query_starts_S1, num_tokens, longest, block_size
        )
        self._arrival.end()
        return [tensor for group in range(num_groups) for tensor in (block_tables[group], slots[group])]

    def _up_to_date(self) -> Tensor:
        from quire.worker.kernels.triton.prepare_blocks import apply_changes

        table = self._table
        places_n = table.take_changes()
        if self._tables_GRM is None:
            self._tables_GRM = torch.from_numpy(table.block_tables).to(self._device, copy=True)
        elif len(places_n):
            changes_2n = np.stack([places_n, table.block_tables.reshape(-1)[places_n].astype(np.int64)])
            apply_changes(self._tables_GRM, *self._arrival.bring([changes_2n]))
        return self._tables_GRM


def device_tables(table: RowTable, device: torch.device) -> DeviceTables | None:
    """None where rows are gathered on the host: its memory is that of the model."""
    if not triton.serves(device):
        return None
    table.notes_changes = True
    return DeviceTables(table, device, arrival_for_one_kernel(device))
