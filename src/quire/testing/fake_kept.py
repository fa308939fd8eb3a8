"""A fake core that also keeps sequences: the control operations of kept and pinned tokens, without any memory.

Answers as the real core does, so that prefixes and sessions can be tested through every client. What a request really
computes is counted (`tokens_computed_total`), because that is what keeping is for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from quire.config import EngineConfig
from quire.errors import UserError
from quire.messages import EngineOutputs, EngineRequest, SequenceEnd, sequence_id_of
from quire.testing.fake_core import MAX_MODEL_LEN, FakeCore, FakeSequence

KEEPING_CORE = "quire.testing.fake_kept:build"


def build(config: EngineConfig) -> KeepingCore:
    """For `open_link(config, core=KEEPING_CORE)`."""
    return KeepingCore(vocab_size=config.facts.vocab_size, max_model_len=min(config.max_model_len, MAX_MODEL_LEN))


@dataclass
class FakeKept:
    token_ids: list[int]
    cache_salt: str
    num_computed_tokens: int
    is_pinned: bool = False
    num_hits: int = 0
    num_hit_tokens: int = 0


class KeepingCore(FakeCore):
    """Half of its blocks may be pinned."""

    def __init__(self, *, vocab_size: int, max_model_len: int = MAX_MODEL_LEN) -> None:
        super().__init__(vocab_size=vocab_size, max_model_len=max_model_len)
        self.kept: dict[str, FakeKept] = {}
        self.num_computed_tokens = 0
        # the next so many sequences that are kept lose their blocks at once
        self._num_evictions = 0
        self._operations |= {
            "list_kept": lambda: [self._entry(handle) for handle in self.kept],
            "fork_kept": self._fork,
            "rewind_kept": self._rewind,
            "release_kept": self._release,
            "pin_kept": self._pin,
            "memory": self._memory,
            "evict_next": self._evict_next,
        }

    def add(self, request: EngineRequest) -> None:
        if request.continues is not None:
            kept = self.kept.get(request.continues)
            if kept is None:
                ended = SequenceEnd(sequence_id_of(request.request_id, 0), "error", error="nothing is kept there")
                self._events.ends.append(ended)
                return
            whole = kept.token_ids + request.prompt_token_ids
            # a copy: inside of one process the client holds the original
            request = msgspec.structs.replace(request, prompt_token_ids=whole)
        super().add(request)

    def statistics(self) -> dict[str, float]:
        return {
            **super().statistics(),
            "tokens_computed_total": self.num_computed_tokens,
            "num_kept_sequences": len(self.kept),
            "num_pinned_prefixes": sum(kept.is_pinned for kept in self.kept.values()),
        }

    def _report(self, sequence: FakeSequence, token_id: int, outputs: EngineOutputs) -> None:
        is_first = not sequence.token_ids
        super()._report(sequence, token_id, outputs)
        if is_first:
            num_cached = self._count_hit(sequence.request)
            outputs.starts[-1].num_cached_tokens = num_cached
            self.num_computed_tokens += len(sequence.request.prompt_token_ids) - num_cached
        else:
            self.num_computed_tokens += 1
        keep = sequence.request.keep
        if keep is not None and sequence.sequence_id not in self._sequences:
            token_ids = sequence.request.prompt_token_ids + sequence.token_ids
            is_evicted, self._num_evictions = self._num_evictions > 0, max(0, self._num_evictions - 1)
            num_computed = 0 if is_evicted else len(token_ids) - 1
            self.kept[keep] = FakeKept(token_ids, sequence.request.cache_salt, num_computed)

    def _count_hit(self, request: EngineRequest) -> int:
        """Tokens of the prompt that are there already."""
        best, num_cached = None, 0
        for handle, kept in self.kept.items():
            if not kept.is_pinned and handle != request.continues:
                continue
            size = min(kept.num_computed_tokens, len(request.prompt_token_ids) - 1)
            begins = kept.token_ids[:size] == request.prompt_token_ids[:size]
            if begins and kept.cache_salt == request.cache_salt and size > num_cached:
                best, num_cached = kept, size
        if best is not None:
            best.num_hits += 1
            best.num_hit_tokens += num_cached
        return num_cached

    def _entry(self, handle: str) -> dict[str, Any]:
        kept = self._get(handle)
        return {
            "handle": handle,
            "num_tokens": len(kept.token_ids),
            "num_computed_tokens": kept.num_computed_tokens,
            "num_blocks": self._num_blocks(kept.num_computed_tokens),
            "is_pinned": kept.is_pinned,
            "num_hits": kept.num_hits,
            "num_hit_tokens": kept.num_hit_tokens,
        }

    def _fork(self, handle: str, into: str) -> bool:
        kept = self._get(handle)
        self.kept[into] = FakeKept(kept.token_ids.copy(), kept.cache_salt, kept.num_computed_tokens)
        return True

    def _rewind(self, handle: str, num_tokens: int) -> bool:
        kept = self._get(handle)
        if not 0 < num_tokens <= len(kept.token_ids):
            raise UserError(f"num_tokens={num_tokens}: out of range.")
        del kept.token_ids[num_tokens:]
        kept.num_computed_tokens = min(kept.num_computed_tokens, num_tokens)
        return True

    def _release(self, handle: str) -> bool:
        self._get(handle)
        del self.kept[handle]
        return True

    def _pin(self, handle: str, num_tokens: int) -> dict[str, Any]:
        kept = self._get(handle)
        if kept.num_computed_tokens < num_tokens:
            raise UserError(f"num_tokens={num_tokens}: only {kept.num_computed_tokens} are computed.")
        if self._num_blocks(num_tokens) > self._num_pinned_blocks_left():
            raise UserError(f"{handle}: {self._num_blocks(num_tokens)} blocks cannot be pinned.")
        self._rewind(handle, num_tokens)
        kept.is_pinned = True
        return self._entry(handle)

    def _memory(self) -> dict[str, Any]:
        pinned = sum(kept.num_computed_tokens for kept in self.kept.values() if kept.is_pinned)
        kept = sum(kept.num_computed_tokens for kept in self.kept.values() if not kept.is_pinned)
        total = self.ready.num_blocks * self.ready.block_size
        empty = dict.fromkeys(("token_states", "shared", "reserved", "cached"), 0)
        return {
            "block_size": self.ready.block_size,
            "num_blocks": self.ready.num_blocks,
            "num_host_blocks": 0,
            "slots": {**empty, "kept": kept, "pinned": pinned, "free": total - kept - pinned},
            "host_slots": {"swapped": 0, "free": 0},
            "num_blocks_saved_by_sharing": 0,
        }

    def _evict_next(self, count: int) -> None:
        self._num_evictions = count

    def _get(self, handle: str) -> FakeKept:
        if handle not in self.kept:
            raise UserError(f"handle {handle!r}: nothing is kept under it.")
        return self.kept[handle]

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.ready.block_size)

    def _num_pinned_blocks_left(self) -> int:
        held = sum(self._num_blocks(len(kept.token_ids)) for kept in self.kept.values() if kept.is_pinned)
        return self.ready.num_blocks // 2 - held
