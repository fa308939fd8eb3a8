"""A log of a run without anybody's words: tokens are exchanged, texts become names without meaning, images are dropped.

Tokens are exchanged one for one, everywhere alike, by a secret that is thrown away. So equal beginnings stay equal,
stop tokens stay stop tokens, and the same decisions follow; how often a token occurs can still be counted. Whatever
only a worker looks at is left out: forms of answers, words that are forbidden, pixels, vectors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np

from quire.messages import (
    Candidates,
    ControlCall,
    EngineRequest,
    ExtendRequest,
    IntArray,
    KVTransfer,
    PermitTokens,
    StepOutput,
    ToCore,
    TokenLogprobs,
    TokenMask,
)
from quire.observability.run_log import RecordSink
from quire.observability.run_records import Answered, Decided, Died, Failed, Received, RunRecord, StepFailed, Told
from quire.sampling_params import SamplingParams

# texts that name a choice and nobody's things: arguments of operations, and entries of answers
_PLAIN_TEXTS = frozenset({"part", "state"})
# texts that name contents, and lead to names of blocks
_DIGESTS = frozenset({"content", "digest_weights"})
_WITHHELD = "withheld"


class Redaction:
    """One secret's worth of replacements."""

    def __init__(self, vocab_size: int, secret: bytes) -> None:
        seed = int.from_bytes(hashlib.blake2b(secret, digest_size=16).digest(), "little")
        self._token_of: IntArray = np.random.default_rng(seed).permutation(vocab_size).astype(np.int64)
        self._secret = secret

    def token(self, token_id: int) -> int:
        # what the model does not have is refused, whatever it is
        return int(self._token_of[token_id]) if 0 <= token_id < len(self._token_of) else token_id

    def tokens(self, token_ids: Iterable[int]) -> list[int]:
        asked = np.asarray(list(token_ids), dtype=np.int64)
        exchanged: list[int] = self.column(asked).tolist()
        return exchanged

    def column(self, token_ids: IntArray) -> IntArray:
        is_known = (token_ids >= 0) & (token_ids < len(self._token_of))
        if is_known.all():
            return self._token_of[token_ids]
        return np.where(is_known, self._token_of[np.where(is_known, token_ids, 0)], token_ids)

    def name(self, text: str) -> str:
        """Equal ones stay equal; nothing stays nothing."""
        return hashlib.blake2b(text.encode(), key=self._secret, digest_size=8).hexdigest() if text else text

    def content(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, key=self._secret, digest_size=max(16, min(64, len(content)))).digest()

    # ------------------------------------------------------------------------------------------ records

    def of(self, record: RunRecord) -> RunRecord:
        match record:
            case Received():
                return msgspec.structs.replace(record, message=self._message(record.message))
            case Decided():
                appended = [(row, self.tokens(token_ids), is_final) for row, token_ids, is_final in record.appended]
                return msgspec.structs.replace(record, appended=appended) if appended else record
            case Answered():
                return msgspec.structs.replace(record, answer=self._answer(record.answer))
            case Failed() | Died() | StepFailed():
                # may quote what was asked for
                return msgspec.structs.replace(record, reason=_WITHHELD)
            case Told():
                reason = _WITHHELD if record.reason else ""
                answer = self._nested(record.question, record.answer, self._answered_text)
                return msgspec.structs.replace(record, reason=reason, answer=answer)
            case _:
                return record

    def _message(self, message: ToCore) -> ToCore:
        match message:
            case EngineRequest():
                return self._request(message)
            case ExtendRequest():
                return msgspec.structs.replace(message, token_ids=self.tokens(message.token_ids))
            case PermitTokens():
                return msgspec.structs.replace(
                    message, token_ids=self.tokens(message.token_ids), mask=message.mask and self._mask(message.mask)
                )
            case ControlCall():
                return msgspec.structs.replace(message, args=self._arguments(message.args))
            case _:
                return message

    def _request(self, request: EngineRequest) -> EngineRequest:
        marks = request.thought_marks
        tenant = request.tenant
        return msgspec.structs.replace(
            request,
            prompt_token_ids=self.tokens(request.prompt_token_ids),
            sampling=self._sampling(request.sampling),
            eos_token_ids=self.tokens(request.eos_token_ids),
            bad_words_token_ids=[self.tokens(word) for word in request.bad_words_token_ids],
            thought_marks=marks
            and msgspec.structs.replace(marks, opening=self.token(marks.opening), closing=self.token(marks.closing)),
            cache_salt=self.name(request.cache_salt),
            media=[
                msgspec.structs.replace(media, pixels=b"", content_hash=self.content(media.content_hash))
                for media in request.media
            ],
            keep=request.keep and self.name(request.keep),
            continues=request.continues and self.name(request.continues),
            transfer=request.transfer and self._transfer(request.transfer),
            tenant=tenant
            and msgspec.structs.replace(tenant, name=self.name(tenant.name), cache_scope=self.name(tenant.cache_scope)),
        )

    def _mask(self, mask: TokenMask) -> TokenMask:
        allowed = None if mask.allowed is None else self.tokens(mask.allowed)
        return TokenMask(banned=self.tokens(mask.banned), allowed=allowed)

    def _transfer(self, transfer: KVTransfer) -> KVTransfer:
        return msgspec.structs.replace(
            transfer,
            store=transfer.store and self.name(transfer.store),
            fetch=transfer.fetch and self.name(transfer.fetch),
        )

    def _sampling(self, sampling: SamplingParams) -> SamplingParams:
        allowed = sampling.allowed_token_ids
        bias = sampling.logit_bias
        return msgspec.structs.replace(
            sampling,
            stop=[],
            bad_words=[],
            logits_processors=None,
            structured_outputs=None,
            stop_token_ids=self.tokens(sampling.stop_token_ids),
            allowed_token_ids=allowed and self.tokens(allowed),
            logit_bias=bias and {self.token(token_id): value for token_id, value in bias.items()},
        )

    def _arguments(self, args: dict[str, Any]) -> dict[str, Any]:
        return {name: self._nested(name, value, self._argument) for name, value in args.items()}

    def _argument(self, name: str, text: str) -> str:
        return text if name in _PLAIN_TEXTS else self.name(text)

    def _answered_text(self, name: str, text: str) -> str:
        """Complaints quote files and requests; nobody decides by their words."""
        return self._argument(name, text) if name in _PLAIN_TEXTS | _DIGESTS else _WITHHELD

    def _nested(self, name: str, value: Any, of_text: Callable[[str, str], str]) -> Any:
        """Whatever plain data holds, however deep; an entry of a list has the name of the list."""
        match value:
            case str():
                return of_text(name, value)
            case bytes():
                return self.content(value)
            case list() | tuple():
                return [self._nested(name, one, of_text) for one in value]
            case dict():
                return {key: self._nested(str(key), one, of_text) for key, one in value.items()}
            case _:
                return value

    def _answer(self, answer: StepOutput) -> StepOutput:
        return msgspec.structs.replace(
            answer,
            token_ids=self.column(answer.token_ids),
            logprobs={row: self._positions(found) for row, found in answer.logprobs.items()},
            prompt_logprobs={row: self._positions(found) for row, found in answer.prompt_logprobs.items()},
            candidates={
                row: Candidates(self.tokens(found.token_ids), found.logprobs)
                for row, found in answer.candidates.items()
            },
            vectors=dict.fromkeys(answer.vectors, b""),
            failures=dict.fromkeys(answer.failures, _WITHHELD),
        )

    def _positions(self, positions: list[TokenLogprobs]) -> list[TokenLogprobs]:
        return [TokenLogprobs(self.tokens(one.token_ids), one.logprobs, one.ranks) for one in positions]


class RedactingSink:
    """Replaces before anything is passed on."""

    def __init__(self, inner: RecordSink, redaction: Redaction) -> None:
        self._inner = inner
        self._redaction = redaction

    def write(self, record: RunRecord) -> None:
        self._inner.write(self._redaction.of(record))
