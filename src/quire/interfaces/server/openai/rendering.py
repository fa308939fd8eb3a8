"""Calls the renderer without stopping the event loop: a long text takes long to become tokens."""

from __future__ import annotations

from typing import Any

from quire.interfaces.server.state import ServerState
from quire.renderer import RenderedPrompt

# Up to here rendering takes less than a hand-over to a thread.
_MAX_INLINE_CHARACTERS = 2_000


def _size(chat: str | list[dict[str, Any]]) -> int:
    if isinstance(chat, str):
        return len(chat)
    return sum(10 + _length(message.get("content")) for message in chat)


def _length(content: Any) -> int:
    """Of a text, or of the texts in its parts."""
    if isinstance(content, str):
        return len(content)
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return sum(10 + sum(len(value) for value in part.values() if isinstance(value, str)) for part in parts)


async def render(state: ServerState, chat: str | list[dict[str, Any]], **options: Any) -> RenderedPrompt:
    """`Renderer.render_prompt`, in a thread if the text is long; what cannot fit into the model is refused first."""
    renderer = state.engine.renderer
    options["max_tokens"] = state.max_model_len
    if _size(chat) <= _MAX_INLINE_CHARACTERS and not options.get("tools"):
        return renderer.render_prompt(chat, **options)
    return await state.text_threads.call(renderer.render_prompt, chat, **options)
