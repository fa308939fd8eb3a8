"""For a proxy that hands on paths with a prefix: it is taken off. Paths without it are served as well."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


def prefix_of(root_path: str) -> str:
    return "/" + root_path.strip("/")


class RootPath:
    """Stands outside everything else: nothing behind it knows the prefix."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix_of(prefix)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == self._prefix or path.startswith(f"{self._prefix}/"):
            scope = {**scope, "path": path[len(self._prefix) :] or "/"}
            scope["raw_path"] = scope["path"].encode()
        await self._app(scope, receive, send)
