"""structured_outputs: nothing but what the grammar of the request allows next. End tokens where it may end.

A mask that the step cannot afford is made beside it, and its row is late (`beside.py`).
"""

from __future__ import annotations

import time

import numpy as np
from torch import Tensor

from quire.messages import AdmittedSequence, IntArray, split_sequence_id
from quire.structured_output.grammars import Grammars
from quire.structured_output.walk import HardMaskError, Tokens, Walk, Words
from quire.worker.kernels import apply_bitmask
from quire.worker.row_table import RowTable
from quire.worker.sampler.beside import BesideSteps, Job
from quire.worker.sampler.processors.processor import User
from quire.worker.staging import to_device

# Of a mask that was never made: nearly all of them take less.
_USUAL_SECONDS = 5e-5


class StructuredOutput:
    """A walk through a grammar for each row. `reasons` is told why a row is left with nothing; that ends it alone."""

    def __init__(self, table: RowTable, grammars: Grammars, beside: BesideSteps, reasons: dict[int, str]) -> None:
        self._table = table
        self._grammars = grammars
        self._beside = beside
        self._reasons = reasons

    def state_of(self, sequence: AdmittedSequence) -> Walk | None:
        asked = sequence.sampling.structured_outputs
        return None if asked is None else self._grammars.walk(asked, split_sequence_id(sequence.sequence_id)[0])

    def state_of_child(self, parent: Walk) -> Walk:
        """A copy counts like a mask: where the step cannot afford it, the child's first mask is made beside."""
        may_copy = self._beside.can_afford(parent.effort.copy_seconds or _USUAL_SECONDS)
        began = time.perf_counter()
        child = parent.child(may_copy=may_copy)
        self._beside.spend(time.perf_counter() - began)
        return child

    def apply(self, logits_NV: Tensor, users: list[User[Walk]]) -> None:
        mask_nW = np.zeros((len(users), self._grammars.num_words), dtype=np.int32)
        positions: list[int] = []
        # who was late the last time goes before the others, and what takes little before what takes much
        for user in sorted(users, key=lambda user: (not self._beside.has(user.row), user.state.seconds)):
            if user.row in self._beside.late:
                continue  # whatever stands in its logits is not chosen from
            if self._fill(user, mask_nW[len(positions)]):
                positions.append(user.position)
        if positions:
            index: IntArray = np.array(positions, dtype=np.int64)
            index_n, masks = to_device([index, mask_nW[: len(positions)]], logits_NV.device)
            apply_bitmask(logits_NV, index_n, masks)

    def _fill(self, user: User[Walk], mask_W: Words) -> bool:
        """False: this position is free, or its row is late."""
        table = self._table
        row = user.row
        start = int(table.num_prompt[row])
        tokens = table.token_ids[row, start : user.length]
        num_sure = int(table.num_verified(row)) - start
        try:
            job = self._beside.take(row)
            if isinstance(job, _Mask) and job.is_done and job.is_for(tokens):
                return job.copy_to(mask_W)
            if row in self._beside.late:
                return False
            expected = user.state.seconds or _USUAL_SECONDS
            if not (self._beside.can_afford(expected) and user.state.is_near(num_sure)):
                self._beside.start(_Mask(user, tokens, num_sure, len(mask_W)))
                return False
            return self._fill_now(user, tokens, num_sure, mask_W)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is no Exception
            self._reasons[row] = f"structured_outputs: the grammar cannot be followed: {error}."
            mask_W.fill(0)
            return True

    def _fill_now(self, user: User[Walk], tokens: Tokens, num_sure: int, mask_W: Words) -> bool:
        began = time.perf_counter()
        try:
            return user.state.fill(tokens, num_sure, mask_W)
        except HardMaskError:
            self._beside.start(_Mask(user, tokens, num_sure, len(mask_W), is_hard=True))
            return False
        finally:
            user.state.seconds = time.perf_counter() - began
            self._beside.spend(user.state.seconds)


class _Mask(Job):
    """What may follow these tokens of a row, found beside the steps."""

    def __init__(
        self, user: User[Walk], tokens: Tokens, num_sure: int, num_words: int, *, is_hard: bool = False
    ) -> None:
        walk = self._walk = user.state
        self._tokens = tokens.copy()
        self._num_sure = num_sure
        self._mask_W: Words = np.zeros(num_words, dtype=np.int32)
        # a hard one never fits into a step
        super().__init__(user.row, walk.effort, float("inf") if is_hard else walk.seconds, self._fill)

    def is_for(self, tokens: Tokens) -> bool:
        return np.array_equal(self._tokens, tokens)

    def copy_to(self, mask_W: Words) -> bool:
        """As Walk.fill; raises what has gone wrong."""
        if self.error is not None:
            raise self.error
        mask_W[:] = self._mask_W
        return bool(self.result)

    def _fill(self) -> bool:
        began = time.perf_counter()
        try:
            return self._walk.fill_beside(self._tokens, self._num_sure, self._mask_W)
        finally:
            self._walk.seconds = time.perf_counter() - began
