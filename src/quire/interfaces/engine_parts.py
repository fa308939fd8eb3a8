"""What stands between the callers of an AsyncLLM and its engine, from the engine's first start on.

Owns what must outlive an engine that died: the numbers of requests, the names of what is pinned, the conversations.
Owns no link: the steps that bring a new engine to the state of the old one are carried out by the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.config import EngineConfig
from quire.interfaces.embeddings import Embeddings
from quire.interfaces.pinned_prefixes import PinnedPrefixes
from quire.interfaces.session import Conversations
from quire.interfaces.setup import limits_of, request_maker
from quire.interfaces.steps import Steps
from quire.interfaces.structured_outputs import StructuredOutputs
from quire.messages import EngineReady
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.renderer import Renderer


class EngineParts:
    def __init__(self, config: EngineConfig, ready: EngineReady, renderer: Renderer, defaults: SamplingParams) -> None:
        self._config = config
        self._is_new = True
        self.maker = request_maker(config, ready, renderer)
        self.structured = StructuredOutputs(renderer, self.maker.limits.vocab_size)
        self.prefixes = PinnedPrefixes(config, self.maker, renderer)
        self.conversations = Conversations(self.maker, renderer, defaults, self.structured)
        self.embeddings = Embeddings(config, self.maker)

    def engine_was_replaced(self, ready: EngineReady) -> None:
        """A new engine has taken the place of the one that these parts served."""
        # another program may have taken memory meanwhile
        self.maker.limits = limits_of(self._config, ready)
        self.structured.engine_was_replaced()
        self.conversations.engine_was_replaced()

    def furnish(self) -> Steps[None]:
        """Brings a fresh engine to where it was, or to where the configuration wants it."""
        if not self._is_new:
            yield from self.prefixes.pin_again()
        elif self._config.pinned_prefixes is not None:
            yield from self.prefixes.pin_file(self._config.pinned_prefixes)
        self._is_new = False

    def close(self) -> None:
        self.structured.close()
