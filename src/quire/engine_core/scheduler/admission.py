"""Admission: may this request ever run, and what worker and client hear when it starts.

Pure questions about a request and the engine's limits; whether it fits now is admission control's question. (The
`Admission` of a server's callers is another one: places in its queue.)
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from quire.engine_core.kv_cache_manager.manager import KVCacheManager
from quire.engine_core.request import NO_TOKENS, Request, Sequence
from quire.engine_core.rows import Tokens
from quire.engine_core.scheduler.constraints import Constraint
from quire.engine_core.scheduler.prerequisites import Prerequisites
from quire.messages import AdmittedSequence, EngineRequest, IntArray, SequenceStart, int_array
from quire.pooling_params import CLS, MEAN, POOLINGS

_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


class Admission:
    """Reads the manager; changes nothing."""

    def __init__(
        self,
        manager: KVCacheManager,
        constraints: tuple[Constraint, ...],
        prerequisites: Prerequisites,
        step_tokens: int,
        max_model_len: int,
        vocab_size: int,
        sees_all: bool = False,
    ) -> None:
        self._manager = manager
        self._cache = manager.cache
        self._pool = manager.pool
        self._kept = manager.kept
        self._estimates = manager.estimates
        self._limits: tuple[Constraint | Prerequisites, ...] = (*constraints, prerequisites)
        self._step_tokens = step_tokens
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        # the tokens of a prompt see each other: it is computed in one step, and becomes a vector
        self.sees_all = sees_all

    def checked(self, token_ids: list[int]) -> tuple[Tokens, str | None]:
        """A prompt as an array, and what is wrong with it."""
        try:
            # what is an array already stays one
            ids = np.asarray(token_ids, dtype=getattr(token_ids, "dtype", np.int32))
        except OverflowError:
            return NO_TOKENS, self.bad_ids(token_ids)
        return ids.astype(np.int32, copy=False), self.bad_ids(ids)

    def bad_ids(self, token_ids: list[int] | IntArray | Tokens) -> str | None:
        """An id outside the vocabulary would read past the end of a table, and end the engine for everybody."""
        if not len(token_ids):
            return None
        try:
            # what is an array already stays one
            ids = np.asarray(token_ids, dtype=getattr(token_ids, "dtype", np.int64))
        except OverflowError:
            ids = int_array([max(-1, min(token, self._vocab_size)) for token in token_ids])
        # one look: without a sign, what is negative is greater than all
        if np.maximum.reduce(ids.view(_UNSIGNED[ids.itemsize])) < self._vocab_size:
            return None
        wrong = np.flatnonzero((ids < 0) | (ids >= self._vocab_size))
        token = token_ids[int(wrong[0])]
        return f"token id {token}: must be between 0 and {self._vocab_size - 1}, the last of this model."

    def reason_of_kind(self, request: Request) -> str | None:
        """A request that could never run, even alone, must not wait for ever in front of the others. Asked before
        its tokens are written anywhere."""
        message = request.message
        if message.media and (reason := _bad_media(message)):
            return reason
        if message.adapter and message.transfer is not None:
            return "transfer: not together with an adapter, of which another engine knows nothing."
        if request.is_final and request.num_prompt_tokens == 0:
            return "the prompt is empty: at least one token is needed."
        for limit in self._limits:
            if (reason := limit.reason_to_refuse(request)) is not None:
                return reason
        return None

    def plain_length(self, message: EngineRequest) -> int:
        """The greatest length of one that is nothing but a prompt and a sequence that ends by its length, and can run;
        0: it is anything else."""
        sampling = message.sampling
        is_special = (
            sampling.n != 1 or sampling.max_tokens is None or sampling.stop_token_ids
            or sampling.prompt_logprobs is not None or (message.eos_token_ids and not sampling.ignore_eos)
            or not message.is_final or message.tenant is not None or message.media or message.adapter
            or message.pooling or message.decoding is not None or message.keep is not None
            or message.continues is not None or message.transfer is not None or message.permitted is not None
            or further_ids(message) or self.sees_all
        )  # fmt: skip
        num_prompt = len(message.prompt_token_ids)
        if is_special or not 0 < num_prompt < self._max_model_len or self.bad_ids(message.prompt_token_ids) is not None:
            return 0
        return min(self._max_model_len, num_prompt + (sampling.max_tokens or 0))

    def reason_of_memory(self, request: Request) -> str | None:
        """Asked when all tokens that are there are its sequence's, and how many are everybody's is settled."""
        manager = self._manager
        n = request.num_sequences
        total = request.max_total
        size = self._manager.block_size
        needed = self._most_blocks(request, request.max_total)
        there = self._pool.num_blocks
        num_pinned = len(self._kept.pinned_blocks)
        if needed <= there - num_pinned or needed <= self._num_usable(request):
            return None
        pinned = f", {num_pinned} of them pinned" if num_pinned else ""
        groups = f" in {len(manager.groups)} groups of layers" if len(manager.groups) > 1 else ""
        width = "" if n == 1 else " or n" if request.message.decoding is None else " or beam_width"
        return (
            f"KV cache: {n} x {total} tokens need up to {needed} blocks of {size} tokens{groups}, the engine has "
            f"{there}{pinned}. Lower max_tokens{width}, or give the KV cache more memory."
        )

    def _num_usable(self, request: Request) -> int:
        """All blocks but the pinned ones that it does not share: those that it shares it need not have twice."""
        num_pinned = len(self._kept.pinned_blocks)
        if num_pinned:
            num_pinned -= self._estimates.pinned_hits(next(iter(request.sequences.values())))
        return self._pool.num_blocks - num_pinned

    def most_blocks(self, request: Request) -> int:
        """Most blocks that it can need at once, by the end."""
        return self._most_blocks(request, request.max_total)

    def _most_blocks(self, request: Request, num_tokens: int) -> int:
        return self._estimates.most_blocks(num_tokens, request, self._step_tokens)

    def bad_handle(self, message: EngineRequest) -> str | None:
        """What is kept, and whether it may be continued so."""
        kept = self._kept
        if message.continues is not None and kept.find(message.continues) is None:
            return f"continues={message.continues!r}: nothing is kept under this handle."
        if message.continues is not None and message.sampling.prompt_logprobs is not None:
            return "prompt_logprobs: not together with continues; what was kept is not computed again."
        if message.keep is None:
            return None
        if message.sampling.n > 1 or message.decoding is not None:
            return f"keep={message.keep!r}: only a single sampled sequence can be kept; leave n at 1 and use no beams."
        held = kept.find(message.keep)
        if held is not None and held.is_pinned:
            return f"keep={message.keep!r}: a pinned prefix is there. Release it first, or choose another handle."
        return None

    def bad_pooling(self, message: EngineRequest) -> str | None:
        """One sequence becomes one vector; a mean needs the hidden states of all its tokens, and a cache has none."""
        if self.sees_all and not (message.pooling and message.is_final):
            return "The tokens of this model see each other: it makes vectors of whole prompts, and no tokens."
        if not message.pooling:
            return None
        if message.pooling not in POOLINGS:
            return f"pooling={message.pooling!r}: must be one of {', '.join(POOLINGS)}."
        if message.sampling.n > 1 or message.decoding is not None or message.keep is not None:
            return f"pooling={message.pooling!r}: not together with n, beams or keep; a prompt becomes one vector."
        if message.pooling == CLS and not self.sees_all:
            return "pooling='cls': the first token of this model has seen no other. Take last or mean."
        if message.pooling == MEAN and (message.continues is not None or message.transfer is not None):
            return "pooling='mean': not behind what was computed elsewhere or before. Send the whole prompt."
        return None

    def bad_permits(self, message: EngineRequest) -> str | None:
        """Beams have no next token of their own that somebody could wait with."""
        if message.permitted is None:
            return None
        if message.permitted < 0:
            return f"permitted={message.permitted}: at least 0 tokens."
        if message.decoding is not None or message.pooling:
            return "permitted: not together with beams or pooling, where no sequence samples tokens of its own."
        return None

    def max_total_tokens(self, request: Request) -> int:
        """The greatest length; where the user left it open, what fits beside pinned prefixes."""
        most = request.max_total_tokens(self._max_model_len)
        if request.sampling.max_tokens is not None or request.message.pooling:
            return most
        if self._most_blocks(request, most) <= self._pool.num_blocks - len(self._kept.pinned_blocks):
            return most
        there = self._num_usable(request)
        size = self._manager.block_size
        least = max(request.num_prompt_tokens + 1, request.num_prompt_tokens + request.sampling.min_tokens)
        # by bisection: it may be shorter than the model's length by thousands of blocks
        num_shorter = range(max(0, most - least) // size)
        return most - size * bisect_left(
            num_shorter, True, key=lambda number: self._most_blocks(request, most - number * size) <= there
        )

    def message(self, sequence: Sequence, num_computed_tokens: int) -> AdmittedSequence:
        request = sequence.request
        return AdmittedSequence(
            row=sequence.row,
            sequence_id=sequence.sequence_id,
            token_ids=sequence.token_ids(0, sequence.num_known_tokens).astype(np.int64),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=num_computed_tokens,
            sampling=request.sampling,
            seed=sequence.seed,
            eos_token_ids=request.message.eos_token_ids,
            bad_words_token_ids=request.message.bad_words_token_ids,
            thought_marks=request.message.thought_marks,
            num_candidates=request.shape.num_candidates,
            is_final=request.is_final,
            # the first sequence reports the prompt for all of them
            num_reported_positions=request.num_prompt_tokens if sequence.index else request.num_reported_positions,
            mask=sequence.mask,
            pooling=request.message.pooling,
            is_classified=request.message.is_classified,
            label_token_ids=request.message.label_token_ids,
            second_start=request.message.second_start,
            in_bursts=request.message.in_bursts,
            media=request.media,
            adapter=request.message.adapter,
        )

    def start_event(self, sequence: Sequence, num_computed_tokens: int) -> SequenceStart:
        first_miss = self._cache.first_miss(sequence, num_computed_tokens)
        return SequenceStart(sequence.sequence_id, num_computed_tokens, first_miss)


def further_ids(message: EngineRequest) -> list[int]:
    """Every token id that a request names beside its prompt; each of them indexes a table somewhere."""
    sampling = message.sampling
    if not (
        sampling.stop_token_ids or sampling.allowed_token_ids or sampling.logit_bias or message.bad_words_token_ids
        or message.label_token_ids
    ):  # fmt: skip
        return []
    of_words = (token for word in message.bad_words_token_ids for token in word)
    return [
        *sampling.stop_token_ids, *(sampling.allowed_token_ids or ()), *(sampling.logit_bias or ()), *of_words,
        *message.label_token_ids,
    ]  # fmt: skip


def _bad_media(message: EngineRequest) -> str | None:
    """Images stand in a prompt that comes whole: what is kept or sent elsewhere is named by its tokens alone."""
    if message.keep is not None or message.continues is not None or message.transfer is not None:
        return "media: not together with sessions, keep, continues or transfers of KV, which know tokens only."
    if message.adapter and not all(one.is_vectors for one in message.media):
        return "media: not together with an adapter, which knows nothing of an encoder. Leave one of them out."
    if not message.is_final:
        return "media: not in a prompt that arrives in pieces. Send it whole."
    end = 0
    # where the video of the last medium begins
    opened = 0
    for image in message.media:
        height, width = image.cells
        num_places = height * (width + image.line_ends)
        if image.start < end or min(image.length, width) < 1 or image.grid[0] != 1 or num_places != image.length:
            return "media: places must follow each other, and grids must have as many cells as there are places."
        opened = image.start if image.time is None else opened
        # A model has as many positions as tokens: those in time must not run ahead.
        if image.time is not None and not (image.start == end > 0 and 0 <= image.time < image.end - opened):
            return "media: later frames of a video must follow its first ones, no further in time than in tokens."
        end = image.end
    return None if end <= len(message.prompt_token_ids) else "media: a place lies outside of the prompt."
