"""What a process of the server answers the others, and how answers are put together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from quire.errors import EngineDeadError
from quire.interfaces.gateway.access.waiting_room import TenantReport
from quire.interfaces.server.state import Readiness, ServerState
from quire.interfaces.server.wire.errors import ApiError

_ROOT = "quire"
# of a tenant's report: what only grows
TENANT_COUNTS = ("num_accepted", "num_rejected", "num_prompt_tokens", "num_cached_tokens", "num_generated_tokens")


def answers_of(state: ServerState) -> dict[str, Callable[..., Any]]:
    """By the names that `Siblings.ask` takes."""
    return {
        **_counts(state),
        "abort": lambda request_id: state.in_flight.interrupt(request_id, ended_by_administrator(), "administrator"),
        "log_level": lambda level: logging.getLogger(_ROOT).setLevel(level),
    }


def _counts(state: ServerState) -> dict[str, Callable[[], Any]]:
    return {
        "metrics": lambda: {"instruments": state.metrics.snapshot(), "statistics": own_statistics(state)},
        "tenants": lambda: [asdict(report) for report in state.room.report()],
    }


def counts_of(state: ServerState) -> dict[str, Any]:
    """The answers that are kept when this process is gone (kept_counts.py)."""
    return {name: answer() for name, answer in _counts(state).items()}


def own_statistics(state: ServerState) -> dict[str, float]:
    """What this process counts beside its instruments; the engine, which all share, is not asked."""
    own = {**state.tracing.statistics(), **state.storage_statistics()}
    # one that drains still has requests in the engine, and hands over what it has counted
    if not state.has_started or state.readiness not in (Readiness.READY, Readiness.STOPPING):
        return own
    try:
        return {**own, **state.engine.client_statistics()}
    except EngineDeadError:
        return own


def ended_by_administrator() -> ApiError:
    return ApiError(
        503,
        "The request was ended by the administrator of this server.",
        type="server_error",
        code="request_aborted",
        headers={"x-should-retry": "false"},
    )


def added(one: Mapping[str, float], others: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Numbers by name, summed."""
    total = dict(one)
    for other in others:
        for name, value in other.items():
            total[name] = total.get(name, 0.0) + value
    return total


def reports_of_all(own: list[TenantReport], others: Iterable[list[dict[str, Any]]]) -> list[TenantReport]:
    """What each tenant uses in all processes. The queue is one, and each process sees the whole of it."""
    by_name = {report.name: report for report in own}
    for report in (one for reports in others for one in reports):
        before = by_name.get(report["name"])
        if before is not None:
            sums = {name: getattr(before, name) + report[name] for name in ("num_requests", *TENANT_COUNTS)}
            by_name[before.name] = replace(before, **sums)
    return list(by_name.values())
