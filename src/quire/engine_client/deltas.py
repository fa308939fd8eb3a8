"""What a client hands out: the new tokens of one sequence since the last time its reader looked."""

from __future__ import annotations

from array import array

import msgspec

from quire.messages import TokenLogprobs


class TokenDelta(msgspec.Struct, gc=False):
    """`finish_reason` is set in the last one of a sequence: stop, length, abort or error (then `error` says why).

    `prompt_logprobs` come with sequence 0, in parts if the prompt was computed in chunks; the first prompt token has
    none. `num_cached_tokens` comes once, when the sequence computes for the first time. Of beams each delta holds what
    has been settled since, for all outputs alike, until their last ones.
    """

    index: int
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int | None = None
    # why it was no more: comes with it, if there is a reason
    first_miss: str = ""
    # comes with the first token, if the engine says so: of the work since the first step, what was others'
    share_of_others: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    # the error is the client's: what it asked for cannot be done
    is_refused: bool = False
    is_lost: bool = False
    # in the last one: drafts of the sequence that were verified, and those of them that were right
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    # in the last one of a prompt that was pooled: float32 numbers
    vector: bytes | None = None

    # of a delta that nobody has taken yet: the tokens before `token_ids`, of which each takes nine times as much there
    packed: array[int] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + (0 if self.packed is None else len(self.packed))

    def pack(self) -> None:
        if self.packed is None:
            self.packed = array("i")
        self.packed.extend(self.token_ids)
        self.token_ids = []

    def unpack(self) -> None:
        if self.packed is not None:
            self.token_ids = [*self.packed, *self.token_ids]
            self.packed = None

    @property
    def size(self) -> int:
        """Its tokens, and the log-probabilities of all positions, which have about as many each."""
        scores = (self.prompt_logprobs, self.logprobs)
        num_scores = sum(len(positions) * len(positions[-1].token_ids) for positions in scores if positions)
        return len(self.token_ids) + num_scores

    def beginning(self, most: int) -> TokenDelta:
        """Its first positions, of no more than this size but at least one; they are here no more. Those of the prompt
        come first; how it ends stays with what is left. All of it, if no position would be left."""
        num_positions = len(self.prompt_logprobs or ()) + len(self.token_ids)
        if num_positions <= 1 or self.size <= most:
            return self
        first = TokenDelta(
            self.index,
            num_cached_tokens=self.num_cached_tokens,
            first_miss=self.first_miss,
            share_of_others=self.share_of_others,
        )
        self.num_cached_tokens = self.share_of_others = None
        self.first_miss = ""
        if self.prompt_logprobs:
            count = max(1, most // len(self.prompt_logprobs[-1].token_ids))
            first.prompt_logprobs, self.prompt_logprobs = _cut(self.prompt_logprobs, count)
        else:
            num_scores = len(self.logprobs[-1].token_ids) if self.logprobs else 0
            count = max(1, most // (1 + num_scores))
            first.token_ids, self.token_ids = self.token_ids[:count], self.token_ids[count:]
            if self.logprobs:
                first.logprobs, self.logprobs = _cut(self.logprobs, count)
        return first

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def add_logprobs(self, positions: list[TokenLogprobs]) -> None:
        # A list of its own: what arrived may be shared by all beams, and is not this delta's to extend.
        if self.logprobs is None:
            self.logprobs = positions.copy()
        else:
            self.logprobs += positions

    def add_prompt_logprobs(self, positions: list[TokenLogprobs]) -> None:
        if self.prompt_logprobs is None:
            self.prompt_logprobs = positions.copy()
        else:
            self.prompt_logprobs += positions

    def merge(self, later: TokenDelta) -> None:
        """Takes a later delta of the same sequence into this one."""
        self.token_ids.extend(later.token_ids)
        if later.logprobs is not None:
            self.add_logprobs(later.logprobs)
        if later.prompt_logprobs is not None:
            self.add_prompt_logprobs(later.prompt_logprobs)
        if later.vector is not None:
            self.vector = later.vector
        if later.num_cached_tokens is not None:
            self.num_cached_tokens = later.num_cached_tokens
            self.first_miss = later.first_miss
        if later.share_of_others is not None:
            self.share_of_others = later.share_of_others
        if later.finish_reason is not None:
            self.finish_reason = later.finish_reason
            self.stop_reason = later.stop_reason
            self.error = later.error
            self.is_refused = later.is_refused
            self.is_lost = later.is_lost
            self.num_drafted_tokens = later.num_drafted_tokens
            self.num_accepted_tokens = later.num_accepted_tokens


def _cut(positions: list[TokenLogprobs], count: int) -> tuple[list[TokenLogprobs], list[TokenLogprobs] | None]:
    return positions[:count], positions[count:] or None
