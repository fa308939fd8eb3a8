"""Scheduling policies by name. One file each; others come through the entry point group `quire.policies`."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from quire.engine_core.scheduler.policies.bounded_srtf import BoundedShortest
from quire.engine_core.scheduler.policies.fifo import Fifo
from quire.engine_core.scheduler.policies.policy import SchedulingPolicy
from quire.engine_core.scheduler.policies.priority import Priority
from quire.engine_core.scheduler.policies.srtf import ShortestRemaining
from quire.engine_core.scheduler.policies.two_level import TwoLevel
from quire.errors import OptionError, one_line, suggestion

_WITHOUT_OPTIONS: dict[str, type[SchedulingPolicy]] = {"fifo": Fifo, "priority": Priority, "srtf": ShortestRemaining}
_PARTS = ("key", "waiting", "victim", "is_preemptive", "progress_share")
_WITH_OPTIONS: dict[str, type[TwoLevel | BoundedShortest]] = {"two_level": TwoLevel, "bounded_srtf": BoundedShortest}
_BUILT_IN = [*_WITHOUT_OPTIONS, *_WITH_OPTIONS]


def _load(entry: EntryPoint) -> SchedulingPolicy:
    try:
        policy: SchedulingPolicy = entry.load()()
    except Exception as error:
        # Somebody else's code: whatever it raises, the user chose it by this option.
        raise OptionError(
            f"scheduling_policy={entry.name}: its entry point {entry.value!r} cannot be loaded ({one_line(error)}). "
            "Mend or uninstall the package that brings it, or choose another policy."
        ) from error
    missing = [name for name in _PARTS if not hasattr(policy, name)]
    if missing:
        raise OptionError(
            f"scheduling_policy={entry.name}: {entry.value!r} lacks {', '.join(missing)}. A policy has "
            f"{', '.join(_PARTS)} (docs/scheduler.md); inherit from Fifo, or mend the package."
        )
    return policy


def make_policy(name: str, *, staging_size: int = 8, progress_share: float = 0.1) -> SchedulingPolicy:
    """The policy of that name, built in or installed beside Quire. Options are for two_level and bounded_srtf."""
    if name in _WITH_OPTIONS:
        return _WITH_OPTIONS[name](staging_size, progress_share)
    if name in _WITHOUT_OPTIONS:
        return _WITHOUT_OPTIONS[name]()
    installed = {entry.name: entry for entry in entry_points(group="quire.policies")}
    if name in installed:
        return _load(installed[name])
    known = sorted({*_BUILT_IN, *installed})
    hint = suggestion(name, known) or " One of your own comes by an entry point (docs/scheduler.md)."
    raise OptionError(f"scheduling_policy={name}: must be one of {', '.join(known)}.{hint}")
