"""What a hook may ask of the engine, from its own thread: requests like any other."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from quire.errors import RequestError
from quire.interfaces.adapters import Adapter
from quire.interfaces.engine_calls import EngineCalls
from quire.interfaces.hooks.unhooked import unhooked
from quire.interfaces.requests import PreparedRequest
from quire.outputs import EmbeddingRequestOutput, RequestOutput
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams

_T = TypeVar("_T")


class AskedEngine(EngineCalls, Protocol):
    """As much of an AsyncLLM as it needs."""

    async def embed(
        self, prompt: Any, pooling_params: PoolingParams | None, *, lora_request: Adapter | None
    ) -> EmbeddingRequestOutput: ...
    async def prepare(
        self, prompt: Any, sampling_params: SamplingParams | None, *, lora_request: Adapter | None
    ) -> PreparedRequest: ...
    async def find_adapter(self, name: str) -> Adapter | None: ...


class EngineOfHooks:
    def __init__(self, engine: AskedEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop

    def embed(
        self, prompts: Sequence[str | Sequence[int]], pooling: str | None = None, adapter: str | None = None
    ) -> list[list[float]]:
        params = PoolingParams(pooling=pooling)

        async def all_of_them() -> list[EmbeddingRequestOutput]:
            lora = await self._adapter(adapter)
            each = (self._engine.embed(_prompt(one), params, lora_request=lora) for one in prompts)
            return await asyncio.gather(*each)

        return [output.outputs.embedding for output in self._wait(all_of_them())]

    def generate(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None, adapter: str | None = None
    ) -> str:
        async def whole() -> RequestOutput:
            lora = await self._adapter(adapter)
            prepared = await self._engine.prepare(_prompt(prompt), sampling, lora_request=lora)
            return await self._engine.compute(prepared.request)

        return self._wait(whole()).outputs[0].text

    async def _adapter(self, name: str | None) -> Adapter | None:
        if name is None:
            return None
        found = await self._engine.find_adapter(name)
        if found is None:
            raise RequestError(f"adapter={name!r}: none of this name is loaded.", param="adapter")
        return found

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        with unhooked():
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result()


def _prompt(prompt: str | Sequence[int]) -> Any:
    return prompt if isinstance(prompt, str) else {"prompt_token_ids": list(prompt)}
