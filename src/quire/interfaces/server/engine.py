"""What the server needs of an engine: `AsyncLLM` has it, and so have the fakes of the tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from quire.beam_search_params import GenerationParams
from quire.config import EngineConfig
from quire.interfaces.adapters import Adapter
from quire.interfaces.generation import Generation, OutputObserver
from quire.interfaces.memory_account import MemoryAccount
from quire.interfaces.pinned_prefixes import PinnedPrefix
from quire.interfaces.session import AsyncSession
from quire.interfaces.setup import default_sampling_params
from quire.messages import EngineReady, Tenancy
from quire.observability.recorded import Recording
from quire.outputs import EmbeddingRequestOutput
from quire.pooling_params import PoolingParams
from quire.renderer import RenderedPrompt, Renderer
from quire.sampling_params import SamplingParams


class ServedEngine(Protocol):
    """Tokens in, differences out as they come."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def renderer(self) -> Renderer: ...

    @property
    def ready(self) -> EngineReady: ...

    @property
    def dead_reason(self) -> str | None: ...

    async def prepare(
        self,
        prompt: list[int] | RenderedPrompt,
        sampling_params: GenerationParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        tenant: Tenancy | None = None,
        lora_request: Adapter | None = None,
    ) -> Any:
        """Checks a request without starting it; raises RequestError. The result is given to `open_all`."""

    async def receive(
        self,
        pieces: AsyncIterator[str | list[int]],
        sampling_params: GenerationParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
        tenant: Tenancy | None = None,
        lora_request: Adapter | None = None,
    ) -> Any:
        """The same for a prompt that arrives in pieces, when it has arrived: it runs, and has `aclose`."""

    async def open_all(self, prepared: Sequence[Any], observer: OutputObserver) -> Generation:
        """Starts prepared requests. Closing it aborts them."""

    async def embed(
        self,
        prompt: list[int],
        pooling_params: PoolingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        tenant: Tenancy | None = None,
        on_start: Callable[[int], None] = ...,
    ) -> EmbeddingRequestOutput:
        """A vector; cancelling aborts. `on_start` is called with the number of tokens that were there already."""

    async def pin_prefix(self, prompt: Any, name: str | None = None, *, cache_salt: str = "") -> PinnedPrefix: ...

    async def unpin_prefix(self, name: str) -> None: ...

    async def pinned_prefixes(self) -> list[PinnedPrefix]: ...

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> Adapter: ...

    async def unload_adapter(self, name: str) -> Adapter: ...

    async def adapters(self) -> list[Adapter]: ...

    async def find_adapter(self, name: str) -> Adapter | None: ...

    async def memory(self) -> MemoryAccount: ...

    async def statistics(self) -> dict[str, float]: ...

    def client_statistics(self) -> dict[str, float]:
        """Of this process alone, without asking the engine."""

    async def open_session(
        self, name: str | None = None, *, cache_salt: str = "", tenant: Tenancy | None = None
    ) -> AsyncSession: ...

    async def control(self, name: str, args: dict[str, Any] | None = None) -> Any:
        """A management operation of the core."""

    async def recording(self) -> Recording: ...


def generation_defaults(config: EngineConfig) -> dict[str, Any]:
    """What the model's authors recommend, as far as it differs from SamplingParams' own defaults."""
    recommended = default_sampling_params(config)
    plain = SamplingParams()
    return {
        name: getattr(recommended, name)
        for name in recommended.__struct_fields__
        if getattr(recommended, name) != getattr(plain, name)
    }
