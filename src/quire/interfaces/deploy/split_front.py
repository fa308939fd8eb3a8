"""The front of servers that have a half of each request: some compute prompts, the others go on (4.4.4).

    client --- HTTP ---> front --- max_tokens=1, do_remote_decode ---> a prefill server
                               <-- kv_transfer_params -----------------'
                               --- the request, kv_transfer_params --> a decode server ---> the whole answer

What prefill servers do is a saving: whoever of them is lost, the decode server computes the prompt itself. The answer
is the decode server's alone, first token included.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace

import msgspec

from quire.interfaces.deploy.front import HEALTH_PATHS, Fields, Front, Head, Request, fields_of

_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages")
_FIELD = "kv_transfer_params"
# they need every position computed by who answers, or have been in two halves already
_UNDIVIDED = ("echo", "prompt_logprobs", _FIELD)
_LENGTHS = ("max_tokens", "max_completion_tokens")
# with a stream, or of more than one token
_NOT_OF_A_PROMPT = ("stream_options", "min_tokens")
_NOT_ASKED = (b"null", b"false")
_LOST = Head(503, [])

logger = logging.getLogger("quire.deploy")
_encode = msgspec.json.encode


class SplitFront:
    def __init__(self, prefill: Front, decode: Front) -> None:
        self._prefill = prefill
        self._decode = decode

    async def answer(self, request: Request) -> tuple[Head, AsyncGenerator[bytes, None]]:
        path = request.target.partition("?")[0]
        if path in HEALTH_PATHS:
            return self._health()
        fields = _fields_of(request) if path in _PATHS else None
        if fields is None or any(_is_asked(fields, name) for name in _UNDIVIDED):
            return await self._decode.answer(request)
        head, body = await self._computed(request, fields)
        if 400 <= head.status < 500:
            # it would be refused by the other one as well, or there is no room for it
            return head, _once(body)
        if head.status == 200:
            fields[_FIELD] = msgspec.Raw(_params_in(body))
        else:
            logger.warning("no prefill server has computed a prompt (%d): the decode server does", head.status)
        return await self._decode.answer(replace(request, body=_encode(fields)))

    async def _computed(self, request: Request, fields: Fields) -> tuple[Head, bytes]:
        headers = [(name, value) for name, value in request.headers if name.lower() != "accept-encoding"]
        try:
            head, parts = await self._prefill.answer(replace(request, headers=headers, body=_prompt_of(fields)))
            return head, b"".join([part async for part in parts])
        except Exception:  # it was lost with a part of its answer, or stands still
            return _LOST, b""

    def _health(self) -> tuple[Head, AsyncGenerator[bytes, None]]:
        serving = {"prefill": self._prefill.num_serving, "decode": self._decode.num_serving}
        head = Head(200 if serving["decode"] else 503, [("content-type", "application/json")])
        return head, _once(json.dumps(serving).encode())


def _fields_of(request: Request) -> Fields | None:
    """None: it is not divided, or a server says what is wrong."""
    kinds = [value for name, value in request.headers if name.lower() == "content-type"]
    if request.method != "POST" or any("ndjson" in kind for kind in kinds):
        return None
    return fields_of(request.body)


def _is_asked(fields: Fields, name: str) -> bool:
    return name in fields and bytes(fields[name]).strip() not in _NOT_ASKED


def _prompt_of(fields: Fields) -> bytes:
    """The same request for its prompt alone: one token, and what another server needs to go on."""
    asked = {name: value for name, value in fields.items() if name not in _NOT_OF_A_PROMPT}
    given = [name for name in _LENGTHS if _is_asked(fields, name)]
    one = msgspec.Raw(b"1")
    asked |= dict.fromkeys(given or _LENGTHS[:1], one)
    asked["stream"] = msgspec.Raw(b"false")
    asked[_FIELD] = msgspec.Raw(b'{"do_remote_decode":true}')
    return _encode(asked)


def _params_in(body: bytes) -> bytes:
    return bytes((fields_of(body) or {}).get(_FIELD, b"null"))


async def _once(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body
