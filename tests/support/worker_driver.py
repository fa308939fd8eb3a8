"""Drives a worker by hand: what scheduler and KV cache manager would say, in a few calls of a test.

Blocks are handed out in random order, so a block table that is accidentally read as a range must fail.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from quire.messages import (
    NUM_DRAFTS,
    AdmittedSequence,
    AppendedTokens,
    ForkedSequence,
    IntArray,
    SchedulerOutput,
    StepOutput,
    int_array,
    sequence_id_of,
)
from quire.sampling_params import SamplingParams
from quire.worker.worker import Worker


class WorkerDriver:
    """Collects differences until `step`, and follows the two numbers of each row."""

    def __init__(
        self,
        worker: Worker,
        *,
        block_size: int = 4,
        num_blocks: int = 0,
        num_host_blocks: int = 0,
        num_groups: int = 0,
        num_state_blocks: int = 0,
        lookahead: int = 0,
        seed: int = 0,
    ) -> None:
        """`num_state_blocks`: of the last group, which keeps a state and not tokens. `lookahead`: so many slots are
        there beyond the tokens of a step, for what a draft model writes."""
        self.worker = worker
        self.computed: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        # how many drafts follow the tokens of a row
        self.drafts: dict[int, int] = defaultdict(int)
        self._lookahead = lookahead
        self._block_size = block_size
        self._num_groups = num_groups
        self._num_state_blocks = num_state_blocks
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)
        self._free_host = list(range(num_host_blocks))
        random.Random(seed + 1).shuffle(self._free_host)
        self._tables: dict[int, list[list[int]]] = {}
        # host blocks by row and group, of rows that are swapped out
        self._host_tables: dict[int, list[list[int]]] = {}
        self._num_steps = 0
        self._changes: dict[str, list[Any]] = defaultdict(list)

    def admit(self, row: int, tokens: Sequence[int], **fields: Any) -> None:
        """`fields` are those of AdmittedSequence; sampling is greedy unless given."""
        self.computed[row], self.tokens[row] = fields.pop("num_computed_tokens", 0), list(tokens)
        self.drafts[row] = 0
        self._tables[row] = [[] for _ in range(self._num_groups)]
        fields.setdefault("sampling", SamplingParams(temperature=0.0))
        fields.setdefault("num_prompt_tokens", len(tokens))
        fields.setdefault("seed", row)
        fields.setdefault("sequence_id", sequence_id_of(row, 0))
        admitted = AdmittedSequence(
            row=row, token_ids=int_array(tokens), num_computed_tokens=self.computed[row], **fields
        )
        self._changes["admitted"].append(admitted)

    def fork(
        self, parent: int, row: int, num_total_tokens: int, *, num_computed_tokens: int | None = None, seed: int = 0
    ) -> None:
        """A child shares all full blocks and gets a copy of the last one. The worker copies the block tables.

        Without num_computed_tokens the child computes its last token again, and samples.
        """
        computed = num_total_tokens - 1 if num_computed_tokens is None else num_computed_tokens
        self.computed[row], self.tokens[row] = computed, self.tokens[parent][:num_total_tokens]
        self.drafts[row] = 0
        num_blocks, filled = -(-computed // self._block_size), computed % self._block_size
        self._tables[row] = [list(table) for table in self._tables[parent]]
        for group, table in enumerate(self._tables[row]):
            if self._keeps_state(group):
                written = list(range(len(table)))
            else:
                del table[num_blocks:]
                written = [num_blocks - 1] if filled else []
            for index in written:
                own = self._free.pop()
                self._changes["block_copies"].append((table[index], own))
                self._changes["block_writes"].append((group, row, index, own))
                table[index] = own
        self._changes["forked"].append(
            ForkedSequence(
                parent_row=parent,
                row=row,
                sequence_id=sequence_id_of(row, 0),
                num_total_tokens=num_total_tokens,
                num_computed_tokens=computed,
                seed=seed,
            )
        )

    def release(self, row: int) -> None:
        self._changes["released"].append(row)
        del self.computed[row], self.tokens[row], self._tables[row]
        self._host_tables.pop(row, None)

    def append(self, row: int, tokens: Sequence[int], *, is_final: bool = True) -> None:
        self.tokens[row] += tokens
        self.drafts[row] = 0
        self._changes["appended"].append(AppendedTokens(row=row, token_ids=list(tokens), is_final=is_final))

    def preempt(self, row: int) -> None:
        """By recomputation: its blocks are free, and others are taken when it is granted tokens again."""
        self.computed[row] = 0
        for table in self._tables[row]:
            self._free = [*table, *self._free]
            table.clear()
        self._changes["progress"].append((row, 0))

    def swap_out(self, row: int) -> None:
        """By swapping: its blocks, which nobody shares, are free for others in the same step."""
        self._host_tables[row] = [[self._free_host.pop() for _ in table] for table in self._tables[row]]
        for table, host_table in zip(self._tables[row], self._host_tables[row], strict=True):
            self._changes["swapped_out"] += zip(table, host_table, strict=True)
            self._free += table
            table.clear()

    def swap_in(self, row: int) -> None:
        """Back into other blocks."""
        for group, host_table in enumerate(self._host_tables.pop(row)):
            for host_block in host_table:
                block = self._free.pop(0)
                self._changes["swapped_in"].append((host_block, block))
                self._give(group, row, block)
            self._free_host = [*host_table, *self._free_host]

    def step(self, grants: dict[int, int] | None = None, *, num_drafts: int = 0) -> StepOutput:
        """One step. Without grants, every row that is not swapped out computes all it can. Rows that sample are asked
        for so many drafts."""
        if grants is None:
            totals = {row: len(tokens) + self.drafts[row] for row, tokens in self.tokens.items()}
            grants = {
                row: total - self.computed[row]
                for row, total in totals.items()
                if row not in self._host_tables and total > self.computed[row]
            }
        for row, count in grants.items():
            self.computed[row] += count
            for group in range(self._num_groups):
                while len(self._tables[row][group]) < self._num_entries(group, self.computed[row] + self._lookahead):
                    self._give(group, row, self._free.pop())
        self._num_steps += 1
        changes: dict[str, Any] = {
            **self._changes,
            "block_writes": self._columns("block_writes", 4),
            **{name: self._columns(name, 2) for name in ("swapped_out", "swapped_in", "block_copies")},
        }
        scheduled = SchedulerOutput(
            step=self._num_steps,
            rows=int_array(list(grants)),
            num_tokens=int_array(list(grants.values())),
            step_data={NUM_DRAFTS: int_array([num_drafts] * len(grants))} if num_drafts else {},
            **changes,
        )
        self._changes.clear()
        output = self.worker.execute(scheduled)
        self.worker.control("check_invariants", {})
        for row, token in zip(output.rows.tolist(), output.token_ids.tolist(), strict=True):
            self.tokens[row].append(token)
        for row, num_computed, num_total, *_ in output.speculated.T.tolist():
            self.computed[row], self.drafts[row] = num_computed, num_total - len(self.tokens[row])
        return output

    def generate(self, count: int, *, num_drafts: int = 0) -> dict[int, list[int]]:
        """So many steps of all rows; the tokens of each row that were sampled in them."""
        before = {row: len(tokens) for row, tokens in self.tokens.items()}
        for _ in range(count):
            self.step(num_drafts=num_drafts)
        return {row: self.tokens[row][length:] for row, length in before.items()}

    def _keeps_state(self, group: int) -> bool:
        return self._num_state_blocks > 0 and group == self._num_groups - 1

    def _num_entries(self, group: int, num_tokens: int) -> int:
        return self._num_state_blocks if self._keeps_state(group) else -(-num_tokens // self._block_size)

    def _columns(self, name: str, width: int) -> IntArray:
        return int_array(self._changes[name]).reshape(-1, width).T

    def _give(self, group: int, row: int, block: int) -> None:
        table = self._tables[row][group]
        self._changes["block_writes"].append((group, row, len(table), block))
        table.append(block)
