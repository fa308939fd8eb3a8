"""What a process of the server answers the others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI

from quire.interfaces.server.access.in_flight import ended_by_administrator
from quire.interfaces.server.observing.metrics import own_statistics

_ROOT = "quire"


def answers_of(app: FastAPI) -> dict[str, Callable[..., Any]]:
    """By the names that `Siblings.ask` takes."""
    state = app.state
    return {
        **_counts(app),
        "abort": lambda request_id: state.in_flight.interrupt(request_id, ended_by_administrator(), "administrator"),
        "log_level": lambda level: logging.getLogger(_ROOT).setLevel(level),
    }


def _counts(app: FastAPI) -> dict[str, Callable[[], Any]]:
    state = app.state
    room = state.services.room
    return {
        "metrics": lambda: {"instruments": state.metrics.snapshot(), "statistics": own_statistics(state)},
        "tenants": lambda: [asdict(report) for report in room.report()],
    }


def counts_of(app: FastAPI) -> dict[str, Any]:
    """The answers that are kept when this process is gone (kept_counts.py)."""
    return {name: answer() for name, answer in _counts(app).items()}
