"""/v1/load_lora_adapter and /v1/unload_lora_adapter: adapters come and go while requests run, with vLLM's names.

A body names a folder below `adapter_root`, never one beside it: what it leads to is looked at after all links have been
followed. Without that option nothing is loaded over HTTP.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from msgspec import Meta

from quire.errors import one_line
from quire.interfaces.adapters import NOT_FOUND
from quire.interfaces.server.access.caller import admins_only
from quire.interfaces.server.openai.responses import only
from quire.interfaces.server.request_body import read_request
from quire.interfaces.server.serving import Serving
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.errors import ApiError, invalid, unavailable
from quire.interfaces.server.wire.field_rules import FieldRules
from quire.interfaces.server.wire.json_answer import json_answer

router = APIRouter(dependencies=[Depends(admins_only)])
_MOST_CHARACTERS = 1024
_MOST_CONFIG_BYTES = 1 << 20
# what a folder is read for
_FILES = ("adapter_config.json", "adapter_model.safetensors")


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """POST /v1/load_lora_adapter."""

    lora_name: Annotated[str, Meta(description="by which requests name it as their model")]
    lora_path: Annotated[str, Meta(description="folder below adapter_root, by its path from there or from /")]
    load_inplace: Annotated[bool, Meta(description="a name that is taken gets this version for new requests")] = False


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: Annotated[str, Meta(description="requests that run go on, new ones get 404")]


class LoadedAdapter(msgspec.Struct, kw_only=True):
    """What was loaded."""

    object: Annotated[str, only("lora_adapter")] = "lora_adapter"
    name: str
    # vLLM's clients look for this word
    status: Annotated[str, only("success")] = "success"


class UnloadedAdapter(msgspec.Struct, kw_only=True):
    """What takes no new request any more."""

    object: Annotated[str, only("lora_adapter.deleted")] = "lora_adapter.deleted"
    name: str
    deleted: bool = True


_LOAD_RULES = FieldRules(LoadAdapterRequest, {})
_UNLOAD_RULES = FieldRules(UnloadAdapterRequest, {})


@router.post(
    "/v1/load_lora_adapter", openapi_extra=described(request=LoadAdapterRequest, answer=LoadedAdapter, errors=(404,))
)
async def load_lora_adapter(request: Request) -> Response:
    """Loads an adapter beside the requests that run; answers when it may be used."""
    body = await read_request(request, LoadAdapterRequest, _LOAD_RULES, strict=True)
    serving: Serving = request.app.state.serving
    # files may lie on a disk that is slow to answer
    folder = await asyncio.to_thread(folder_below, request.app.state.adapter_root, body.lora_path)
    await asyncio.to_thread(_check_readable, folder)
    adapter = await serving.engine.load_adapter(body.lora_name, str(folder), in_place=body.load_inplace)
    return json_answer(LoadedAdapter(name=adapter.name))


@router.post(
    "/v1/unload_lora_adapter",
    openapi_extra=described(request=UnloadAdapterRequest, answer=UnloadedAdapter, errors=(404,)),
)
async def unload_lora_adapter(request: Request) -> Response:
    """Takes an adapter out of service; its memory is given back when its last request has ended."""
    body = await read_request(request, UnloadAdapterRequest, _UNLOAD_RULES, strict=True)
    serving: Serving = request.app.state.serving
    adapter = await serving.engine.unload_adapter(body.lora_name)
    return json_answer(UnloadedAdapter(name=adapter.name))


def folder_below(root: str | None, name: str) -> Path:
    """The folder itself, all links followed; 404 for whatever lies elsewhere, whether it is there or not."""
    if root is None:
        raise invalid("lora_path: this server loads no adapters over HTTP. Start it with --adapter-root.", "lora_path")
    path = Path(name)
    is_plain = 0 < len(name) <= _MOST_CHARACTERS and name.isprintable() and ".." not in path.parts
    if is_plain:
        try:
            above = Path(root).resolve(strict=True)
            # a path that is absolute stays what it is
            folder = (above / path).resolve(strict=True)
            inside = [folder, *(file.resolve() for file in map(folder.joinpath, _FILES))]
            if inside[1].is_file() and all(one.is_relative_to(above) for one in inside):
                return folder
        except (OSError, RuntimeError):
            pass  # not there, or links in a circle: the same answer, so that nobody learns what else is there
    text = f"lora_path={name[:100]!r}: must be the name of a folder below adapter_root that holds an adapter."
    raise ApiError(404, text, param="lora_path", code=NOT_FOUND)


def _check_readable(folder: Path) -> None:
    """503 for a disk that fails, or files that are still on their way: the same request may work a little later. What
    can be read is the engine's to judge."""
    try:
        with (folder / _FILES[0]).open("rb") as file:
            data = file.read(_MOST_CONFIG_BYTES)
        if len(data) < _MOST_CONFIG_BYTES:
            msgspec.json.decode(data)
    except (OSError, ValueError, RecursionError) as error:
        # without the path
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        text = f"lora_path: {_FILES[0]} cannot be read ({reason})."
        raise unavailable(f"{text} Send the request again when the adapter lies there whole.") from error
