"""The HTTP server. Imported lazily: FastAPI and uvicorn are loaded when a server is made, not before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.interfaces.server.app import create_app
    from quire.interfaces.server.run import run_server

__all__ = ["create_app", "run_server"]


def __getattr__(name: str) -> Any:
    if name == "create_app":
        from quire.interfaces.server.app import create_app

        return create_app
    if name == "run_server":
        from quire.interfaces.server.run import run_server

        return run_server
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
