"""What goes wrong inside the core itself: exceptions where it asks for memory or calls a decoding method.

Each ends the request it was about and nothing else. Part of some workloads; draws from a generator of its own, so that
the others stay what they were.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from quire.engine_core.decoding.method import DecodingMethod
from quire.engine_core.request import Request, Sequence
from quire.messages import EngineOutputs
from quire.testing.simulator.checked_core import CheckedCore

_RATE = 0.004


class MishapError(Exception):
    """Nobody in the core knows it."""


class Mishaps:
    """Around one core, for its whole life."""

    def __init__(self, checked: CheckedCore, pick: random.Random) -> None:
        self._checked = checked
        self._pick = pick
        self._is_in_step = False
        manager = checked.core.manager
        self._wrap(manager, "allocate_slots", _request_of)
        self._wrap(manager, "name_granted", _request_of)

    def step(self) -> EngineOutputs:
        """One of the core. (What a message from outside raises meets its wall in the driver.)"""
        for method in self._checked.core.scheduler.lifecycle._methods.values():
            if "after_token" not in vars(method):
                self._wrap_method(method)
        if self._pick.random() < _RATE:
            self._checked.core.core.control("reset_prefix_cache", {})
        self._is_in_step = True
        try:
            return self._checked.step()
        finally:
            self._is_in_step = False

    def _wrap_method(self, method: DecodingMethod) -> None:
        self._wrap(method, "after_token", _request_of)
        self._wrap(method, "after_candidates", lambda request, *_: request)

    def _wrap(self, owner: Any, name: str, request_of: Callable[..., Request]) -> None:
        """It raises before or after it has done its work."""
        inner = getattr(owner, name)

        def unreliable(*arguments: Any, **keywords: Any) -> Any:
            self._perhaps(request_of(*arguments))
            result = inner(*arguments, **keywords)
            self._perhaps(request_of(*arguments))
            return result

        object.__setattr__(owner, name, unreliable)  # some are frozen

    def _perhaps(self, request: Request) -> None:
        plan = self._checked.plans.get(request.request_id)
        if plan is not None and self._is_in_step and self._pick.random() < _RATE:
            plan.may_fail = True
            self._checked.counts["mishaps"] += 1
            raise MishapError


def _request_of(sequence: Sequence, *_: Any) -> Request:
    return sequence.request
