"""/v1/admin/pinned_prefixes: beginnings of prompts that are computed once and never evicted (3.4.4)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from msgspec import Meta

from quire.interfaces.pinned_prefixes import PinnedPrefix
from quire.interfaces.prefix_file import prompt_of
from quire.interfaces.server.access.caller import admins_only
from quire.interfaces.server.openai.responses import only
from quire.interfaces.server.request_body import read_request
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.field_rules import FieldRules
from quire.interfaces.server.wire.json_answer import json_answer

router = APIRouter(dependencies=[Depends(admins_only)])
_PATH = "/v1/admin/pinned_prefixes"


class PinPrefixRequest(msgspec.Struct, kw_only=True):
    """POST /v1/admin/pinned_prefixes: exactly one of text, messages and token_ids."""

    name: Annotated[str | None, Meta(description="1 to 64 letters, digits or . _ : -; by default prefix-N")] = None
    text: Annotated[str | None, Meta(description="the prefix as a text")] = None
    messages: Annotated[list[dict[str, Any]] | None, Meta(description="the prefix as the first messages of chats")] = (
        None
    )
    token_ids: Annotated[list[int] | None, Meta(description="the prefix as tokens")] = None
    cache_salt: Annotated[str | None, Meta(description="only requests of the same salt use it")] = None


class ShownPrefix(msgspec.Struct, kw_only=True):
    """A PinnedPrefix."""

    object: Annotated[str, only("pinned_prefix")] = "pinned_prefix"
    name: str
    num_tokens: int
    num_blocks: int
    num_hits: int
    num_hit_tokens: int


class PrefixList(msgspec.Struct, kw_only=True):
    """All that are pinned."""

    object: Annotated[str, only("list")] = "list"
    data: list[ShownPrefix]


class UnpinnedPrefix(msgspec.Struct, kw_only=True):
    """One that is no longer pinned."""

    name: str
    object: Annotated[str, only("pinned_prefix.deleted")] = "pinned_prefix.deleted"
    deleted: bool = True


_RULES = FieldRules(PinPrefixRequest, {})


@router.get(_PATH, openapi_extra=described(answer=PrefixList))
async def list_prefixes(request: Request) -> Response:
    """All pinned prefixes, with their memory and their use."""
    prefixes = await request.app.state.serving.engine.pinned_prefixes()
    return json_answer(PrefixList(data=[_shown(prefix) for prefix in prefixes]))


@router.post(_PATH, openapi_extra=described(request=PinPrefixRequest, answer=ShownPrefix, status=201, errors=(409,)))
async def pin_prefix(request: Request) -> Response:
    """Computes a prefix and pins it; answers when it is there."""
    body = await read_request(request, PinPrefixRequest, _RULES, strict=True)
    prompt = prompt_of(body.text, body.messages, body.token_ids)
    prefix = await request.app.state.serving.engine.pin_prefix(prompt, body.name, cache_salt=body.cache_salt or "")
    return json_answer(_shown(prefix), status=201)


@router.delete(_PATH + "/{name}", openapi_extra=described(answer=UnpinnedPrefix))
async def unpin_prefix(request: Request, name: str) -> Response:
    """Lets its memory be used for others again."""
    await request.app.state.serving.engine.unpin_prefix(name)
    return json_answer(UnpinnedPrefix(name=name))


def _shown(prefix: PinnedPrefix) -> ShownPrefix:
    return ShownPrefix(**asdict(prefix))
