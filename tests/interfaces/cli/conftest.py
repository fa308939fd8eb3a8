"""An engine for commands: it answers at once, with what the test says."""

import os
import signal
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from quire.beam_search_params import BeamSearchParams
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams


class FakeRenderer:
    def render_prompt(self, chat):
        text = chat if isinstance(chat, str) else "".join(f"<{m['role']}>{m['content']}" for m in chat)
        return SimpleNamespace(token_ids=[ord(letter) for letter in text], text=text)


class FakeEngine:
    """Answers a prompt with `pieces`; remembers what it was asked."""

    def __init__(self, options):
        self.options = options
        self.renderer = FakeRenderer()
        self.config = SimpleNamespace(served_model_name="fake", facts=SimpleNamespace(vocab_size=100))
        self.pieces = ["Hel", "lo."]
        self.prompts = []
        self.sampling = []
        self.num_open = self.max_open = 0
        self.interrupt_after: int | None = None
        self.error: Exception | None = None

    def get_default_sampling_params(self):
        return SamplingParams(temperature=0.25)

    async def generate(self, prompt, sampling, delta=False, in_bursts=False):
        self.prompts.append(prompt)
        self.sampling.append(sampling)
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            if self.error is not None:
                raise self.error
            token_ids = prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt.token_ids
            is_beams = isinstance(sampling, BeamSearchParams)
            sums = [-2.0 * (index + 1) if is_beams else None for index in range(sampling.n)]
            whole = [CompletionOutput(index=index, cumulative_logprob=sums[index]) for index in range(sampling.n)]
            for number, piece in enumerate(self.pieces):
                if number == self.interrupt_after:
                    os.kill(os.getpid(), signal.SIGINT)
                    await _forever()
                for answer in whole:
                    answer.text += piece
                    answer.token_ids.append(number)
                    answer.finish_reason = "stop" if number == len(self.pieces) - 1 else None
                new = [CompletionOutput(0, piece, [number], finish_reason=whole[0].finish_reason)]
                yield RequestOutput("0", None, token_ids, new if delta else whole)
        finally:
            self.num_open -= 1


async def _forever():
    import asyncio

    await asyncio.Event().wait()


@pytest.fixture
def engine(monkeypatch):
    """The engine that the next command opens; `engine.is_open` tells whether it still has it."""
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "warning")
    fake = FakeEngine({})
    fake.is_open = fake.was_opened = False

    @asynccontextmanager
    async def open_engine(options):
        fake.options = options
        fake.is_open = fake.was_opened = True
        try:
            yield fake
        finally:
            fake.is_open = False

    for command in ("generate", "chat", "bench"):
        monkeypatch.setattr(f"quire.interfaces.cli.{command}.open_engine", open_engine)
    return fake
