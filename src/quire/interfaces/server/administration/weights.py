"""/v1/admin/update_weights: other weights for the model while requests run, from a file below `weights_root`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from msgspec import Meta

from quire.interfaces.server.access.caller import admins_only
from quire.interfaces.server.openai.responses import only
from quire.interfaces.server.request_body import read_request
from quire.interfaces.server.serving import Serving
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.errors import invalid
from quire.interfaces.server.wire.field_rules import FieldRules
from quire.interfaces.server.wire.json_answer import json_answer

router = APIRouter(dependencies=[Depends(admins_only)])
_MOST_CHARACTERS = 1024


class UpdateWeightsRequest(msgspec.Struct, kw_only=True):
    """POST /v1/admin/update_weights."""

    path: Annotated[str, Meta(description="safetensors file below weights_root, with the names of the checkpoint")]


class WeightsUpdated(msgspec.Struct, kw_only=True):
    """The model has other weights."""

    object: Annotated[str, only("weights.updated")] = "weights.updated"
    version: Annotated[str, Meta(description="names blocks of the cache from now on")]
    num_weights: Annotated[int, Meta(description="that have changed")]
    num_requests: Annotated[int, Meta(description="that ran, and compute their tokens once more")]


_RULES = FieldRules(UpdateWeightsRequest, {})


@router.post("/v1/admin/update_weights", openapi_extra=described(request=UpdateWeightsRequest, answer=WeightsUpdated))
async def update_weights(request: Request) -> Response:
    """Other weights, in place, between two steps. If anything is wrong with the file, nothing has changed."""
    body = await read_request(request, UpdateWeightsRequest, _RULES, strict=True)
    serving: Serving = request.app.state.serving
    file = await asyncio.to_thread(file_below, request.app.state.weights_root, body.path)
    updated = await serving.engine.update_weights(file)
    return json_answer(
        WeightsUpdated(version=updated.version, num_weights=updated.num_weights, num_requests=updated.num_requests)
    )


def file_below(root: str | None, name: str) -> Path:
    """The file itself, all links followed; 400 for whatever lies elsewhere, whether it is there or not."""
    if root is None:
        raise invalid("path: this server takes no weights over HTTP. Start it with --weights-root.", "path")
    path = Path(name)
    is_plain = 0 < len(name) <= _MOST_CHARACTERS and name.isprintable() and ".." not in path.parts
    if is_plain and not path.is_absolute() and path.suffix == ".safetensors":
        try:
            above = Path(root).resolve(strict=True)
            file = (above / path).resolve(strict=True)
            if file.is_file() and file.is_relative_to(above):
                return file
        except (OSError, RuntimeError):
            pass  # the same answer, so that nobody learns what else is there
    raise invalid(f"path={name[:100]!r}: must be the name of a .safetensors file below weights_root.", "path")
