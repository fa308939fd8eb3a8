"""Scheduling policies by name. One file each; others come through the entry point group `quire.policies`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from quire.engine_core.scheduler.policies.fifo import Fifo
from quire.engine_core.scheduler.policies.policy import SchedulingPolicy
from quire.errors import OptionError, suggestion

_BUILT_IN: dict[str, Callable[[], SchedulingPolicy]] = {"fifo": Fifo}


def make_policy(name: str) -> SchedulingPolicy:
    """The policy of that name, built in or installed beside Quire."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    installed = {entry.name: entry for entry in entry_points(group="quire.policies")}
    if name in installed:
        policy: SchedulingPolicy = installed[name].load()()
        return policy
    known = sorted({*_BUILT_IN, *installed})
    raise OptionError(f"scheduling_policy={name}: must be one of {', '.join(known)}.{suggestion(name, known)}")
