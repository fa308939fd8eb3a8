"""From tokens and sampling parameters to the request that the engine core gets. Everything is checked here, once.

Owns the table of checks and the counter of requests. A mistake raises RequestError, which names the field, and nothing
has been started then. Called by LLM and AsyncLLM for every request; costs what the request says, not what runs.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from quire.beam_search_params import BeamSearchParams, GenerationParams
from quire.errors import ContextLengthError, RequestError
from quire.logits_processors import check_known
from quire.messages import EngineRequest, Media, Tenancy
from quire.parameter_checks import check_encodable, plain
from quire.sampling_params import SamplingParams
from quire.thought_marks import ThoughtMarks, no_marks

if TYPE_CHECKING:
    from quire.engine_client import AsyncEngineClient, Stream, TokenDelta

# What one request may cost before it runs: most entries of a field.
MOST_ENTRIES = {"bad_words": 128, "logit_bias": 1024, "stop_token_ids": 1024, "logprob_token_ids": 128}
_MOST_PRIORITY = 2**31 - 1
# What a step of one beam search looks through, all beams together: 128 beams with 384 tokens that end them.
_MOST_CANDIDATES = 2**16
# Log-probabilities of a request that wants more than so many at a position: each takes some hundred bytes on its way,
# and those of a prompt are in the worker's memory together.
_FEW_LOGPROBS = 1024
_MOST_LOGPROBS = 2**24
_MASK_64 = 2**64 - 1
_MASK_63 = 2**63 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What this engine can do; numbers that never change while it lives."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int
    max_num_seqs: int
    # False: the model makes vectors only
    has_head: bool = True
    # every prompt begins with a sound
    listens: bool = False
    # an encoder reads every prompt, and what is written begins with this token; None: a prompt is continued
    decoder_start_token_id: int | None = None
    # sampled text has one, unless a request says otherwise
    has_watermark: bool = False
    # the engine core and its one worker are in this process
    is_here: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One request before it is checked."""

    prompt_token_ids: list[int]
    sampling: SamplingParams
    media: list[Any]
    priority: int = 0
    # its tokens are kept for others, or are to come in pieces
    is_open: bool = False
    # kept by the core under the handle that the request continues; its prompt comes after them
    num_kept_tokens: int = 0
    # what `sampling` was made from, if beams were asked for
    beams: BeamSearchParams | None = None
    # tokens that end a sequence besides sampling.stop_token_ids
    eos_token_ids: list[int] = field(default_factory=list)
    # how the prompt becomes a vector; no output follows then
    pooling: str = ""
    label_token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that passed every check and was not started yet, and what its outputs are to show."""

    request: EngineRequest
    prompt: str | None
    # Beams bring log-probabilities in any case; they are shown to those who asked.
    shows_logprobs: bool
    # tokens of a session that stand before the request's own prompt
    before: list[int] = field(default_factory=list)
    # not so only for one that ended while its prompt was still arriving
    is_whole: bool = True
    # the end of the request's tokens is no prompt, but output that was sampled elsewhere: its first outputs
    given: TokenDelta | None = None

    @property
    def prompt_token_ids(self) -> list[int]:
        tokens = self.request.prompt_token_ids
        return tokens if self.given is None else tokens[: -len(self.given.token_ids)]

    def label(self, asked: str | None) -> str:
        """What its outputs are called, and what ends it by name."""
        return asked if asked is not None else str(self.request.request_id)

    def as_it_is(self, params: GenerationParams | None, priority: int) -> PreparedRequest:
        """Itself. It was prepared with its parameters; others that came now would be lost without a word."""
        is_same = isinstance(params, BeamSearchParams) and self.request.decoding == params.decoding_spec()
        name = "sampling_params" if params is not None and not is_same else "priority" if priority else None
        if name is not None:
            raise RequestError(
                f"{name}: given for a request that was prepared or received already. Give it there instead.", param=name
            )
        return self

    def start(self, client: AsyncEngineClient) -> Stream[TokenDelta]:
        """Sends it. What comes back must be closed, which aborts the request."""
        if client.is_open(self.request.request_id):
            raise RequestError(
                "This prepared request is running already, and runs once at a time. Call prepare() for each run.",
                param="prompt",
            )
        stream = client.open(self.request)
        return stream if self.given is None else GivenFirst(self.given, stream)


class GivenFirst:
    """The tokens of a request behind those that are there before it begins, as a Stream."""

    def __init__(self, given: TokenDelta, rest: Stream[TokenDelta]) -> None:
        self._given = [given]
        self._rest = rest

    def tell(self, reader: Callable[[], None]) -> None:
        self._rest.tell(reader)

    @property
    def has_news(self) -> bool:
        return bool(self._given) or self._rest.has_news

    @property
    def is_done(self) -> bool:
        return not self._given and self._rest.is_done

    def take(self) -> Iterable[TokenDelta]:
        given, self._given = self._given, []
        return given or self._rest.take()

    async def aclose(self) -> None:
        await self._rest.aclose()


def _check_head(asked: Asked, limits: Limits) -> None:
    if not limits.has_head and not asked.pooling:
        raise RequestError(
            "This model generates no text: it makes vectors of texts, or tells labels of them. Ask for embeddings, "
            "classify, score or rerank, or start the engine with a checkpoint that has a head of tokens.",
            param="model",
        )


def _check_prompt_not_empty(asked: Asked, limits: Limits) -> None:
    if not asked.prompt_token_ids and not asked.num_kept_tokens:
        raise RequestError(
            "prompt: the decoder prompt cannot be empty, and it has no tokens. Give at least one, such as a space.",
            param="prompt",
        )


def _check_prompt_ids(asked: Asked, limits: Limits) -> None:
    ids = asked.prompt_token_ids
    # The common case in three passes of C; only a bad prompt pays for finding its bad token.
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < limits.vocab_size:
        return
    for position, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < limits.vocab_size:
            raise RequestError(
                f"prompt_token_ids[{position}]={token!r}: out of vocabulary, must be a whole number between 0 and "
                f"{limits.vocab_size - 1}, the last token of this model.",
                param="prompt",
            )


def _check_context_length(asked: Asked, limits: Limits) -> None:
    num_prompt = asked.num_kept_tokens + len(asked.prompt_token_ids)
    length = limits.max_model_len
    least_output = 0 if asked.pooling else max(1, asked.sampling.min_tokens)
    if num_prompt + least_output <= length:
        return
    if asked.pooling:
        raise ContextLengthError(
            f"This model's maximum context length is {length} tokens. However, the input has {num_prompt} tokens. "
            "Shorten the input, or cut it into several.",
            param="prompt",
        )
    room = "no room for an output" if num_prompt >= length else f"room for {length - num_prompt} of {least_output}"
    wanted = f"min_tokens={least_output}" if least_output > 1 else "at least one token"
    kept = asked.num_kept_tokens
    what = f"session and prompt have {num_prompt} tokens together" if kept else f"the prompt has {num_prompt} tokens"
    remedy = "Rewind the session, or open another one" if kept else "Shorten the prompt"
    raise ContextLengthError(
        f"This model's maximum context length is {length} tokens. However, {what} and the output needs {wanted}, so "
        f"there is {room}. {remedy}.",
        param="prompt",
    )


def _check_logprobs(asked: Asked, limits: Limits) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(asked.sampling, name)
        if limits.max_logprobs == -1 or count is None:
            continue
        if (limits.vocab_size if count == -1 else count) > limits.max_logprobs:
            raise RequestError(
                f"{name}={count}: at most {limits.max_logprobs} are allowed here. The engine's option max_logprobs "
                "raises the limit.",
                param=name,
            )


def _check_sampling_ids(asked: Asked, limits: Limits) -> None:
    sampling = asked.sampling
    for name, ids in (
        ("stop_token_ids", sampling.stop_token_ids),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("logit_bias", sampling.logit_bias),
        ("logprob_token_ids", sampling.logprob_token_ids),
    ):
        for token in (min(ids), max(ids)) if ids else ():
            if not 0 <= token < limits.vocab_size:
                raise RequestError(
                    f"{name}: token {token} is not in the vocabulary of this model (0 to {limits.vocab_size - 1}).",
                    param=name,
                )


def _check_sizes(asked: Asked, limits: Limits) -> None:
    for name, most in {**MOST_ENTRIES, "allowed_token_ids": limits.vocab_size}.items():
        count = len(getattr(asked.sampling, name) or ())
        if count > most:
            raise RequestError(f"{name}: {count} entries, at most {most} are allowed.", param=name)


def _check_num_sequences(asked: Asked, limits: Limits) -> None:
    name, count = ("n", asked.sampling.n) if asked.beams is None else ("beam_width", asked.beams.beam_width)
    if count > limits.max_num_seqs:
        raise RequestError(
            f"{name}={count}: at most {limits.max_num_seqs} sequences run at once here (max_num_seqs), and those "
            f"of one request run together. Lower {name}, or start the engine with a greater max_num_seqs.",
            param=name,
        )


def _check_candidates(asked: Asked, limits: Limits) -> None:
    """Each beam brings its `width` best tokens; as any of them may end it, one more for each token that can."""
    if asked.beams is None:
        return
    width = asked.beams.beam_width
    num_ends = len({*asked.sampling.stop_token_ids, *asked.eos_token_ids})
    num_candidates = width * min(limits.vocab_size, width + num_ends)
    if num_candidates > _MOST_CANDIDATES:
        raise RequestError(
            f"beam_width={width}: with {num_ends} tokens that end a beam (stop_token_ids and the model's own) each "
            f"step looks through {num_candidates} candidates, at most {_MOST_CANDIDATES} are allowed, because other "
            "requests wait meanwhile. Lower beam_width, or give fewer stop_token_ids.",
            param="beam_width",
        )


def _check_priority(asked: Asked, limits: Limits) -> None:
    if type(asked.priority) is not int or not -_MOST_PRIORITY - 1 <= asked.priority <= _MOST_PRIORITY:
        raise RequestError(
            f"priority={asked.priority!r}: must be a whole number between {-_MOST_PRIORITY - 1} and {_MOST_PRIORITY}.",
            param="priority",
        )


def _check_processors(asked: Asked, limits: Limits) -> None:
    if asked.sampling.logits_processors is not None:
        check_known(asked.sampling.logits_processors, takes_functions=limits.is_here)


def _check_watermarking(asked: Asked, limits: Limits) -> None:
    if asked.sampling.watermarking and not limits.has_watermark:
        raise RequestError(
            "watermarking: this engine has no watermark. Start it with watermark_config, or leave it out.",
            param="watermarking",
        )


def _check_media(asked: Asked, limits: Limits) -> None:
    if limits.listens:
        _check_sound(asked)
    elif limits.decoder_start_token_id is not None:
        _check_source(asked)
    elif asked.media and asked.media[0].is_vectors:
        _check_vectors(asked)
    elif asked.media and (asked.num_kept_tokens or asked.pooling):
        raise RequestError(
            f"multi_modal_data: {len(asked.media)} images in a session or for an embedding, which take text only. "
            "Leave them out.",
            param="multi_modal_data",
        )


def _check_sound(asked: Asked) -> None:
    if not asked.media:
        raise RequestError(
            "prompt: this model writes down what it hears, and there is nothing to hear. Use /v1/audio/transcriptions, "
            'LLM.transcribe or {"prompt": ..., "multi_modal_data": {"audio": ...}}.',
            param="prompt",
        )
    if asked.num_kept_tokens or asked.pooling:
        raise RequestError(
            "multi_modal_data: a sound in a session or for an embedding, which take text only. Send it as a prompt.",
            param="multi_modal_data",
        )
    if asked.sampling.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs: not compatible with a sound, which begins the prompt and is no tokens that had a "
            "probability. Leave it out; logprobs gives those of the output.",
            param="prompt_logprobs",
        )


def _check_source(asked: Asked) -> None:
    if asked.media:
        raise RequestError("multi_modal_data: this model takes text only. Leave it out.", param="multi_modal_data")
    if asked.is_open or asked.num_kept_tokens:
        raise RequestError(
            "prompt: an encoder reads the prompts of this model as a whole, so that nothing can follow one later: no "
            "sessions, no pinned prefixes, no prompts in pieces. Send each prompt whole, and by itself.",
            param="prompt",
        )
    if asked.pooling:
        raise RequestError(
            "prompt: this model writes texts, and its encoder makes no vectors or labels here. Use completions.",
            param="prompt",
        )
    if asked.sampling.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs: an encoder reads the prompts of this model, whose tokens have no probability then. Leave "
            "it out; logprobs gives those of the output.",
            param="prompt_logprobs",
        )


def _check_vectors(asked: Asked) -> None:
    reason = None
    if asked.num_kept_tokens or asked.pooling:
        reason = "prompt_embeds: not in a session or for an embedding, which take text only. Send text or tokens."
    elif asked.sampling.prompt_logprobs is not None:
        reason = (
            "prompt_logprobs: not compatible with prompt_embeds, which are no tokens that had a probability. Leave one "
            "of them out."
        )
    elif asked.sampling.repetition_penalty != 1.0:
        reason = (
            f"repetition_penalty={asked.sampling.repetition_penalty}: not compatible with prompt_embeds, of which "
            "nothing can be repeated. Set it to 1, or take presence_penalty, which looks at the answer alone."
        )
    if reason is not None:
        raise RequestError(reason, param=reason.partition("=")[0].partition(":")[0])


def _check_label_tokens(asked: Asked, limits: Limits) -> None:
    for token in asked.label_token_ids:
        if not 0 <= token < limits.vocab_size:
            raise RequestError(
                f"This model's files compare texts by token {token}, which is not among its {limits.vocab_size}.",
                param="model",
            )


CHECKS: tuple[Callable[[Asked, Limits], None], ...] = (
    _check_head,
    _check_media,
    _check_prompt_not_empty,
    _check_prompt_ids,
    _check_context_length,
    _check_logprobs,
    _check_num_sequences,
    _check_priority,
    _check_sizes,
    _check_sampling_ids,
    _check_processors,
    _check_watermarking,
    _check_candidates,
    _check_label_tokens,
)


# Of a prompt that arrives in pieces (4.4.4): these when a piece has come, the others before the first.
_PIECE_CHECKS = (_check_prompt_ids, _check_context_length)
_OPEN_CHECKS = tuple(check for check in CHECKS if check not in (*_PIECE_CHECKS, _check_prompt_not_empty))
# Numbers of requests that are sent once more: far from the others, so that seeds do not depend on how a prompt arrived.
_FIRST_RESENT = 2**40


def _count_all_logprobs(sampling: SamplingParams, vocab_size: int) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(sampling, name) == -1:
            setattr(sampling, name, vocab_size)


def _check_total_logprobs(sampling: SamplingParams, num_prompt_tokens: int, vocab_size: int) -> None:
    """Those of whole vocabularies."""
    positions = {"logprobs": sampling.n * (sampling.max_tokens or 1), "prompt_logprobs": num_prompt_tokens}
    for name, num_positions in positions.items():
        count = min(getattr(sampling, name) or 0, vocab_size)
        if count > _FEW_LOGPROBS and count * num_positions > _MOST_LOGPROBS:
            raise RequestError(
                f"{name}: {count:,} at each of {num_positions:,} positions; at most {_MOST_LOGPROBS // count:,} "
                f"positions may have so many, {_MOST_LOGPROBS:,} numbers together. Ask for fewer, or "
                + ("lower max_tokens or n." if name == "logprobs" else "shorten the prompt."),
                param=name,
            )


class RequestMaker:
    """Checks a request and gives it its number, its seed and its bounds."""

    def __init__(
        self,
        limits: Limits,
        *,
        eos_token_ids: Iterable[int] = (),
        seed: int = 0,
        bad_words_token_ids: Callable[[list[str]], list[list[int]]],
        thought_marks: Callable[[], ThoughtMarks] = no_marks,
        first_id: int = 0,
    ) -> None:
        self.limits = limits
        self._eos_token_ids = list(eos_token_ids)
        self._seed = seed
        self._bad_words_token_ids = bad_words_token_ids
        self._thought_marks = thought_marks
        self._counter = itertools.count(first_id)
        self._resent_counter = itertools.count(first_id + _FIRST_RESENT)

    def make(
        self,
        prompt_token_ids: list[int],
        params: GenerationParams,
        *,
        priority: int = 0,
        cache_salt: str | None = "",
        media: list[Any] | None = None,
        adapter: int = 0,
        keep: str | None = None,
        continues: str | None = None,
        num_kept_tokens: int = 0,
        is_final: bool = True,
        pooling: str = "",
        is_classified: bool = False,
        label_token_ids: list[int] | None = None,
        second_start: int = 0,
        tenant: Tenancy | None = None,
    ) -> EngineRequest:
        """A request for the core; raises RequestError for what cannot be done. Not final: its prompt is to come."""
        beams = params.replace() if isinstance(params, BeamSearchParams) else None
        sampling = _sampling_of(beams or params)  # copies, checked again: the user may have changed the originals
        eos_token_ids = [] if sampling.ignore_eos else self._eos_token_ids
        prompt_token_ids = _as_ints(prompt_token_ids)
        source = []
        if self.limits.decoder_start_token_id is not None and prompt_token_ids:
            source = prompt_token_ids
            prompt_token_ids = [*source, self.limits.decoder_start_token_id]
        priority = plain(priority)
        cache_salt = checked_cache_salt(cache_salt)
        asked = Asked(
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            media=media or [],
            priority=priority,
            is_open=not is_final or keep is not None,
            num_kept_tokens=num_kept_tokens,
            beams=beams,
            eos_token_ids=eos_token_ids,
            pooling=pooling,
            label_token_ids=label_token_ids or [],
        )
        for check in CHECKS if is_final else _OPEN_CHECKS:
            check(asked, self.limits)
        # Bad words and thoughts need the tokenizer, so they come last, and only where there are any.
        bad_words = self._bad_words_token_ids(sampling.bad_words) if sampling.bad_words else []
        thought_marks = None if sampling.thinking_token_budget is None else self._thought_marks()
        if sampling.watermarking is None and self.limits.has_watermark:
            sampling.watermarking = beams is None and not sampling.is_greedy
        _count_all_logprobs(sampling, self.limits.vocab_size)
        sampling.max_tokens = self._max_tokens(sampling, num_kept_tokens + len(prompt_token_ids))
        _check_total_logprobs(sampling, len(prompt_token_ids), self.limits.vocab_size)
        request_id = next(self._counter)
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            seed=_seed_of(sampling.seed, self._seed, request_id),
            eos_token_ids=eos_token_ids,
            bad_words_token_ids=bad_words,
            thought_marks=thought_marks,
            priority=priority,
            cache_salt=cache_salt,
            decoding=beams.decoding_spec() if beams is not None else None,
            keep=keep,
            continues=continues,
            media=[_text_source(source)] if source else asked.media,
            is_final=is_final,
            pooling=pooling,
            is_classified=is_classified,
            label_token_ids=asked.label_token_ids,
            second_start=second_start,
            tenant=tenant,
            adapter=adapter,
        )

    def checked_piece(self, token_ids: list[int], sampling: SamplingParams, num_before: int) -> list[int]:
        """Tokens that follow `num_before` others of the same prompt."""
        token_ids = _as_ints(token_ids)
        asked = Asked(prompt_token_ids=token_ids, sampling=sampling, media=[], num_kept_tokens=num_before)
        for check in _PIECE_CHECKS:
            check(asked, self.limits)
        return token_ids

    def resent(self, request: EngineRequest, prompt_token_ids: list[int]) -> EngineRequest:
        """The same request with another prompt, which is whole; the outputs are those that it would have had."""
        checked = self.checked_piece(prompt_token_ids, request.sampling, 0)
        return msgspec.structs.replace(
            request, request_id=next(self._resent_counter), prompt_token_ids=checked, is_final=True
        )

    def _max_tokens(self, sampling: SamplingParams, num_prompt_tokens: int) -> int:
        # what becomes a vector may leave no room, and needs none
        room = max(1, self.limits.max_model_len - num_prompt_tokens)
        return room if sampling.max_tokens is None else min(room, sampling.max_tokens)


def checked_cache_salt(cache_salt: Any) -> str:
    """As a plain text; None means none. A session asks before its first request."""
    cache_salt = "" if cache_salt is None else plain(cache_salt)
    if not isinstance(cache_salt, str):
        raise RequestError(
            f"cache_salt={cache_salt!r}: must be a text; only requests of the same one share the prefix cache. Leave "
            "it out to share with all that have none.",
            param="cache_salt",
        )
    check_encodable("cache_salt", cache_salt)
    return cache_salt


def _sampling_of(params: GenerationParams) -> SamplingParams:
    if isinstance(params, BeamSearchParams):
        return params.sampling_params()
    if isinstance(params, SamplingParams):
        return params.replace()
    raise RequestError(
        f"sampling_params={params!r}: must be SamplingParams or BeamSearchParams.", param="sampling_params"
    )


def _text_source(token_ids: list[int]) -> Media:
    """What an encoder reads of a prompt."""
    content = np.array(token_ids, dtype="<i4").tobytes()
    return Media(
        start=0,
        length=len(token_ids),
        pixels=content,
        shape=[len(token_ids)],
        mean=[],
        std=[],
        grid=[1, 1, len(token_ids)],
        merge_size=1,
        content_hash=hashlib.sha256(b"text " + content).digest(),
    )


def _as_ints(token_ids: list[int]) -> list[int]:
    """Whole numbers of other kinds, such as numpy's, as Python's own; what is none is left to be refused."""
    if set(map(type, token_ids)) <= {int}:
        return token_ids
    return [int(token) if isinstance(token, Integral) and not isinstance(token, bool) else token for token in token_ids]


def _seed_of(asked: int | None, engine_seed: int, number: int) -> int:
    """The seed that was asked for, or one that follows from the engine's seed and the number of the request, so that
    the same program gives the same outputs. Fits into a signed 64-bit number, as the worker keeps it."""
    if asked is not None:
        return asked & _MASK_63
    # splitmix64 over both numbers: neighbours have nothing in common
    value = (engine_seed * 0x9E3779B97F4A7C15 + (number + 1) * 0xD1B54A32D192ED03) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return (value ^ (value >> 31)) & _MASK_63
