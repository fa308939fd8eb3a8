"""One completion while it is made, in llama.cpp's form: events `data: {...}`, the last one says `stop` and counts."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from quire.interfaces.assembly import OutputDelta
from quire.interfaces.server.event_stream import StreamDialect
from quire.interfaces.server.llama_cpp.fields import LlamaCppFields
from quire.interfaces.server.openai.logprobs import TokenNames, chat_logprobs
from quire.interfaces.server.openai.work import Work

DIALECT = StreamDialect(closing=b"")


class LlamaCppAnswer:
    """One completion on its way: events, and what was said so far."""

    dialect = DIALECT
    long_field = "completion_probabilities"

    def __init__(self, body: LlamaCppFields, prompt: str | list[int], work: Work) -> None:
        self._body = body
        self._prompt = prompt
        self._work = work
        self.generating = work.generating
        self._num_top = work.num_top(body.n_probs) or 0
        self._content: list[str] = []
        self._tokens: list[int] = []
        self._scores: list[Any] = []
        self._num_tokens = 0
        self._last: OutputDelta | None = None
        self._began = self._answered = time.perf_counter()

    def encode(self, delta: OutputDelta) -> bytes:
        self._read(delta)
        if not delta.text and not delta.token_ids:
            return b""
        scores = self._scores_of(delta)
        return _event(
            {
                "index": 0,
                "content": delta.text,
                "tokens": delta.token_ids,
                "stop": False,
                "id_slot": -1,
                "tokens_predicted": self._num_tokens,
                "tokens_evaluated": len(self._work.prompts[0]),
                **({"completion_probabilities": scores} if scores else {}),
                **({"timings": self._timings()} if self._body.timings_per_token else {}),
            }
        )

    async def end(self) -> bytes:
        return _event(await self._ending("", []))

    def fold(self, delta: OutputDelta) -> None:
        self._read(delta)
        self._content.append(delta.text)
        if self._body.return_tokens:
            self._tokens += delta.token_ids
        self._scores += self._scores_of(delta)

    async def whole(self) -> dict[str, Any]:
        return await self._ending("".join(self._content), self._tokens)

    def _read(self, delta: OutputDelta) -> None:
        if not self._num_tokens:
            self._answered = time.perf_counter()
        self._num_tokens += len(delta.token_ids)
        self._last = delta

    def _scores_of(self, delta: OutputDelta) -> list[dict[str, Any]]:
        if not self._num_top or not delta.logprobs:
            return []
        found = chat_logprobs(TokenNames(self._work.model.renderer), delta.token_ids, delta.logprobs, self._num_top)
        return [
            {"id": token_id, **msgspec.to_builtins(score)}
            for token_id, score in zip(delta.token_ids, found, strict=True)
        ]

    async def _ending(self, content: str, tokens: list[int]) -> dict[str, Any]:
        assert self._last is not None
        usage = await self._work.usage()
        word = self._last.stop_reason if isinstance(self._last.stop_reason, str) else ""
        is_limit = self._last.finish_reason == "length"
        return {
            "index": 0,
            "content": content,
            "tokens": tokens,
            "id_slot": -1,
            "stop": True,
            "model": self._body.model or self._work.model.name,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "generation_settings": msgspec.to_builtins(self._work.params),
            "prompt": self._prompt,
            "truncated": False,
            "stop_type": "limit" if is_limit else "word" if word else "eos",
            "stopping_word": word,
            "tokens_cached": usage.prompt_tokens_details.cached_tokens,
            "timings": self._timings(),
            **({"completion_probabilities": self._scores} if self._scores else {}),
        }

    def _timings(self) -> dict[str, float]:
        counts = self._work.counts
        num_prompt = counts.num_prompt_tokens - counts.num_cached_tokens
        return {
            "cache_n": counts.num_cached_tokens,
            **_speed("prompt", num_prompt, self._answered - self._began),
            **_speed("predicted", self._num_tokens, time.perf_counter() - self._answered),
        }


def _speed(what: str, count: int, seconds: float) -> dict[str, float]:
    return {
        f"{what}_n": count,
        f"{what}_ms": seconds * 1e3,
        f"{what}_per_token_ms": seconds * 1e3 / max(count, 1),
        f"{what}_per_second": count / seconds if seconds else 0.0,
    }


def _event(value: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(value)
