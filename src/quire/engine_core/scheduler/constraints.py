"""Constraints: limits on what a step may grant a row, each an object, so that a new limit is a new object.

The token budget is not among them: it is what the policy shares out. Neither is memory: whether blocks can be had
depends on who gives way, which is the scheduler's business.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.engine_core.request import Request
from quire.engine_core.rows import Rows
from quire.messages import IntArray


class Constraint:
    """Three questions, and the answers of a constraint that has nothing to say: a kind overrides what it limits."""

    def reason_to_refuse(self, request: Request) -> str | None:
        """Why this request can never run, even alone; it would wait for ever in front of the others."""
        return None

    def limits(self, rows: Rows) -> bool:
        """Whether `most` has anything to say while these are the rows."""
        return type(self).most is not Constraint.most

    def most(self, rows: Rows, row: IntArray, num_tokens: IntArray) -> IntArray:
        """At most so many of num_tokens in one step, in the long run more than none.

        `row` and `num_tokens` have all that compute in the step so far, so a limit on their sum can be kept; rows that
        run come in the order of their arrival.
        """
        return num_tokens


@dataclass(frozen=True)
class ModelLength(Constraint):
    """A sequence has no more tokens than the model has positions for."""

    max_model_len: int

    def reason_to_refuse(self, request: Request) -> str | None:
        # what becomes a vector needs no room for an output
        if request.num_prompt_tokens + (not request.message.pooling) <= self.max_model_len:
            return None
        return (
            f"This model's maximum context length is {self.max_model_len} tokens. However, the prompt has "
            f"{request.num_prompt_tokens} tokens, which leaves no room for output. Please shorten the prompt."
        )


@dataclass(frozen=True)
class RowLimit(Constraint):
    """All sequences of a request run at once, each in a row of its own."""

    num_rows: int

    def reason_to_refuse(self, request: Request) -> str | None:
        n = request.num_sequences
        if n <= self.num_rows:
            return None
        return f"n={n}: at most max_num_seqs={self.num_rows} sequences run at once. Lower n or raise it."


@dataclass(frozen=True)
class LongPrefill(Constraint):
    """4.5.1: no row gets more than the threshold, however much of the budget is left. Ad hoc, and off by default."""

    threshold: int

    def reason_to_refuse(self, request: Request) -> str | None:
        longest = request.longest_range
        if longest <= self.threshold:
            return None
        return (
            f"{longest} tokens of the prompt see each other and are computed in one step, and a row gets at most "
            f"long_prefill_token_threshold={self.threshold} of a step. Raise it, or leave them out."
        )

    def most(self, rows: Rows, row: IntArray, num_tokens: IntArray) -> IntArray:
        return np.minimum(num_tokens, self.threshold)


@dataclass(frozen=True)
class OneStepAtATime(Constraint):
    """No row is in two steps that are under way, and so many such steps share the rows: each takes its part of those
    that are in none. So rows fall into cohorts, each of which has one step under way."""

    num_steps: int

    def most(self, rows: Rows, row: IntArray, num_tokens: IntArray) -> IntArray:
        num_tokens = np.where(rows.are_in_flight(row), 0, num_tokens)
        num_rows = int((rows.sequence_id >= 0).sum())
        share = -(-num_rows // self.num_steps)
        is_behind_share = np.cumsum(num_tokens > 0) > share
        return np.where(is_behind_share, 0, num_tokens)


@dataclass(frozen=True)
class CheckpointBoundaries(Constraint):
    """Of models with states: a grant ends where a checkpoint is wanted (kv_cache_manager/checkpoints.py)."""

    block_size: int
    interval: int

    def most(self, rows: Rows, row: IntArray, num_tokens: IntArray) -> IntArray:
        start = rows.num_computed[row]
        known = rows.num_known[row]
        last = (known - 1) // self.block_size * self.block_size
        following = (start // self.interval + 1) * self.interval
        # behind what is known nothing has a name
        stop = np.where(following < known, following, start + num_tokens)
        for place in (last, rows.branches_at[row]):
            stop = np.where(place > start, np.minimum(stop, place), stop)
        # none is left within what must be whole
        limit = rows.taken_back(row, stop) - start
        return np.where(limit > 0, np.minimum(num_tokens, limit), num_tokens)


@dataclass(frozen=True)
class ChunkAlignment(Constraint):
    """A chunk that does not reach the end of what there is ends at a multiple of `unit` tokens."""

    unit: int

    def most(self, rows: Rows, row: IntArray, num_tokens: IntArray) -> IntArray:
        start = rows.num_computed[row]
        end = start + num_tokens
        aligned = rows.taken_back(row, end // self.unit * self.unit) - start
        # A budget that is smaller than a unit must not stand still.
        return np.where((end < rows.num_total[row]) & (aligned > 0), aligned, num_tokens)


@dataclass(frozen=True)
class Uncut(Constraint):
    """A grant ends in no range that is to be whole. The last of all limits, for those before it may end anywhere."""

    max_num_batched_tokens: int

    def reason_to_refuse(self, request: Request) -> str | None:
        longest = request.longest_range
        if longest <= self.max_num_batched_tokens:
            return None
        return (
            f"{longest} tokens of the prompt see each other and are computed in one step, which has at most "
            f"max_num_batched_tokens={self.max_num_batched_tokens}. Raise it, or leave some of them out."
        )

    def limits(self, rows: Rows) -> bool:
        return bool(rows.whole_ranges)

    def most(self, rows: Rows, row: IntArray, num_tokens: IntArray) -> IntArray:
        start = rows.num_computed[row]
        # a fork may begin at the last token of a range
        limited: IntArray = np.maximum(rows.taken_back(row, start + num_tokens) - start, 0)
        return limited


class Permits(Constraint):
    """A row that may have no more tokens computes what it has, all but its last one, and waits."""

    def limits(self, rows: Rows) -> bool:
        return bool(rows.with_permits)

    def most(self, rows: Rows, row: IntArray, num_tokens: IntArray) -> IntArray:
        waits = rows.num_total[row] >= rows.permitted[row]
        before_last = np.maximum(rows.num_total[row] - 1 - rows.num_computed[row], 0)
        return np.where(waits, np.minimum(num_tokens, before_last), num_tokens)


@dataclass(frozen=True)
class AdapterSlots(Constraint):
    """A step has no more adapters than the worker has slots. Those of the earliest rows have their turn; the rows of
    others wait until one of these is done with, and nothing that came later goes before them with another adapter."""

    num_slots: int

    def most(self, rows: Rows, row: IntArray, num_tokens: IntArray) -> IntArray:
        adapters = np.where(num_tokens > 0, rows.adapter[row], 0)
        used, first = np.unique(adapters, return_index=True)
        is_adapter = used > 0
        if is_adapter.sum() <= self.num_slots:
            return num_tokens
        in_order = used[is_adapter][np.argsort(first[is_adapter], kind="stable")]
        has_turn = (adapters == 0) | np.isin(adapters, in_order[: self.num_slots])
        return np.where(has_turn, num_tokens, 0)


@dataclass(frozen=True)
class EncoderBudget(Constraint):
    """A step encodes images of at most so many tokens, one image always: the others of a prompt that has many wait for
    the next steps. An image is encoded whole when a token of it is computed, so all that a step touches count, each
    content once. What the worker has kept of an image is not known here."""

    num_tokens: int

    def most(self, rows: Rows, row: IntArray, num_tokens: IntArray) -> IntArray:
        touching = np.flatnonzero((num_tokens > 0) & (rows.num_computed[row] < rows.media_until[row]))
        if not len(touching):
            return num_tokens
        num_tokens = num_tokens.copy()
        left = self.num_tokens
        counted: set[bytes] = set()
        for number in touching.tolist():
            start = int(rows.num_computed[row[number]])
            end = start + int(num_tokens[number])
            for image in rows.media[int(row[number])]:
                if image.end <= start or image.start >= end or image.content_hash in counted:
                    continue
                if counted and image.length > left:
                    num_tokens[number] = max(0, image.start - start)
                    break
                counted.add(image.content_hash)
                left -= image.length
        return num_tokens
