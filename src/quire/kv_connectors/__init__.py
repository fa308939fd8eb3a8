"""KV connectors by name. A folder each; others come through the entry point group `quire.kv_connectors`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, TypeVar

from quire.config import KVConnectorConfig
from quire.errors import OptionError, UserError, one_line, suggestion
from quire.kv_connectors.connector import (
    CacheLayout,
    Connector,
    NamedBlocks,
    NoSchedulerHalf,
    NoWorkerHalf,
    SchedulerHalf,
    StageSharers,
    WorkerHalf,
)

_BUILT_IN = {"memory": "quire.kv_connectors.memory", "tiered": "quire.kv_connectors.tiered"}
# what a worker half gets beside the user's arguments
_SHARERS = "sharers"
_Half = TypeVar("_Half")


def make_scheduler_half(config: KVConnectorConfig | None, layout: CacheLayout) -> SchedulerHalf | NamedBlocks:
    if config is None:
        return NoSchedulerHalf()
    if layout.keeps_parts:
        raise OptionError(
            "kv_store: of this model's sources and their texts each has blocks of its own, and no others, so that "
            "blocks that lie elsewhere would not be found. Leave kv_store, role and kv_connector out."
        )
    half = _made(config, lambda connector: connector.scheduler_half, layout)
    if layout.has_states and not isinstance(half, NamedBlocks):
        raise OptionError(
            f"kv_connector={config.name}: this model has recurrent layers, whose state this connector cannot move; "
            "only keys and values of tokens. Leave kv_connector out."
        )
    return half


def make_worker_half(config: KVConnectorConfig | None, sharers: StageSharers | None = None) -> WorkerHalf:
    """`sharers`: where several ranks keep a part of each block, which `tiered` alone can move."""
    if config is None:
        return NoWorkerHalf()
    shared = {} if sharers is None else {_SHARERS: sharers}
    return _made(config, lambda connector: connector.worker_half, **shared)


def _made(
    config: KVConnectorConfig, half_of: Callable[[Connector], Callable[..., _Half]], *layout: Any, **shared: Any
) -> _Half:
    """A half; somebody else's code may raise anything, and the user chose it by this option."""
    try:
        make = half_of(_connector(config.name))
        _check_names(config, make, num_others=len(layout))
        return make(*layout, **config.args, **shared)
    except UserError:
        raise
    except Exception as error:
        # its arguments are not shown: an address may hold a password
        raise OptionError(
            f"kv_connector={config.name}: its code raised {type(error).__name__}: {one_line(error)} "
            "Mend the arguments or the package that brings it, or leave the option out."
        ) from error


def _check_names(config: KVConnectorConfig, make: Callable[..., Any], *, num_others: int) -> None:
    """Of the arguments, as the function declares them behind so many that do not come from a user."""
    try:
        parameters = list(inspect.signature(make).parameters.values())
    except (TypeError, ValueError):
        # nothing in Python: it speaks for itself
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    taken = {parameter.name: parameter for parameter in parameters[num_others:] if parameter.name != _SHARERS}
    for name in config.args:
        if name not in taken:
            raise OptionError(
                f"kv_connector={config.name}: {name}: there is no such argument; it takes {', '.join(taken) or 'none'}."
                + suggestion(name, taken)
            )
    for name, parameter in taken.items():
        if parameter.default is parameter.empty and name not in config.args:
            raise OptionError(
                f'kv_connector={config.name}: {name} is missing. Give it: {{"name": "{config.name}", "{name}": ...}}.'
            )


def _connector(name: str) -> Connector:
    connector: Connector
    if name in _BUILT_IN:
        connector = importlib.import_module(_BUILT_IN[name])
        return connector
    installed = {entry.name: entry for entry in entry_points(group="quire.kv_connectors")}
    if name not in installed:
        known = sorted({*_BUILT_IN, *installed})
        raise OptionError(f"kv_connector={name}: must be one of {', '.join(known)}.{suggestion(name, known)}")
    connector = installed[name].load()
    return connector
