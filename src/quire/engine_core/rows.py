"""The scheduler's side of the rows: the numbers of every sequence (4.4.2), as arrays.

    num_computed   granted so far. While steps are in flight it is an upper bound: drafts may be rejected.
    num_known      tokens whose values have arrived here
    num_total      num_known and what is promised: the token that a step in flight samples, and drafts (4.6.1)

Owns the numbering of rows and is the only one that writes the arrays. A sequence gets its row when it is first admitted
and keeps it for life, also while it is preempted, unless something more important needs the row; the worker uses the
same numbers. A steady step reads and writes these arrays and touches no Python object per sequence. Used by the
scheduler, the KV cache manager and Sequence; never sent anywhere.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from quire.engine_core.whole_ranges import WholeRanges
from quire.messages import IntArray, Media, int_array

Tokens = npt.NDArray[np.int32]

_STOP_COLUMNS = 4
# of a row that nobody outside looks at
_NO_LIMIT = 1 << 62


class Rows:
    """Arrays over rows. Token memory is committed by the system only where it is touched."""

    def __init__(self, num_rows: int, max_model_len: int) -> None:
        self.num_rows = num_rows
        self.tokens = np.zeros((num_rows, max_model_len), dtype=np.int32)
        self.num_computed = np.zeros(num_rows, dtype=np.int64)
        self.num_known = np.zeros(num_rows, dtype=np.int64)
        self.num_total = np.zeros(num_rows, dtype=np.int64)
        # by step that was decided and whose results are not there yet, earliest first: its rows
        self._in_flight: deque[IntArray] = deque()
        self.priority = np.zeros(num_rows, dtype=np.int64)
        self.tenant = np.zeros(num_rows, dtype=np.int64)
        # number of the adapter, 0 for none
        self.adapter = np.zeros(num_rows, dtype=np.int64)
        # of those rows that have some
        self.whole_ranges: dict[int, WholeRanges] = {}
        # tokens that steps had for a row which could not use them, because its range is larger; and how many it needs
        self.saved: dict[int, tuple[int, int]] = {}
        # the images of those rows that have some to encode, and where the last of them ends
        self.media: dict[int, list[Media]] = {}
        self.media_until = np.zeros(num_rows, dtype=np.int64)
        # Tokens below this may be written without asking the KV cache manager: blocks are there and not shared.
        self.writable_until = np.zeros(num_rows, dtype=np.int64)
        # Where a recurrent state may have absorbed one token more than were computed: the row has stepped back there.
        self.doubtful_at = np.full(num_rows, -1, dtype=np.int64)
        # Where a state is to be left behind, because others had the same tokens up to there; 0: nowhere.
        self.branches_at = np.zeros(num_rows, dtype=np.int64)
        # leading full blocks that the prefix cache knows by name
        self.num_named = np.zeros(num_rows, dtype=np.int64)
        self.max_total = np.zeros(num_rows, dtype=np.int64)
        self.min_total = np.zeros(num_rows, dtype=np.int64)
        # With so many tokens a row samples no more before somebody outside lets it; and the rows of which that holds.
        self.permitted = np.full(num_rows, _NO_LIMIT, dtype=np.int64)
        self.with_permits: set[int] = set()
        self.sequence_id = np.full(num_rows, -1, dtype=np.int64)
        # True: the decoding method wants to see each token of this row before anything else happens
        self.is_watched = np.zeros(num_rows, dtype=np.bool_)
        # True: the worker goes on from what it samples, so the row may be granted that token before its value is known.
        # False: the core looks first (a beam, the fork of a prompt), or the input is not final.
        self.runs_on = np.zeros(num_rows, dtype=np.bool_)
        # True of one that does so whatever it samples, up to its length, and whose tokens are charged to nobody
        self.is_plain = np.zeros(num_rows, dtype=np.bool_)
        # A logical clock of changes that a step in flight does not know of, and when each row last changed hands, was
        # set back to be computed again, or got a token that the core chose.
        self.num_changes = 0
        self.left_at = np.zeros(num_rows, dtype=np.int64)
        self.set_back_at = np.zeros(num_rows, dtype=np.int64)
        self.appended_at = np.zeros(num_rows, dtype=np.int64)
        self.stop_ids = np.full((num_rows, _STOP_COLUMNS), -1, dtype=np.int64)
        self._free = list(range(num_rows - 1, -1, -1))
        # of rows that somebody has, by priority
        self._num_by_priority: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def least_important(self) -> int:
        """Of those that have a row: its priority, which is the greatest number."""
        return max(self._num_by_priority, default=-(1 << 62))

    def take(self, sequence_id: int, priority: int, tenant: int, tokens: Tokens, *, adapter: int = 0) -> int:
        """A free row, which holds this sequence's tokens and numbers from now on."""
        row = self._free.pop()
        count = len(tokens)
        self.tokens[row, :count] = tokens
        self.num_known[row] = self.num_total[row] = count
        self.sequence_id[row] = sequence_id
        self.priority[row] = priority
        self._num_by_priority[priority] = self._num_by_priority.get(priority, 0) + 1
        self.tenant[row] = tenant
        self.adapter[row] = adapter
        return row

    def keep_whole(self, row: int, ranges: WholeRanges) -> None:
        self.whole_ranges[row] = ranges

    def use_media(self, row: int, media: list[Media]) -> None:
        encoded = [one for one in media if not one.is_vectors]
        if encoded:
            self.media[row] = encoded
            self.media_until[row] = encoded[-1].end

    def num_image_tokens(self, rows: IntArray, num_tokens: IntArray) -> int:
        """Of the images that these grants touch, each content once: an image is encoded whole."""
        if not self.media:
            return 0
        starts = self.num_computed[rows]
        ends = starts + num_tokens
        lengths: dict[bytes, int] = {}
        for number in np.flatnonzero(starts < self.media_until[rows]).tolist():
            for image in self.media[int(rows[number])]:
                if image.start < ends[number] and image.end > starts[number]:
                    lengths[image.content_hash] = image.length
        return sum(lengths.values())

    def give_back(self, row: int) -> None:
        self.sequence_id[row] = -1
        priority = int(self.priority[row])
        self._num_by_priority[priority] -= 1
        if not self._num_by_priority[priority]:
            del self._num_by_priority[priority]
        self.whole_ranges.pop(row, None)
        self.saved.pop(row, None)
        self.media.pop(row, None)
        self.media_until[row] = 0
        self.num_computed[row] = self.num_known[row] = self.num_total[row] = 0
        self.is_watched[row] = self.runs_on[row] = self.is_plain[row] = False
        self.permitted[row] = _NO_LIMIT
        self.with_permits.discard(row)
        self.doubtful_at[row] = -1
        self.branches_at[row] = 0
        self.num_changes += 1
        self.left_at[row] = self.num_changes
        self._free.append(row)

    def set_limits(self, row: int, max_total: int, min_total: int) -> None:
        self.max_total[row] = max_total
        self.min_total[row] = min_total

    def permit(self, row: int, num_tokens: int) -> None:
        """It may have so many tokens, in all."""
        self.permitted[row] = num_tokens
        self.with_permits.add(row)

    def watch(self, row: int, *, is_watched: bool, runs_on: bool) -> None:
        self.is_watched[row] = is_watched
        self.runs_on[row] = runs_on
        self.is_plain[row] = runs_on and self.stop_ids[row, 0] < 0 and not self.tenant[row]

    def extend(self, row: int, tokens: Tokens) -> None:
        """Streamed input: nothing was promised before all of it was there."""
        total = int(self.num_total[row])
        self.tokens[row, total : total + len(tokens)] = tokens
        self.num_known[row] = self.num_total[row] = total + len(tokens)

    # ------------------------------------------------------------------------------------------ blocks

    def may_write(self, rows: IntArray | int, until: IntArray | int) -> None:
        """Below these tokens nobody need be asked."""
        self.writable_until[rows] = until

    def set_named(self, rows: IntArray | int, num_blocks: IntArray | int) -> None:
        self.num_named[rows] = num_blocks

    def hold_nothing(self, row: int) -> None:
        """Its blocks are given back."""
        self.writable_until[row] = 0
        self.num_named[row] = 0

    def next_name_at(self, rows: IntArray, block_size: int) -> IntArray:
        """Tokens with which the next block is full that the prefix cache does not know yet."""
        ends: IntArray = (self.num_named[rows] + 1) * block_size
        return ends

    # ------------------------------------------------------------------------------------------ progress

    def begin_at(self, row: int, num_computed: int, branches_at: int = 0) -> None:
        """Where the grant that is being decided begins, and where it ends to leave a state behind."""
        self.num_computed[row] = num_computed
        self.doubtful_at[row] = num_computed
        self.branches_at[row] = branches_at

    def doubt(self, rows: IntArray, positions: IntArray) -> None:
        """These rows may have stepped back to there."""
        self.doubtful_at[rows] = positions

    def grant(self, rows: IntArray, num_tokens: IntArray) -> None:
        self.num_computed[rows] += num_tokens
        self._in_flight.append(rows)
        if self.saved:
            for row in rows.tolist():
                self.saved.pop(row, None)

    def settle(self) -> None:
        """The results of the earliest step that was granted are there."""
        self._in_flight.popleft()

    def are_in_flight(self, rows: IntArray) -> npt.NDArray[np.bool_]:
        """Which of these are in a step whose results are not there yet."""
        return np.isin(rows, np.concatenate(self._in_flight)) if self._in_flight else np.zeros(len(rows), dtype=bool)

    def set_back(self, row: int, num_computed: int) -> None:
        """The core decides where the row goes on, whatever steps in flight compute of it."""
        self.num_computed[row] = num_computed
        self.doubtful_at[row] = num_computed
        self.num_changes += 1
        self.set_back_at[row] = self.num_changes

    def remaining(self, rows: IntArray) -> IntArray:
        """4.4.2: the most that a step may grant each row."""
        return self.num_total[rows] - self.num_computed[rows]

    def taken_back(self, rows: IntArray, ends: IntArray) -> IntArray:
        """These ends of grants, or the beginnings of the ranges that they would cut."""
        if not self.whole_ranges:
            return ends
        ranges = map(self.whole_ranges.get, rows.tolist())
        return int_array([one.taken_back(end) if one else end for one, end in zip(ranges, ends.tolist(), strict=True)])

    def least(self, row: int) -> int:
        """The fewest tokens that may be granted next."""
        if not self.whole_ranges and not self.saved:
            return 1
        ranges = self.whole_ranges.get(row)
        least = ranges.length_at(int(self.num_computed[row])) if ranges else 1
        # one that holds nothing yet once stood behind a prefix that it had found
        return max(least, self.saved[row][1]) if row in self.saved else least

    def spend(self, row: int) -> int:
        """What it needs next, if it has saved that much, else 0. That is spent even if another limit then leaves the
        row without: the others must not pay for it again and again."""
        saved, needed = self.saved.get(row, (0, 1))
        if saved < needed:
            return 0
        del self.saved[row]
        return needed

    def save(self, row: int, num_tokens: int) -> None:
        """A step has so many tokens for it: it keeps them if they are too few for the range that comes next."""
        needed = self.least(row)
        if 0 < num_tokens < needed:
            self.saved[row] = (self.saved.get(row, (0, 0))[0] + num_tokens, needed)

    def promise(self, rows: IntArray, num_drafts: IntArray | int) -> IntArray:
        """4.6.1: what these rows will sample, and propose after it, counts from now on. By how much each row grew.

        The last token that a sequence may have is never computed, so nothing is promised beyond the one before it.
        """
        totals = self.num_total[rows]
        samples = (self.num_computed[rows] == totals) & self.runs_on[rows]
        most = self.max_total[rows]
        if self.with_permits:
            most = np.minimum(most, self.permitted[rows])
        growth: IntArray = np.maximum(np.minimum(1 + num_drafts, most - 1 - totals), 0) * samples
        self.num_total[rows] = totals + growth
        return growth

    def settle_drafts(
        self, rows: IntArray, computed: IntArray, totals: IntArray, since: int, granted: IntArray, growth: IntArray
    ) -> None:
        """Where the worker says that the rows stand, and on top of that what was granted and promised since. One that
        was set back after change `since` is computed again from where the core says."""
        is_set_back = self.set_back_at[rows] > since
        reached = computed + np.minimum(granted, totals - computed)
        self.num_computed[rows] = np.where(is_set_back, self.num_computed[rows], reached)
        # What was accepted is computed once more where a state has not absorbed it. A grant that was for less does not
        # reach the last token, so that what was promised behind it does not come.
        comes = self.num_computed[rows] >= totals
        # nor what was promised before it was known that a step brings several tokens, if nothing is behind the last one
        most = np.maximum(totals, self.max_total[rows] - 1)
        self.num_total[rows] = np.minimum(totals + growth * comes, most)

    def set_stop_ids(self, row: int, ids: list[int]) -> None:
        if len(ids) > self.stop_ids.shape[1]:
            wider = np.full((self.num_rows, len(ids)), -1, dtype=np.int64)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[row] = -1
        if ids:
            self.stop_ids[row, : len(ids)] = ids

    def learn(self, rows: IntArray, token_ids: IntArray) -> None:
        """One token for each row: a promised one, or a new one. A row occurs once."""
        known = self.num_known[rows]
        self.tokens[rows, known] = token_ids
        known += 1
        self.num_known[rows] = known
        self.num_total[rows] = np.maximum(self.num_total[rows], known)

    def learn_many(self, rows: IntArray, steps: IntArray, token_ids: IntArray | None) -> None:
        """What so many steps of each of these rows do to it: all that it has is computed, and the next token sampled.
        The tokens of one row after the other; None: nobody will look which ones they are."""
        known = self.num_known[rows]
        if token_ids is not None:
            places = np.arange(len(token_ids)) + (known + steps - steps.cumsum()).repeat(steps)
            self.tokens[rows.repeat(steps), places] = token_ids
        known += steps
        self.num_known[rows] = known
        self.num_total[rows] = known
        self.num_computed[rows] = known - 1

    def learn_unseen(self, row: int, num_steps: int) -> None:
        """The same of one row, at whose tokens nobody will look."""
        known = int(self.num_known[row]) + num_steps
        self.num_known[row] = self.num_total[row] = known
        self.num_computed[row] = known - 1

    def append(self, row: int, token_id: int) -> None:
        """The core's choice; what a step in flight answers about the row is about the time before it."""
        known = int(self.num_known[row])
        self.tokens[row, known] = token_id
        self.num_known[row] = known + 1
        if self.num_total[row] <= known:
            self.num_total[row] = known + 1
        self.num_changes += 1
        self.appended_at[row] = self.num_changes

    def check_invariants(self) -> None:
        free = (self.sequence_id < 0).nonzero()[0].tolist()
        assert sorted(self._free) == free, "a row is neither free nor used, or both, or free twice"
        priorities = np.unique(self.priority[self.sequence_id >= 0], return_counts=True)
        assert self._num_by_priority == dict(zip(*map(np.ndarray.tolist, priorities), strict=True)), "by priority"
        assert not np.count_nonzero(self.writable_until[free]), "a row was given back with blocks"
        assert not np.count_nonzero(self.num_named[free]), "a row was given back with names"
        # the numbers of free rows are 0
        numbers = zip(self.num_computed.tolist(), self.num_known.tolist(), self.num_total.tolist(), strict=True)
        for row, (computed, known, total) in enumerate(numbers):
            assert 0 <= computed <= total, f"row {row}: computed {computed} of {total} tokens"
            assert 0 <= known <= total <= self.tokens.shape[1], f"row {row}: {known} of {total} tokens are known"
        for row, ranges in self.whole_ranges.items():
            computed = int(self.num_computed[row])
            assert ranges.may_begin_at(computed), f"row {row}: cut at {computed} where it must be whole"
