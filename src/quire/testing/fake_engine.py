"""An AsyncLLM without a model: real renderer, real checks, real client, real assembly of text; the core is a script.

Tokens are bytes, so that texts, characters cut in two and counts can be foreseen in a test.

    engine = await fake_engine(tmp_path)                answers with `reply_to(request, index)`
    engine.fake.hold(3)                                 every sequence stops there until `release()`
    engine.fake.failures[2] = "..."                     a sequence fails when it has 2 tokens
    engine.fake.aborted                                 numbers of requests that were aborted
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quire.config import EngineConfig, EngineOptions, resolve
from quire.engine_client import AsyncEngineClient
from quire.engine_client.replica_link import Loss
from quire.engine_core.driver import CoreDriver
from quire.errors import EngineDeadError
from quire.hooks import Hook
from quire.interfaces.async_llm import AsyncLLM
from quire.interfaces.hooks.guarded_client import open_client
from quire.interfaces.hooks.loading import hooks_of
from quire.messages import (
    AbortRequests,
    EngineFailed,
    EngineRequest,
    SequenceEnd,
    ToClient,
    ToCore,
    split_sequence_id,
)
from quire.renderer import Renderer
from quire.testing.fake_core import FakeCore, FakeSequence

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
    folder: Path, *, max_model_len: int = 512, generation_config: dict[str, Any] | None = None, **config_keys: Any
) -> Path:
    """A folder with a tokenizer of one token a byte, a chat template and a config.json, without weights.
    `config_keys`: what config.json says otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_tokenizer_json())
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": max_model_len,
        "eos_token_id": FIRST_SPECIAL,
        "dtype": "float32",
        **config_keys,
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


class ScriptedSequence(FakeSequence):
    """Says a text, byte by byte, and ends as its length allows."""

    def __init__(
        self,
        request: EngineRequest,
        index: int,
        max_model_len: int,
        reply_to: Callable[[EngineRequest, int], str],
    ) -> None:
        super().__init__(request, index, max_model_len)
        self._reply_to = reply_to
        self._reason = "stop"

    @functools.cached_property
    def _tokens(self) -> list[int]:
        """Asked for when the prompt is whole."""
        request = self.request
        tokens = [*self._reply_to(request, self.index).encode(), *request.eos_token_ids[:1]]
        limit = request.sampling.max_tokens or 16
        while request.sampling.ignore_eos and len(tokens) < limit:
            tokens += tokens
        self._reason = "stop" if len(tokens) <= limit else "length"
        return tokens[:limit]

    @property
    def num_cached_tokens(self) -> int:
        return len(self.request.prompt_token_ids) // 2 if self.index == 0 else 0

    def next_token(self, vocab_size: int) -> int:
        return self._tokens[len(self.token_ids)]

    def end(self, token_id: int) -> SequenceEnd | None:
        is_last = len(self.token_ids) == len(self._tokens)
        return SequenceEnd(self.sequence_id, self._reason) if is_last else None


class ScriptedLink:
    """A link to a fake core that steps on the event loop: no thread, so a test may look at both at any time.

    A bell that the loop hears stands for one step. It is rung for the next one after those were woken who read what
    this one brought, so what a test sees is not merged.
    """

    processes = ()

    def __init__(self, config: EngineConfig) -> None:
        self.reply_to: Callable[[EngineRequest, int], str] = default_reply
        self.requests: list[EngineRequest] = []
        # requests that were aborted while they ran, and (request, index) of sequences that ended early
        self.aborted: list[int] = []
        self.dropped: list[tuple[int, int]] = []
        self.changed = asyncio.Event()
        self.core = FakeCore(
            vocab_size=VOCAB_SIZE,
            max_model_len=config.max_model_len,
            max_num_seqs=8,
            make_sequence=self._make_sequence,
        )
        self._driver = CoreDriver(self.core)
        self._failure: EngineFailed | None = None
        self._bell_in, self._bell_out = socket.socketpair()
        self._bell_in.setblocking(False)
        self._bell_out.setblocking(False)

    # ------------------------------------------------------------------------------------------ for a test

    @property
    def running(self) -> set[int]:
        return self.core.running

    @property
    def failures(self) -> dict[int, str]:
        return self.core.failures

    def hold(self, num_tokens: int) -> None:
        """Every sequence stops when it has so many tokens, until `release`."""
        self.core.hold_at = num_tokens

    def release(self) -> None:
        self.core.hold_at = math.inf
        self._ring()

    def die(self, reason: str) -> None:
        """As if the engine's process were gone."""
        self._failure = EngineFailed(kind=EngineDeadError.__name__, error=reason)
        self._ring()

    # ------------------------------------------------------------------------------------------ for the client

    def send(self, *messages: ToCore) -> None:
        for message in messages:
            if isinstance(message, EngineRequest):
                self.requests.append(message)
            elif isinstance(message, AbortRequests):
                self.aborted += [number for number in message.request_ids if number in self.running]
                self.dropped += [split_sequence_id(sequence_id) for sequence_id in message.sequence_ids]
            self._driver.handle(message)
        self.changed.set()
        self._ring()

    def receive(self, timeout: float | None = None) -> list[ToClient]:
        if self._failure is not None:
            return [self._failure]
        if self._has_rung():
            self._driver.step()
            self.changed.set()
            if self._driver.has_work:
                asyncio.get_running_loop().call_soon(self._ring)
        return self._driver.take()

    def keep_back_while(self, is_patient: Callable[[], bool]) -> None: ...

    def watch_losses(self, tell: Callable[[Loss], None]) -> None: ...

    def descriptors(self) -> tuple[int, ...]:
        return (self._bell_out.fileno(),)

    def statistics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._driver.shutdown()
        self._bell_in.close()
        self._bell_out.close()

    def _make_sequence(self, request: EngineRequest, index: int, max_model_len: int) -> ScriptedSequence:
        return ScriptedSequence(request, index, max_model_len, self.reply_to)

    def _ring(self) -> None:
        # OSError: the link was closed meanwhile
        with contextlib.suppress(OSError):
            self._bell_in.send(b"!")

    def _has_rung(self) -> bool:
        try:
            return bool(self._bell_out.recv(4096))
        except BlockingIOError:
            return False


class FakeAsyncLLM(AsyncLLM):
    """An AsyncLLM whose script is at hand."""

    fake: ScriptedLink


def unstarted_engine(folder: Path, hooks: Sequence[Hook] = (), **checkpoint: Any) -> FakeAsyncLLM:
    """Not started yet. `checkpoint`: as of `write_byte_checkpoint`."""
    write_byte_checkpoint(folder, **checkpoint)
    config, _ = resolve(EngineOptions(model=str(folder), served_model_name=("byte-model",), device="cpu"))
    link = ScriptedLink(config)
    made = hooks_of(config, hooks)
    renderer = Renderer.from_config(config)
    engine = FakeAsyncLLM.from_config(config, renderer=renderer, client=open_client(link, made), hooks=made)
    assert isinstance(engine, FakeAsyncLLM)
    engine.fake = link

    def connect_again(config: EngineConfig) -> AsyncEngineClient:
        """A new script in the place of one that has died; it says what the old one said."""
        again = ScriptedLink(config)
        again.reply_to = engine.fake.reply_to
        engine.fake = again
        return open_client(again, made)

    engine._connect = connect_again
    return engine


async def fake_engine(folder: Path, hooks: Sequence[Hook] = (), **checkpoint: Any) -> FakeAsyncLLM:
    """Started and ready."""
    engine = unstarted_engine(folder, hooks, **checkpoint)
    await engine.start()
    return engine
