"""What a server that computes prompts hands to one that goes on, beside the KV (disaggregated prefill, 4.4.4): the
first token of each prompt, as a text that nobody can make who lacks the secret of both.

    prefill   L computed, 1 sampled ---- KV of L tokens, by the store that both have ----> decode   computed = L
                                    \\--- the token, by whoever sent the request ---------/          total = L + 1

Where blocks lie is no part of it: they are found by what is in them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from quire.config import shared_key
from quire.engine_client import TokenDelta
from quire.interfaces.requests import PreparedRequest
from quire.messages import EngineRequest, KVTransfer, TokenLogprobs

_DIGEST_BYTES = 16
_PURPOSE = "handover"
# the tiers name blocks by what is in them, so that a key says nothing
_KEY = ""


class FirstToken(msgspec.Struct, array_like=True):
    """Of a prompt."""

    # of the prompt, and of whose it is
    digest: bytes
    # None: that was its end, or there is none that another server could go on with
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[FirstToken])


def seal(tokens: Sequence[FirstToken]) -> str:
    content = _encoder.encode(tokens)
    return base64.urlsafe_b64encode(_tag(content) + content).decode()


def unseal(text: str) -> list[FirstToken]:
    """Raises ValueError for what no server with the same secret has sealed, or one of another version has."""
    try:
        data = base64.b64decode(text, altchars=b"-_", validate=True)
    except binascii.Error:
        data = b""
    tag, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if not hmac.compare_digest(tag, _tag(content)):
        raise ValueError("sealed by nobody who has this server's secret")
    try:
        return _decoder.decode(content)
    except msgspec.MsgspecError as error:
        raise ValueError(f"sealed in another form: {error}") from None


def _tag(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES, key=shared_key(_PURPOSE)).digest()


def digest_of(request: EngineRequest, model: str) -> bytes:
    """Of the prompt, and of all that says whose it is and how its first token is chosen. `model`: its weights."""
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=shared_key(_PURPOSE))
    scope = request.tenant.cache_scope if request.tenant is not None else ""
    # the one half is asked for one token, and so for no other least number
    rules = msgspec.structs.replace(request.sampling, max_tokens=1, min_tokens=0)
    hasher.update(_encoder.encode((model, scope, request.cache_salt, rules)))
    hasher.update(np.array(request.prompt_token_ids, dtype=np.int64).data)
    return hasher.digest()


def handing_over(prepared: PreparedRequest) -> PreparedRequest:
    """The same, with its KV kept to the last token."""
    return _with(prepared, KVTransfer(store=_KEY))


def taking_over(
    prepared: PreparedRequest, first: FirstToken, model: str, block_size: int, *, is_judged: bool
) -> PreparedRequest:
    """The same, with its KV expected, and behind the first token where one sequence goes on from it. `is_judged`:
    somebody is to see all tokens of the output before a client does, so it samples them itself."""
    request = prepared.request
    sampling = request.sampling
    if request.adapter or request.media:
        # neither is a part of the digest
        return prepared
    if sampling.prompt_logprobs is not None or first.digest != digest_of(request, model):
        # every position is computed; or it is another request, of which nobody promised anything
        return prepared
    num_prompt = len(request.prompt_token_ids)
    has_scores = sampling.logprobs is None or first.logprobs is not None
    is_one_line = sampling.n == 1 and request.decoding is None and (sampling.max_tokens or 0) > 1
    # what may not end yet draws from fewer tokens than the other half did
    is_same_draw = sampling.min_tokens == 0 or sampling.is_greedy
    if first.token_id is None or not has_scores or not is_one_line or not is_same_draw or is_judged:
        # as with any prefix one token is computed, so the last block is not needed where it holds no other
        num_whole = (num_prompt - 1) // block_size * block_size
        return _with(prepared, KVTransfer(fetch=_KEY, num_fetch_tokens=num_whole)) if num_whole else prepared
    logprobs = None if sampling.logprobs is None or first.logprobs is None else [first.logprobs]
    taken = _with(prepared, KVTransfer(fetch=_KEY, num_fetch_tokens=num_prompt, num_output_tokens=1))
    behind = msgspec.structs.replace(taken.request, prompt_token_ids=[*request.prompt_token_ids, first.token_id])
    return replace(taken, request=behind, given=TokenDelta(0, [first.token_id], logprobs))


def _with(prepared: PreparedRequest, transfer: KVTransfer) -> PreparedRequest:
    # what another engine may not know by its tokens alone is found by name, as far as its blocks are full
    request = prepared.request
    if request.adapter or request.media:
        return prepared
    return replace(prepared, request=msgspec.structs.replace(request, transfer=transfer))
