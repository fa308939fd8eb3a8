"""LLM and AsyncLLM over a fake core: the whole front end, with the embedded model's tokenizer and no model."""

from __future__ import annotations

from functools import cache
from typing import Any

from quire.config import EngineConfig, EngineOptions, resolve
from quire.engine_client import AsyncEngineClient, Link, open_link
from quire.interfaces.async_llm import AsyncLLM
from quire.interfaces.llm import LLM
from quire.renderer import Renderer

FAKE_CORE = "quire.testing.fake_core:build"


def fake_config(**options: Any) -> EngineConfig:
    return resolve(EngineOptions(**options))[0]


@cache
def fake_renderer() -> Renderer:
    """One for all: it is never changed, and reading a tokenizer takes a while."""
    return Renderer.from_config(fake_config())


def fake_link(*, own_process: bool, core: str = FAKE_CORE, **options: Any) -> Link:
    return open_link(fake_config(**options), in_own_process=own_process, core=core)


def fake_llm(*, own_process: bool = False, core: str = FAKE_CORE, **options: Any) -> LLM:
    client = AsyncEngineClient(fake_link(own_process=own_process, core=core, **options))
    return LLM.from_parts(fake_config(**options), fake_renderer(), client)


def fake_async_llm(*, own_process: bool = False, core: str = FAKE_CORE, **options: Any) -> AsyncLLM:
    client = AsyncEngineClient(fake_link(own_process=own_process, core=core, **options))
    return AsyncLLM.from_config(fake_config(**options), renderer=fake_renderer(), client=client)
