"""Scheduling policies by name. One file each; others come through the entry point group `quire.policies`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from quire.engine_core.scheduler.policies.fifo import Fifo
from quire.engine_core.scheduler.policies.policy import SchedulingPolicy
from quire.errors import OptionError, suggestion

_BUILT_IN: dict[str, Callable[[], SchedulingPolicy]] = {"fifo": Fifo}


def _load(entry: EntryPoint) -> SchedulingPolicy:
    try:
        policy: SchedulingPolicy = entry.load()()
    except Exception as error:
        # Somebody else's code: whatever it raises, the user chose it by this option.
        raise OptionError(
            f"scheduling_policy={entry.name}: its entry point {entry.value!r} cannot be loaded ({error}). "
            "Mend or uninstall the package that brings it, or choose another policy."
        ) from error
    return policy


def make_policy(name: str) -> SchedulingPolicy:
    """The policy of that name, built in or installed beside Quire."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    installed = {entry.name: entry for entry in entry_points(group="quire.policies")}
    if name in installed:
        return _load(installed[name])
    known = sorted({*_BUILT_IN, *installed})
    raise OptionError(f"scheduling_policy={name}: must be one of {', '.join(known)}.{suggestion(name, known)}")
