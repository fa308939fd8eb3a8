"""`kv_transfer_params`, in the form of vLLM: a proxy asks one server for the prompt's part of a request and another one
for the rest, and carries what the first has answered to the second.

    {"do_remote_decode": true}  ->  kv_transfer_params of the answer  ->  {"do_remote_prefill": true, ...}

`prompt_token_ids` may stand beside: what the first server has made of a chat, so that the second reads no text.

vLLM's say where blocks lie, and a server goes there. Here blocks are found by what is in them, in the store that the
operator chose: what a client sends opens no connection and names no block.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from quire.config import EngineConfig
from quire.interfaces.assembly import OutputDelta
from quire.interfaces.handover import FirstToken, digest_of, handing_over, seal, taking_over, unseal
from quire.interfaces.requests import PreparedRequest
from quire.interfaces.server.openai.requests import GenerationFields
from quire.interfaces.server.served_model import ServedModel
from quire.interfaces.server.wire.errors import ApiError, invalid
from quire.interfaces.server.wire.prompt_forms import check_token_ids
from quire.messages import TokenLogprobs
from quire.outputs import Logprob

_FIELD = "kv_transfer_params"
# where vLLM's blocks lie
_PLACES = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
_MOST_CHARACTERS = 2**18
# without log-probabilities, so many have no more characters
_MOST_TOKENS = 2**13
_MOST_SCORES = 2**13


class KVTransferParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What may stand in a request, and stands in an answer."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    # of a chat, in place of its messages
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    # always null
    remote_engine_id: Any = None
    remote_block_ids: Any = None
    remote_host: Any = None
    remote_port: Any = None
    # this server's own: first tokens, sealed
    handover: str | None = None


class NoTransfer:
    """A request that is one server's."""

    def prepared(self, prepared: PreparedRequest) -> PreparedRequest:
        """Called once for each prompt, in their order."""
        return prepared

    def see(self, number: int, delta: OutputDelta) -> None:
        """Of the prompt of this number."""

    def params(self) -> KVTransferParams | UnsetType:
        """For the answer."""
        return UNSET


class HandsOver(NoTransfer):
    """Another server goes on."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._tokens: list[FirstToken] = []
        self._has_first = False
        self._num_scores = 0

    def prepared(self, prepared: PreparedRequest) -> PreparedRequest:
        # of more than one, the last is what ends at the length
        self._has_first = prepared.request.sampling.max_tokens == 1
        self._tokens.append(FirstToken(digest_of(prepared.request, self._model)))
        return handing_over(prepared)

    def see(self, number: int, delta: OutputDelta) -> None:
        # one that ended the text is sampled again, by who writes the answer
        if self._has_first and delta.finish_reason == "length" and len(delta.token_ids) == 1:
            scores = delta.logprobs[0] if delta.logprobs else None
            self._num_scores += len(scores or ())
            # the log-probabilities of a whole vocabulary are too long to be carried: they are computed again
            if self._num_scores <= _MOST_SCORES:
                first = self._tokens[number]
                first.token_id = delta.token_ids[0]
                first.logprobs = _scores(scores) if scores else None

    def params(self) -> KVTransferParams | UnsetType:
        sealed = seal(self._tokens)
        if len(sealed) > _MOST_CHARACTERS:
            # of many prompts: their first tokens are sampled again
            sealed = seal([FirstToken(first.digest) for first in self._tokens[:_MOST_TOKENS]])
        return KVTransferParams(do_remote_prefill=True, handover=sealed)


class TakesOver(NoTransfer):
    """Another server has begun."""

    def __init__(self, tokens: list[FirstToken], model: str, block_size: int, *, is_judged: bool) -> None:
        self._tokens = iter(tokens)
        self._model = model
        self._block_size = block_size
        self._is_judged = is_judged

    def prepared(self, prepared: PreparedRequest) -> PreparedRequest:
        first = next(self._tokens, None)
        if first is None:
            return prepared
        return taking_over(prepared, first, self._model, self._block_size, is_judged=self._is_judged)


def transfer_of(body: GenerationFields, model: ServedModel) -> NoTransfer:
    """What a request's `kv_transfer_params` ask for. Raises for what is wrong with them."""
    if not body.kv_transfer_params:
        return NoTransfer()
    params = _checked(body.kv_transfer_params)
    config = model.engine.config
    if not (params.do_remote_decode or params.do_remote_prefill):
        return NoTransfer()
    _check_role(params, config)
    if params.do_remote_decode:
        if body.stream:
            raise invalid(f"{_FIELD}.do_remote_decode: not with stream=true; the whole answer has them.", _FIELD)
        return HandsOver(config.worker.model_as_run)
    if params.handover is None:
        # a prompt that was computed elsewhere is found by name, if it is there
        return NoTransfer()
    try:
        tokens = unseal(params.handover)
    except ValueError:
        raise invalid(
            f"{_FIELD}.handover: not what a server of this deployment has answered. Pass on what the answer to "
            "do_remote_decode holds, unchanged, between servers of one version with one QUIRE_KV_STORE_SECRET.",
            _FIELD,
        ) from None
    return TakesOver(tokens, config.worker.model_as_run, config.block_size, is_judged=bool(model.engine.hooks))


def forwarded_prompt(body: GenerationFields, model: ServedModel) -> list[int] | None:
    """The tokens that another server has made of this chat, if it brings them."""
    if not body.kv_transfer_params:
        return None
    token_ids = _checked(body.kv_transfer_params).prompt_token_ids
    if not token_ids:
        return None
    check_token_ids(token_ids, model.engine.config.facts.vocab_size, f"{_FIELD}.prompt_token_ids")
    return token_ids


def _checked(asked: dict[str, Any]) -> KVTransferParams:
    try:
        params = msgspec.convert(asked, KVTransferParams)
    except msgspec.ValidationError as error:
        raise invalid(f"{_FIELD}: {error}.", _FIELD) from None
    for name in _PLACES:
        if getattr(params, name) is not None:
            raise invalid(
                f"{_FIELD}.{name}: blocks come from the store of this server alone (kv_store), and from no place that "
                "a request names. Leave it null.",
                _FIELD,
            )
    if params.handover is not None and len(params.handover) > _MOST_CHARACTERS:
        raise invalid(f"{_FIELD}.handover: more than {_MOST_CHARACTERS} characters.", _FIELD)
    if params.do_remote_decode and params.do_remote_prefill:
        raise invalid(f"{_FIELD}: do_remote_decode and do_remote_prefill: a request has one half here.", _FIELD)
    return params


def _check_role(params: KVTransferParams, config: EngineConfig) -> None:
    if not config.shares_blocks:
        raise ApiError(
            400,
            f"{_FIELD}: this server has no kv_store, by which prompts of other servers could come or go. Start it with "
            "one (docs/disaggregation.md).",
            param=_FIELD,
        )
    half, other = ("prefill", "decode") if params.do_remote_decode else ("decode", "prefill")
    if config.role == other:
        raise invalid(
            f"{_FIELD}.do_remote_{other}: asks for the {half} of a request, and this server is for the other half "
            f"(role={other}). Exchange the addresses where requests are sent from.",
            _FIELD,
        )


def _scores(scores: dict[int, Logprob]) -> TokenLogprobs:
    entries = scores.values()
    return TokenLogprobs(list(scores), [one.logprob for one in entries], [one.rank or 0 for one in entries])
