"""KV connectors by name. A folder each; others come through the entry point group `quire.kv_connectors`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TypeVar

from quire.config import KVConnectorConfig
from quire.errors import OptionError, UserError, suggestion
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
_Half = TypeVar("_Half")


def make_scheduler_half(config: KVConnectorConfig | None, layout: CacheLayout) -> SchedulerHalf | NamedBlocks:
    if config is None:
        return NoSchedulerHalf()
    if layout.keeps_parts:
        raise OptionError(
            "kv_store: of this model's sources and their texts each has blocks of its own, and no others, so that "
            "blocks that lie elsewhere would not be found. Leave kv_store, role and kv_connector out."
        )
    half = _made(config, lambda connector: connector.scheduler_half(layout, **config.args))
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
    shared = {} if sharers is None else {"sharers": sharers}
    return _made(config, lambda connector: connector.worker_half(**config.args, **shared))


def _made(config: KVConnectorConfig, make: Callable[[Connector], _Half]) -> _Half:
    """A half; somebody else's code may raise anything, and the user chose it by this option."""
    try:
        return make(_connector(config.name))
    except UserError:
        raise
    except Exception as error:
        raise OptionError(
            f"kv_connector={config.name} with {dict(config.args)}: {error}. "
            "Mend the arguments or the package that brings it, or leave the option out."
        ) from error


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
