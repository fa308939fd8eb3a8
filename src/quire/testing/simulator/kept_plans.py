"""What a core must remember under handles: the tokens, by a few lines of dictionary."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from quire.errors import UserError
from quire.testing.core import CoreUnderTest
from quire.testing.simulator.plans import Plan


@dataclass
class KeptPlan:
    """Tokens under a handle, and the salt that they were kept under."""

    tokens: list[int]
    salt: str
    is_pinned: bool = False
    # as the core reported it last
    num_computed: int = 0
    num_hits: int = 0


class KeptPlans:
    """Passes control operations on to a core and does the same to a dictionary."""

    def __init__(self, core: CoreUnderTest) -> None:
        self.by_handle: dict[str, KeptPlan] = {}
        self.counts: Counter[str] = Counter()
        self._core = core

    def tokens_of(self, handle: str | None) -> list[int] | None:
        plan = self.by_handle.get(handle) if handle is not None else None
        return None if plan is None else plan.tokens

    def may_keep(self, plan: Plan) -> bool:
        """One sampled sequence can be kept, and not where a pinned prefix is."""
        handle = plan.request.keep
        if handle is None:
            return True
        is_pinned = handle in self.by_handle and self.by_handle[handle].is_pinned
        return plan.num_outputs == 1 and plan.request.decoding is None and not is_pinned

    def keep(self, handle: str, tokens: list[int], salt: str) -> None:
        """A request has ended that was to be kept."""
        if handle in self.by_handle and self.by_handle[handle].is_pinned:
            return  # it was pinned while the request ran, and a pin stays
        self.by_handle[handle] = KeptPlan(tokens, salt)
        self.counts["sequences kept"] += 1

    def fork(self, handle: str, into: str) -> bool:
        is_possible = handle in self.by_handle and into not in self.by_handle
        if self._call("fork_kept", is_possible, handle=handle, into=into):
            source = self.by_handle[handle]
            self.by_handle[into] = KeptPlan(source.tokens, source.salt)
        return is_possible

    def rewind(self, handle: str, num_tokens: int) -> bool:
        plan = self.by_handle.get(handle)
        is_possible = plan is not None and num_tokens <= len(plan.tokens) and not plan.is_pinned
        if self._call("rewind_kept", is_possible, handle=handle, num_tokens=num_tokens) and plan:
            plan.tokens, plan.num_computed = plan.tokens[:num_tokens], 0
        return is_possible

    def release(self, handle: str) -> bool:
        is_possible = handle in self.by_handle
        if self._call("release_kept", is_possible, handle=handle):
            del self.by_handle[handle]
        return is_possible

    def pin(self, handle: str, num_tokens: int) -> bool:
        """May be refused for want of memory or of computed tokens; then nothing has changed."""
        try:
            self._core.core.control("pin_kept", {"handle": handle, "num_tokens": num_tokens})
        except UserError:
            return False
        self.counts["prefixes pinned"] += 1
        plan = self.by_handle[handle]
        plan.tokens, plan.is_pinned = plan.tokens[:num_tokens], True
        return True

    def check(self) -> None:
        """The core keeps the same tokens; what is pinned has lost nothing."""
        reports = [one.report() for one in self._core.manager.kept]
        assert {one["handle"] for one in reports} == set(self.by_handle), "handles were lost, or live on"
        for one in reports:
            plan = self.by_handle[one["handle"]]
            assert one["num_tokens"] == len(plan.tokens), f"handle {one['handle']}: another number of tokens"
            assert one["is_pinned"] == plan.is_pinned
            assert 0 <= one["num_computed_tokens"] <= one["num_tokens"]
            assert not plan.is_pinned or one["num_computed_tokens"] == one["num_tokens"], "a pinned prefix was evicted"
            assert one["num_blocks"] or not one["num_computed_tokens"], "computed, but nowhere"
            self.counts["kept sequences evicted"] += plan.num_computed > 0 and one["num_computed_tokens"] == 0
            self.counts["hits of pinned prefixes"] += plan.is_pinned and one["num_hits"] - plan.num_hits
            plan.num_computed, plan.num_hits = one["num_computed_tokens"], one["num_hits"]

    def _call(self, name: str, is_possible: bool, **args: Any) -> bool:
        """Whether the core did it; it must, if it is possible, and must not otherwise."""
        try:
            self._core.core.control(name, args)
        except UserError:
            assert not is_possible, f"{name} {args} was refused"
            return False
        assert is_possible, f"{name} {args} was not refused"
        return True
