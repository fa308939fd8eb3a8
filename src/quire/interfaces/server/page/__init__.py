"""The page at /: chat, load, memory and decisions of this server, in plain HTML, CSS and JavaScript.

The files lie beside this one and are served as they are; there is no build step, and nothing is fetched from elsewhere.
They hold no data: what the page shows it asks for like any other client, with the key that its user types in.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request, Response

from quire.interfaces.server.wire.errors import ApiError

router = APIRouter()
_FOLDER = Path(__file__).parent
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Scripts and styles are files of this server and nothing else; no page may frame this one.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    # asked for again each time, and answered 304: a new version of Quire shows at once
    "cache-control": "no-cache",
}


@dataclass(frozen=True)
class Asset:
    content: bytes
    media_type: str
    etag: str


def _read() -> dict[str, Asset]:
    """By path. Read once: a file that is not here when the server starts does not exist."""
    found = {}
    for file in sorted(_FOLDER.iterdir()):
        if file.suffix in _MEDIA_TYPES:
            content = file.read_bytes()
            asset = Asset(content, _MEDIA_TYPES[file.suffix], f'"{hashlib.sha256(content).hexdigest()[:20]}"')
            found["/" if file.name == "index.html" else f"/page/{file.name}"] = asset
    return found


ASSETS = _read()
# Served without a key and while the model loads.
PATHS = frozenset(ASSETS)


@router.get("/", include_in_schema=False)
@router.head("/", include_in_schema=False)
@router.get("/page/{name}", include_in_schema=False)
@router.head("/page/{name}", include_in_schema=False)
async def asset(request: Request) -> Response:
    """A file of the page."""
    found = ASSETS.get(request.scope["path"])
    if found is None:
        raise ApiError(404, f"Invalid URL ({request.method} {request.scope['path'][:200]})")
    headers = {**_HEADERS, "etag": found.etag}
    if found.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(found.content, headers=headers, media_type=found.media_type)
