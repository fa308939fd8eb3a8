"""An AsyncLLM without a model: real renderer, real checks, real assembly of text; only the core is a script.

Tokens are bytes, so that texts, characters cut in two and counts can be foreseen in a test.

    engine = fake_engine(tmp_path)                      answers with `reply_to(request, index)`
    engine.fake.hold_after = 3                          every sequence stops there until `release()`
    engine.fake.failures[2] = "..."                     a sequence fails when it has 2 tokens
    engine.fake.aborted                                 numbers of requests that were aborted
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

from quire.config import EngineConfig, EngineOptions, resolve
from quire.engine_client import AsyncEngineClient, TokenDelta
from quire.errors import EngineDeadError
from quire.interfaces.async_llm import AsyncLLM
from quire.messages import EngineReady, EngineRequest, TokenLogprobs
from quire.renderer import Renderer

END = "<|end|>"
SPECIALS = (END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
FIRST_SPECIAL = 256
VOCAB_SIZE = FIRST_SPECIAL + len(SPECIALS)
_TEMPLATE = (
    "{%- for message in messages -%}<|{{ message.role }}|>{{ message.content }}"
    "{%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif -%}"
    "{%- if not (loop.last and continue_final_message) %}<|end|>{% endif -%}{%- endfor -%}"
    "{%- if tools %}[{{ tools | length }} tools]{% endif -%}"
    "{%- if mood %}[{{ mood }}]{% endif -%}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif -%}"
)


def write_byte_checkpoint(
    folder: Path, *, max_model_len: int = 512, generation_config: dict[str, Any] | None = None
) -> Path:
    """A folder with a tokenizer of one token a byte, a chat template and a config.json, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_tokenizer_json())
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": max_model_len,
        "eos_token_id": FIRST_SPECIAL,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE, "eos_token": END}))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return folder


@functools.cache
def _tokenizer_json() -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = _byte_letters()
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return str(tokenizer.to_str())


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (chr(256 + number) for number in range(256))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


def default_reply(request: EngineRequest, index: int) -> str:
    """Depends on everything that a test may want to see in an answer."""
    return f"Answer {index} to {len(request.prompt_token_ids)} tokens: gr\u00fc\u00dfe \U0001f600 to all."


class FakeEngineClient:
    """Stands where AsyncEngineClient stands."""

    def __init__(self, config: EngineConfig) -> None:
        self.ready = EngineReady(
            max_model_len=config.max_model_len, max_num_seqs=8, num_blocks=64, block_size=16, report=["a fake engine"]
        )
        self.failure: str | None = None
        self.reply_to: Callable[[EngineRequest, int], str] = default_reply
        self.failures: dict[int, str] = {}
        self.refusal: str | None = None
        self.hold_after: int | None = None
        self.requests: list[EngineRequest] = []
        self.aborted: list[int] = []
        self.dropped: list[tuple[int, int]] = []
        self.running: set[int] = set()
        self.changed = asyncio.Event()
        self._released = asyncio.Event()

    @property
    def num_open(self) -> int:
        return len(self.running)

    def is_open(self, request_id: int) -> bool:
        return request_id in self.running

    async def wait_ready(self) -> EngineReady:
        return self.ready

    def release(self) -> None:
        self._released.set()

    def die(self, reason: str) -> None:
        """As if the engine's process were gone."""
        self.failure = reason
        self._released.set()

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenDelta]:
        number, n = request.request_id, request.sampling.n
        self.requests.append(request)
        self.running.add(number)
        self.changed.set()
        is_complete = False
        try:
            if self.refusal is not None:
                yield TokenDelta(index=0, finish_reason="error", error=self.refusal)
            answers = [self._tokens(request, index) for index in range(n)]
            count = request.sampling.prompt_logprobs
            if count is not None and len(request.prompt_token_ids) > 1:
                scores = [self._scores(token, count) for token in request.prompt_token_ids[1:]]
                yield TokenDelta(index=0, prompt_logprobs=scores)
            for position in range(max(len(tokens) for tokens, _ in answers)):
                if position == self.hold_after:
                    await self._released.wait()
                await asyncio.sleep(0)
                if self.failure is not None:
                    raise EngineDeadError(self.failure)
                for index, (tokens, reason) in enumerate(answers):
                    if position < len(tokens) and (number, index) not in self.dropped:
                        yield self._delta(request, index, position, tokens, reason)
            is_complete = True
        finally:
            self.running.discard(number)
            if not is_complete:
                self.aborted.append(number)
            self.changed.set()

    def _tokens(self, request: EngineRequest, index: int) -> tuple[list[int], str]:
        tokens = [*self.reply_to(request, index).encode(), *request.eos_token_ids[:1]]
        limit = request.sampling.max_tokens or 16
        while request.sampling.ignore_eos and len(tokens) < limit:
            tokens += tokens
        return (tokens, "stop") if len(tokens) <= limit else (tokens[:limit], "length")

    def _delta(self, request: EngineRequest, index: int, position: int, tokens: list[int], reason: str) -> TokenDelta:
        if position in self.failures:
            return TokenDelta(index=index, num_cached_tokens=0, finish_reason="error", error=self.failures[position])
        is_last = position == len(tokens) - 1
        count = request.sampling.logprobs
        return TokenDelta(
            index=index,
            token_ids=[tokens[position]],
            logprobs=None if count is None else [self._scores(tokens[position], count)],
            num_cached_tokens=len(request.prompt_token_ids) // 2 if (index, position) == (0, 0) else None,
            finish_reason=reason if is_last else None,
        )

    @staticmethod
    def _scores(token: int, count: int) -> TokenLogprobs:
        """The chosen token is the best one; its neighbours follow."""
        ids = [(token + step) % 256 if step else token for step in range(max(1, count))]
        return TokenLogprobs(ids, [-0.5 - step for step in range(len(ids))], [1 + step for step in range(len(ids))])

    def abort(self, request_id: int, index: int | None = None) -> None:
        self.dropped.append((request_id, index or 0))

    async def control(self, name: str, args: dict[str, Any] | None = None) -> Any:
        if self.failure is not None:
            raise EngineDeadError(self.failure)
        assert name == "statistics"
        return {
            "num_requests_running": len(self.running),
            "num_blocks": 64,
            "num_blocks_held": 16,
            "new_thing_total": 3,
        }

    def statistics(self) -> dict[str, float]:
        return {"requests_open": float(len(self.running))}

    def close(self) -> None:
        self._released.set()


class FakeAsyncLLM(AsyncLLM):
    """An AsyncLLM whose script is at hand."""

    fake: FakeEngineClient


def unstarted_engine(folder: Path, **checkpoint: Any) -> FakeAsyncLLM:
    """Not started yet. `checkpoint`: max_model_len, generation_config."""
    write_byte_checkpoint(folder, **checkpoint)
    config, _ = resolve(EngineOptions(model=str(folder), served_model_name="byte-model", device="cpu"))
    client = FakeEngineClient(config)
    engine = FakeAsyncLLM.from_config(
        config, renderer=Renderer.from_config(config), client=cast(AsyncEngineClient, client)
    )
    assert isinstance(engine, FakeAsyncLLM)
    engine.fake = client
    return engine


async def fake_engine(folder: Path, **checkpoint: Any) -> FakeAsyncLLM:
    """Started and ready."""
    engine = unstarted_engine(folder, **checkpoint)
    await engine.start()
    return engine
