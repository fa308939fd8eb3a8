"""Request and Sequence: what the scheduler moves around.

A request is one or more sequences (3.4.5, a sequence group): admitted, preempted and resumed together. A sequence is a
line of tokens with two numbers and a block table per group of layers. Its numbers live in Rows once it has a row.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from typing import Protocol

import msgspec
import numpy as np

from quire.chain_hashes import user_key
from quire.engine_core.block_table import BlockTable
from quire.engine_core.rows import Rows, Tokens
from quire.engine_core.whole_ranges import WholeRanges
from quire.messages import EngineRequest, Media, TokenMask, sequence_id_of
from quire.pooling_params import MEAN

NO_TOKENS: Tokens = np.empty(0, dtype=np.int32)


class Status(enum.StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    ENDED = "ended"


_NEXT = {
    Status.WAITING: (Status.RUNNING, Status.ENDED),
    Status.RUNNING: (Status.PREEMPTED, Status.ENDED),
    Status.PREEMPTED: (Status.RUNNING, Status.ENDED),
    Status.ENDED: (),
}


class Sequence:
    """A line of tokens: num_computed_tokens, num_total_tokens and a block table per group."""

    def __init__(self, request: Request, index: int, prompt: Tokens, seed: int, num_groups: int) -> None:
        self.request = request
        self.index = index
        self.sequence_id = sequence_id_of(request.request_id, index)
        self.seed = seed
        self.row = -1
        self.block_tables = [BlockTable() for _ in range(num_groups)]
        # the same in swap space, while the request is there (3.4.5): residence, the third piece of state
        self.host_tables: list[list[int]] = []
        # chain hashes of the leading full blocks, as far as anyone has asked
        self.block_hashes: list[bytes] = []
        # what it found when it was looked up last; the prefix cache's own
        self.last_hit: object = None
        # name of the checkpoint of its state that goes when it leaves another one
        self.last_checkpoint = b""
        # tokens that were computed when it gave way, so that what is computed again can be counted
        self.num_lost_tokens = 0
        # the worker has its row
        self.is_admitted = False
        # So many tokens of output it may have before somebody outside looks at them; None: as many as it likes.
        self.num_permitted = request.message.permitted
        # what it may not sample meanwhile
        self.mask: TokenMask | None = None
        # (drafts, accepted ones) in rows that it had to give up
        self.earlier_drafts = (0, 0)
        # The decoding method wants to see its tokens, in whatever row: it may fork. It says when it has seen enough.
        self.is_watched = request.num_sequences > 1 and not request.shape.num_candidates
        # nobody can find its blocks: it has no sibling, and no cache keeps them
        self.is_unnamed = request.is_private and request.num_sequences == 1 and request.message.keep is None
        # Prompt log-probabilities need every position computed, once: by the first sequence.
        self.looks_up = request.use_prefix_cache or index > 0
        self._prompt = prompt
        self._rows: Rows | None = None

    @property
    def is_begun(self) -> bool:
        """It holds blocks. A sibling of one that was preempted begins when its turn of the budget comes."""
        return self.block_tables[0].length > 0

    @property
    def num_computed_tokens(self) -> int:
        return int(self._rows.num_computed[self.row]) if self._rows is not None else 0

    @property
    def num_total_tokens(self) -> int:
        """With what steps in flight will bring."""
        return int(self._rows.num_total[self.row]) if self._rows is not None else len(self._prompt)

    @property
    def num_known_tokens(self) -> int:
        """Those whose values are here."""
        return int(self._rows.num_known[self.row]) if self._rows is not None else len(self._prompt)

    @property
    def num_sure_tokens(self) -> int:
        """Computed whatever becomes of drafts that are in flight: the newest token that is known may not be."""
        if self._rows is None:
            return 0
        return int(min(self._rows.num_computed[self.row], self._rows.num_known[self.row] - 1))

    @property
    def num_named_blocks(self) -> int:
        """Its leading full blocks that the prefix cache knows."""
        return int(self._rows.num_named[self.row]) if self._rows is not None else 0

    def may_have_absorbed_more(self, num_tokens: int) -> bool:
        """Whether its recurrent state may stand further than behind so many tokens: by what steps in flight compute, or
        by one where the row has stepped back."""
        if self._rows is None:
            return False
        return self.num_computed_tokens > num_tokens or bool(self._rows.doubtful_at[self.row] == num_tokens)

    def token_ids(self, start: int, stop: int) -> Tokens:
        source = self._rows.tokens[self.row] if self._rows is not None else self._prompt
        tokens: Tokens = source[start:stop]
        return tokens

    def place(self, rows: Rows) -> None:
        """From now on a row holds its tokens and numbers."""
        request = self.request
        self.row = rows.take(
            self.sequence_id, request.priority, request.tenant, self._prompt, adapter=request.message.adapter
        )
        if request.whole_ranges is not None:
            rows.keep_whole(self.row, request.whole_ranges)
        if request.media:
            rows.use_media(self.row, request.media)
        self._rows = rows
        self._prompt = NO_TOKENS

    def unplace(self) -> None:
        """Its row goes to somebody else. It keeps the tokens that it knows; one that is in flight is sampled again."""
        self._prompt = self.token_ids(0, self.num_known_tokens).copy()
        self.row = -1
        self._rows = None

    def extend_prompt(self, tokens: Tokens) -> None:
        """Streamed input (4.4.4): num_total_tokens grows by what arrived."""
        if self._rows is None:
            self._prompt = np.concatenate([self._prompt, tokens])
            return
        self._rows.extend(self.row, tokens)


def _has_no_permit(sequence: Sequence) -> bool:
    """It may sample nothing, and nothing that was sampled is on its way."""
    limit = sequence.request.num_sent_tokens + (sequence.num_permitted or 0)
    num_total = sequence.num_total_tokens
    return sequence.num_permitted is not None and num_total >= limit and sequence.num_known_tokens == num_total


class Shape(Protocol):
    """What a request needs to know of its decoding method."""

    @property
    def num_sequences(self) -> int:
        """How many it has at most; so many rows are set aside when the request is admitted."""

    @property
    def num_outputs(self) -> int:
        """How many outputs the client waits for."""

    @property
    def num_candidates(self) -> int:
        """0: the worker samples. Otherwise it answers with so many candidates, and the method chooses."""


class Request:
    """What a user asked. `sequences` holds the living ones, by index."""

    def __init__(
        self,
        message: EngineRequest,
        shape: Shape,
        arrival: int,
        prompt: Tokens,
        *,
        is_private: bool,
        content: bytes = b"",
        sees_all: bool = False,
    ) -> None:
        """`sees_all`: the tokens of any prompt see each other."""
        self.request_id = message.request_id
        self.message = message
        self.sampling = message.sampling
        self.shape = shape
        self.priority = message.priority
        self.arrival = arrival
        self.status = Status.WAITING
        self.is_final = message.is_final
        self.num_prompt_tokens = len(prompt) - (message.transfer.num_output_tokens if message.transfer else 0)
        # tokens that see each other and are computed in one step, where there are any
        whole = [(one.start, one.end) for one in message.media if one.is_whole]
        whole = [(0, len(prompt))] if sees_all else whole
        self.whole_ranges = WholeRanges(whole) if whole else None
        self.max_total = 0
        self.is_private = is_private
        # what besides the tokens changes a block's content or its visibility
        self.user_key = user_key(message, content)
        # a tenant's own: mixed in behind so many blocks, which are those of a pinned prefix and everybody's
        self.scope = message.tenant.cache_scope.encode() if message.tenant is not None else b""
        self.num_public_blocks = 0
        # as rows and workers know them
        self.media = _named_apart(message.media, message.cache_salt.encode(), self.scope)
        # index of the tenant in the shares of the scheduler
        self.tenant = 0
        # and its name, for what it leaves in the cache
        self.owner = message.tenant.name if message.tenant is not None else ""
        # Without a prefix cache only its own sequences find its blocks by content.
        self.content_key = self.user_key + (struct.pack("<q", message.request_id) if is_private else b"")
        # both need every position computed, so nothing may come from the cache
        self.use_prefix_cache = message.sampling.prompt_logprobs is None and message.pooling != MEAN
        # it ends because what it asks for cannot be done
        self.is_refused = False
        self.was_started = False
        # When it gave way it waited for more of its prompt than these tokens. It does not come back before some come.
        self.parked_with = -1
        # the client has heard that it computes
        self.is_announced = False
        # its sequences, and forks to come, count among the rows that are taken
        self.holds_rows = False
        # what the client waits for: outputs that have not ended
        self.open_outputs = set(range(shape.num_outputs))
        self.num_sequences = shape.num_sequences
        # rows that forks will still take; they count as taken from admission on, so that no request waits half-way
        self.num_reserved_rows = self.num_sequences - 1
        # 3.4.5: after a preemption it is no victim before one of its sequences has so many tokens
        self.protected_until = 0
        # when it was last found that too few blocks are free: how many it needs, and the step to look again
        self.needed_blocks = 0
        self.look_again_at = 0
        # how many steps had been decided when it gave way the last time
        self.preempted_at = -1
        # It came back not long ago: before that step it lends nobody its place, even while it waits for input again.
        self.stays_until = 0
        # of prompt_logprobs, what the client has
        self.num_reported_positions = 0
        self.sequences: dict[int, Sequence] = {}

    def become(self, status: Status) -> None:
        assert status in _NEXT[self.status], f"request {self.request_id}: {self.status.value}, then {status.value}"
        self.status = status

    @property
    def is_swapped(self) -> bool:
        # without a generator, which would be most of its price
        for sequence in self.sequences.values():  # noqa: SIM110
            if sequence.host_tables:
                return True
        return False

    @property
    def waits_for_input(self) -> bool:
        """Everything that has come of its input is computed, or was before it gave way; and more is to come. A permit
        is input, too: who waits for one has computed all but its last token."""
        if self.is_final and (self.message.permitted is None or not all(map(_has_no_permit, self.sequences.values()))):
            return False
        num_left = int(self.is_final)
        return self.parked_with == self.num_prompt_tokens or all(
            one.num_computed_tokens >= one.num_total_tokens - num_left for one in self.sequences.values()
        )

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence: the measure of its progress."""
        return max((sequence.num_known_tokens for sequence in self.sequences.values()), default=0)

    @property
    def longest_range(self) -> int:
        """Tokens that must be computed in one step."""
        return 0 if self.whole_ranges is None else self.whole_ranges.longest

    def uncut_blocks(self, num_blocks: int, block_size: int) -> int:
        """So many first blocks of its prompt, or as many fewer as it takes to cut no range."""
        return num_blocks if self.whole_ranges is None else self.whole_ranges.blocks_back(num_blocks, block_size)

    @property
    def num_sent_tokens(self) -> int:
        """Its prompt, and what of its output was sampled elsewhere."""
        transfer = self.message.transfer
        return self.num_prompt_tokens + (transfer.num_output_tokens if transfer is not None else 0)

    @property
    def num_sources(self) -> int:
        """Tokens that an encoder reads, of a model whose sequences begin with such."""
        media = self.message.media
        return media[0].length if media else 0

    @property
    def num_rows(self) -> int:
        """Rows that all its sequences need."""
        return len(self.sequences) + self.num_reserved_rows

    @property
    def stop_ids(self) -> list[int]:
        eos = [] if self.sampling.ignore_eos else self.message.eos_token_ids
        return sorted({*eos, *self.sampling.stop_token_ids})

    @property
    def asked_for_ids(self) -> set[int]:
        """Stop tokens that the client hears of by number; of the model's own end it hears only that it stopped."""
        eos = [] if self.sampling.ignore_eos else self.message.eos_token_ids
        return set(self.sampling.stop_token_ids).difference(eos)

    def max_total_tokens(self, max_model_len: int) -> int:
        if self.message.pooling:
            return min(max_model_len, self.num_prompt_tokens)
        if self.sampling.max_tokens is None:
            return max_model_len
        return min(max_model_len, self.num_prompt_tokens + self.sampling.max_tokens)

    def seed_of(self, index: int) -> int:
        """Independent seeds for the sequences of one request; the first keeps the request's own."""
        if index == 0:
            return self.message.seed
        return (self.message.seed + index * 0x9E3779B97F4A7C15) & 0x7FFFFFFFFFFFFFFF


def _named_apart(media: list[Media], salt: bytes, scope: bytes) -> list[Media]:
    """What an encoder made of an image is found by those alone who would find its blocks: that it was quick would tell
    others that somebody has shown it."""
    if not media or not (salt or scope):
        return media
    secret = struct.pack("<q", len(salt)) + salt + struct.pack("<q", len(scope)) + scope
    return [
        msgspec.structs.replace(image, content_hash=hashlib.sha256(secret + image.content_hash).digest())
        for image in media
    ]
