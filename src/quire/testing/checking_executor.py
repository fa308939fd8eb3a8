"""An executor whose model checks the memory it reads: every wrong block is found in the step in which it is read.

A cell of the cache holds a hash of the whole prefix up to its token. "Attention" compares every cell that the block
table names with what must be there, and the next token is a function of that hash. So a block that is shared
wrongly, reused too early, not copied, or cached before it is written raises at once; nothing is judged by its text.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np

from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.messages import AdmittedSequence, SchedulerOutput, StepOutput, WorkerCapacity, int_array

_PRIME = 0x100000001B3
_MASK = (1 << 62) - 1
_POISON = -1


def prefix_hashes(token_ids: list[int], start: int = 0, parent: int = 17) -> list[int]:
    """The hash of every prefix; the cell of token i holds hashes[i]."""
    hashes = []
    for token in token_ids[start:]:
        parent = ((parent ^ (token + 1)) * _PRIME + (parent >> 29)) & _MASK
        hashes.append(parent)
    return hashes


def next_token(prefix_hash: int, seed: int, is_greedy: bool, vocab_size: int) -> int:
    """What the fake model says after a prefix; a sampled token also depends on the seed."""
    mixed = prefix_hash if is_greedy else (prefix_hash ^ (seed * _PRIME)) * _PRIME & _MASK
    return (mixed >> 7) % vocab_size


def expected_tokens(
    prompt: list[int], count: int, *, vocab_size: int, seed: int = 0, is_greedy: bool = True
) -> list[int]:
    """What a request must produce, whatever the scheduler does."""
    tokens = list(prompt)
    parent = prefix_hashes(tokens)[-1]
    for _ in range(count):
        tokens.append(next_token(parent, seed, is_greedy, vocab_size))
        parent = prefix_hashes(tokens[-1:], parent=parent)[-1]
    return tokens[len(prompt) :]


class _Row:
    def __init__(self, admitted: AdmittedSequence, num_groups: int) -> None:
        self.tokens = [int(token) for token in admitted.token_ids]
        self.hashes = prefix_hashes(self.tokens)
        self.num_computed = admitted.num_computed_tokens
        self.seed = admitted.seed
        self.is_greedy = admitted.sampling.is_greedy
        self.is_final = admitted.is_final
        self.tables: list[dict[int, int]] = [{} for _ in range(num_groups)]

    def append(self, tokens: list[int]) -> None:
        self.hashes += prefix_hashes(tokens, parent=self.hashes[-1] if self.hashes else 17)
        self.tokens += tokens


class CheckingExecutor:
    """Runs SchedulerOutputs on a cache of hashes."""

    def __init__(self, groups: list[KVGroup], num_blocks: int, block_size: int, vocab_size: int = 50) -> None:
        self.vocab_size = vocab_size
        self.outputs: list[SchedulerOutput] = []
        self.failing_rows: dict[int, str] = {}
        self._groups = groups
        self._block_size = block_size
        self._cells = np.full((num_blocks, block_size), _POISON, dtype=np.int64)
        self._rows: dict[int, _Row] = {}

    def execute(self, output: SchedulerOutput) -> Future[StepOutput]:
        self._apply(output)
        grants = [
            (self._rows[row], row, n) for row, n in zip(output.rows.tolist(), output.num_tokens.tolist(), strict=True)
        ]
        # all layers write before they read: so do all rows of a step
        for row, _, count in grants:
            self._write(row, count)
        for row, _, count in grants:
            self._check(row, row.num_computed + count)
        future: Future[StepOutput] = Future()
        future.set_result(self._sample(output.step, grants))
        return future

    def measure_capacity(self) -> WorkerCapacity:
        return WorkerCapacity(layers=[], available_bytes=0, explanation="a fake")

    def initialize_cache(self, groups: list[list[str]], num_blocks: int) -> None:
        raise AssertionError("the fake is built with its cache")

    def control(self, name: str, args: dict[str, Any]) -> Any:
        return {"name": name, **args}

    def shutdown(self) -> None:
        self._rows.clear()

    def _apply(self, output: SchedulerOutput) -> None:
        for fork in output.forked:
            parent = self._rows[fork.parent_row]
            child = self._rows[fork.row] = _Row.__new__(_Row)
            child.tokens = parent.tokens[: fork.num_total_tokens]
            child.hashes = parent.hashes[: fork.num_total_tokens]
            child.num_computed, child.seed = fork.num_computed_tokens, fork.seed
            child.is_greedy, child.is_final = parent.is_greedy, True
            child.tables = [{} for _ in self._groups]
        for row in output.released:
            del self._rows[row]
        for admitted in output.admitted:
            assert admitted.row not in self._rows, f"row {admitted.row} is still used"
            self._rows[admitted.row] = _Row(admitted, len(self._groups))
        for row, num_computed in output.progress:
            self._rows[row].num_computed = num_computed
        for appended in output.appended:
            self._rows[appended.row].append(appended.token_ids)
            self._rows[appended.row].is_final = appended.is_final
        for group, row, index, block in output.block_writes.T.tolist():
            if row in self._rows:
                self._rows[row].tables[group][index] = block
        sources, targets = output.block_copies
        assert not set(sources.tolist()) & set(targets.tolist()), "a block is copied and overwritten in one step"
        assert len(set(targets.tolist())) == len(targets), "two copies into one block"
        self._cells[targets] = self._cells[sources]

    def _write(self, row: _Row, count: int) -> None:
        for table in row.tables:
            for position in range(row.num_computed, row.num_computed + count):
                index, offset = divmod(position, self._block_size)
                self._cells[table[index], offset] = row.hashes[position]

    def _check(self, row: _Row, end: int) -> None:
        for table, group in zip(row.tables, self._groups, strict=True):
            start = max(0, row.num_computed - group.sliding_window + 1) if group.sliding_window else 0
            positions = np.arange(start, end)
            blocks = np.array(
                [table[index] for index in range(start // self._block_size, (end - 1) // self._block_size + 1)]
            )
            cells = self._cells[
                blocks[positions // self._block_size - start // self._block_size], positions % self._block_size
            ]
            expected = np.array(row.hashes[start:end], dtype=np.int64)
            wrong = positions[cells != expected]
            assert not len(wrong), f"wrong content at positions {wrong.tolist()} of {end}"

    def _sample(self, step: int, grants: list[tuple[_Row, int, int]]) -> StepOutput:
        rows, token_ids, failures = [], [], {}
        for row, number, count in grants:
            row.num_computed += count
            assert row.num_computed <= len(row.tokens), "granted more tokens than there are"
            if number in self.failing_rows:
                failures[number] = self.failing_rows.pop(number)
            elif row.num_computed == len(row.tokens) and row.is_final:
                token = next_token(row.hashes[-1], row.seed, row.is_greedy, self.vocab_size)
                row.append([token])
                rows.append(number)
                token_ids.append(token)
        return StepOutput(step=step, rows=int_array(rows), token_ids=int_array(token_ids), failures=failures)
