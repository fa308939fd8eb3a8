"""structured_outputs: nothing but what the grammar of the request allows next. End tokens where it may end."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from quire.messages import AdmittedSequence
from quire.structured_output.grammars import Grammars
from quire.structured_output.walk import Walk, Words
from quire.worker.kernels import apply_bitmask
from quire.worker.row_table import RowTable
from quire.worker.sampler.processors.processor import User
from quire.worker.staging import to_device


class StructuredOutput:
    """A walk through a grammar for each row. `reasons` is told why a row is left with nothing; that ends it alone."""

    def __init__(self, table: RowTable, grammars: Grammars, reasons: dict[int, str]) -> None:
        self._table = table
        self._grammars = grammars
        self._reasons = reasons

    def state_of(self, sequence: AdmittedSequence) -> Walk | None:
        asked = sequence.sampling.structured_outputs
        return None if asked is None else self._grammars.walk(asked)

    def state_of_child(self, parent: Walk) -> Walk:
        return parent.child()

    def apply(self, logits_NV: Tensor, users: list[User[Walk]]) -> None:
        mask_nW = np.zeros((len(users), self._grammars.num_words), dtype=np.int32)
        positions: list[int] = []
        for user in users:
            if self._fill(user, mask_nW[len(positions)]):
                positions.append(user.position)
        if positions:
            index = np.array(positions, dtype=np.int64)
            index_n, masks = to_device([index, mask_nW[: len(positions)]], logits_NV.device)
            apply_bitmask(logits_NV, index_n, masks)

    def _fill(self, user: User[Walk], mask_W: Words) -> bool:
        """False: this position is free. A row whose grammar fails is left with nothing."""
        table, row = self._table, user.row
        start = int(table.num_prompt[row])
        try:
            num_sure = int(table.num_verified(row)) - start
            return user.state.fill(table.token_ids[row, start : user.length], num_sure, mask_W)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is no Exception
            self._reasons[row] = f"structured_outputs: the grammar cannot be followed: {error}"
            mask_W.fill(0)
            return True
