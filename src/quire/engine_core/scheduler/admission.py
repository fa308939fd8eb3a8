"""Admission: may this request ever run, may it start now, and with what.

Pure questions about pool and rows; the scheduler acts on the answers.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.engine_core.kv_cache_manager.manager import ComputedBlocks, KVCacheManager
from quire.engine_core.request import Request, Sequence
from quire.engine_core.rows import Rows
from quire.messages import AdmittedSequence, SequenceStart

# what a sequence starts with: its prefix at hand, and the tokens granted in this step
Start = tuple[Sequence, ComputedBlocks, int]


class Admission:
    """Reads the manager and the rows; changes nothing."""

    def __init__(
        self, manager: KVCacheManager, rows: Rows, step_tokens: int, max_model_len: int, vocab_size: int
    ) -> None:
        self._manager = manager
        self._rows = rows
        self._step_tokens = step_tokens
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size

    def bad_ids(self, token_ids: Iterable[int]) -> str | None:
        """An id outside the vocabulary would read past the end of a table, and end the engine for everybody."""
        for token in token_ids:
            if not 0 <= token < self._vocab_size:
                return f"token id {token}: must be between 0 and {self._vocab_size - 1}, the last of this model."
        return None

    def reason_to_refuse(self, request: Request) -> str | None:
        """A request that could never run, even alone, must not wait for ever in front of the others."""
        message, n = request.message, request.num_sequences
        if message.media or message.adapter:
            return "media and adapters are not supported by this engine yet."
        if request.is_final and request.num_prompt_tokens == 0:
            return "the prompt is empty: at least one token is needed."
        if request.num_prompt_tokens >= self._max_model_len:
            return (
                f"This model's maximum context length is {self._max_model_len} tokens. However, the prompt has "
                f"{request.num_prompt_tokens} tokens, which leaves no room for output. Please shorten the prompt."
            )
        if n > self._rows.num_rows:
            return f"n={n}: at most max_num_seqs={self._rows.num_rows} sequences run at once. Lower n or raise it."
        total = self.max_total_tokens(request)
        needed, there = n * self._manager.most_blocks_of(total, self._step_tokens), self._manager.pool.num_blocks
        if needed > there:
            size = self._manager.block_size
            return (
                f"KV cache: {n} x {total} tokens need {needed} blocks of {size} tokens, the engine has {there} "
                f"({there * size} tokens). Lower max_tokens or n, or give the KV cache more memory."
            )
        return None

    def starts(self, request: Request, budget: int, num_reserved_rows: int) -> list[Start] | None:
        """How its sequences would start in this step; None while rows or blocks do not suffice for all of them."""
        new_rows = request.num_rows if not request.was_started else 0
        if new_rows > self._rows.num_free - num_reserved_rows:
            return None
        starts: list[Start] = []
        needed = 0
        for sequence in request.sequences.values():
            computed = self._manager.get_computed_blocks(sequence)
            # The whole prompt must fit, not only its first chunk: else it would be preempted half-way.
            needed += self._manager.num_missing_blocks(sequence, computed, self._step_tokens)
            num_tokens = min(sequence.num_total_tokens - computed.num_tokens, budget)
            budget -= num_tokens
            starts.append((sequence, computed, num_tokens))
        # Siblings revive the same blocks, which are taken out of the pool once.
        needed += self._manager.num_revived_blocks([computed for _, computed, _ in starts])
        return starts if needed <= self._manager.pool.num_available else None

    def max_total_tokens(self, request: Request) -> int:
        return request.max_total_tokens(self._max_model_len)

    def message(self, sequence: Sequence, num_computed_tokens: int) -> AdmittedSequence:
        request = sequence.request
        return AdmittedSequence(
            row=sequence.row,
            sequence_id=sequence.sequence_id,
            token_ids=sequence.token_ids(0, sequence.num_total_tokens).astype("int64"),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=num_computed_tokens,
            sampling=request.sampling,
            seed=sequence.seed,
            eos_token_ids=request.message.eos_token_ids,
            bad_words_token_ids=request.message.bad_words_token_ids,
            is_final=request.is_final,
        )

    def start_event(self, sequence: Sequence, num_computed_tokens: int) -> SequenceStart:
        return SequenceStart(sequence.sequence_id, num_computed_tokens)
