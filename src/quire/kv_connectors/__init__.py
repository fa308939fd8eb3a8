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
    WorkerHalf,
)

_BUILT_IN = {"memory": "quire.kv_connectors.memory", "tiered": "quire.kv_connectors.tiered"}
_Half = TypeVar("_Half")


def make_scheduler_half(config: KVConnectorConfig | None, layout: CacheLayout) -> SchedulerHalf | NamedBlocks:
    if config is None:
        return NoSchedulerHalf()
    if layout.has_states:
        raise OptionError(
            f"kv_connector={config.name}: {layout.model} has recurrent layers, whose state no connector can move yet; "
            "only keys and values of tokens. Leave kv_connector out."
        )
    return _made(config, lambda connector: connector.scheduler_half(layout, **config.args))


def make_worker_half(config: KVConnectorConfig | None) -> WorkerHalf:
    if config is None:
        return NoWorkerHalf()
    return _made(config, lambda connector: connector.worker_half(**config.args))


def _made(config: KVConnectorConfig, make: Callable[[Connector], _Half]) -> _Half:
    """A half; somebody else's code may raise anything, and the user chose it by this option."""
    try:
        return make(_connector(config.name))
    except UserError:
        raise
    except Exception as error:
        raise OptionError(
            f"kv_connector={config.name} with kv_connector_args={dict(config.args)}: {error}. "
            "Mend the arguments or the package that brings it, or leave both options out."
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
