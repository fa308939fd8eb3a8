"""What stands in front of the server of one engine: keys and quotas, files, batches, sessions, responses that are kept,
and the processes of a fleet. `quire serve` is all of it. Imported lazily: FastAPI is loaded when a server is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.interfaces.gateway.app import create_app
    from quire.interfaces.gateway.run import run_server

__all__ = ["create_app", "run_server"]


def __getattr__(name: str) -> Any:
    if name == "create_app":
        from quire.interfaces.gateway.app import create_app

        return create_app
    if name == "run_server":
        from quire.interfaces.gateway.run import run_server

        return run_server
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
