"""What a request with structured_outputs needs before it starts: its form is checked, and the worker knows the tokens.

Owns the process that checks forms (`quire.structured_output.checker`). Called by LLM and AsyncLLM for every request;
one that asks for no form pays a look at a field.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from quire.beam_search_params import GenerationParams
from quire.errors import RequestError
from quire.interfaces.engine_calls import EngineCalls, control

if TYPE_CHECKING:
    from quire.renderer import Renderer
    from quire.structured_output.checker import Checker
    from quire.structured_output.vocabulary import Vocabulary

# seconds between two looks at a form that is being compiled; mostly it is done at the first
_PAUSE = 0.001

_STATISTICS = (
    "num_compiled_grammars",
    "compiled_grammar_bytes",
    "num_grammar_compilations_total",
    "grammar_compile_seconds_total",
)


class StructuredOutputs:
    """Of one engine."""

    def __init__(self, renderer: Renderer, vocab_size: int) -> None:
        self._renderer = renderer
        self._vocab_size = vocab_size
        self._checker: Checker | None = None
        self._is_told = False

    def engine_was_replaced(self) -> None:
        """The new one knows neither the tokens nor any form."""
        self.close()
        self._checker = None
        self._is_told = False

    async def check(self, engine: EngineCalls, params: GenerationParams) -> None:
        """Raises RequestError for a form that is none, or that this model cannot have."""
        if getattr(params, "structured_outputs", None) is None:
            return
        # as the request will have it: the user may have set it later
        asked = params.replace().structured_outputs
        assert asked is not None
        if self._checker is None:
            _check_library()
            from quire.structured_output.checker import Checker

            self._checker = Checker(self._vocabulary)
        # one that is known does not wait behind others that are slow to compile
        is_new = not self._checker.is_known(asked) and await engine.in_form_thread(self._checker.check, asked)
        if not self._is_told:
            await self._tell(engine)
            self._is_told = True
        # Compiled before the request is scheduled: a step would wait for it, and everybody with it.
        form = msgspec.msgpack.encode(asked)
        while is_new and not await control(engine, "worker.prepare_form", form=form):
            await asyncio.sleep(_PAUSE)

    async def tell_again(self, engine: EngineCalls) -> None:
        """An engine that has joined others learns what they know."""
        if self._is_told:
            await self._tell(engine)

    async def _tell(self, engine: EngineCalls) -> None:
        vocabulary = await engine.in_form_thread(self._vocabulary)
        await control(engine, "worker.open_vocabulary", vocabulary=msgspec.msgpack.encode(vocabulary))

    async def statistics(self, engine: EngineCalls) -> dict[str, float]:
        """Of the grammars. The worker, which answers between two steps, is asked only when it has been given some."""
        worker = await control(engine, "worker.statistics") if self._is_told else {}
        return {name: worker.get(name, 0.0) for name in _STATISTICS}

    def close(self) -> None:
        if self._checker is not None:
            self._checker.close()

    def _vocabulary(self) -> Vocabulary:
        from quire.structured_output.vocabulary import Vocabulary

        renderer = self._renderer
        tokens, special = renderer.token_table(self._vocab_size)
        vocabulary = Vocabulary.of(tokens, special, renderer.eos_token_ids)
        if not vocabulary.end_ids:
            raise _impossible("it names no token that ends an output")
        return vocabulary


def _check_library() -> None:
    from importlib.util import find_spec

    if find_spec("llguidance") is None:
        raise _impossible("the package llguidance is not installed; pip install llguidance")


def _impossible(why: str) -> RequestError:
    return RequestError(
        f"structured_outputs: this model cannot have them: {why}. Leave them out.", param="structured_outputs"
    )
