"""Calls the renderer without stopping the event loop: a long text takes long to become tokens."""

from __future__ import annotations

import asyncio
from typing import Any

from quire.renderer import RenderedPrompt, Renderer

# Up to here rendering takes less than a hand-over to a thread.
_MAX_INLINE_CHARACTERS = 2_000


def _size(chat: str | list[dict[str, Any]]) -> int:
    if isinstance(chat, str):
        return len(chat)
    return sum(len(message.get("content", "")) + 10 for message in chat)


async def render(renderer: Renderer, chat: str | list[dict[str, Any]], **options: Any) -> RenderedPrompt:
    """`Renderer.render_prompt`, in a thread if the text is long."""
    if _size(chat) <= _MAX_INLINE_CHARACTERS and not options.get("tools"):
        return renderer.render_prompt(chat, **options)
    return await asyncio.to_thread(renderer.render_prompt, chat, **options)
