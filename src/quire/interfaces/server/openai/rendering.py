"""Calls the renderer beside the event loop: long texts take long to become tokens, and the other way round."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

from quire.interfaces.server.openai.requests import ChatRequest, TokenizeRequest
from quire.interfaces.server.served_model import ServedModel
from quire.interfaces.server.wire.errors import invalid
from quire.renderer import NotBriefError, RenderedPrompt

# Up to here rendering takes less than a hand-over to a thread.
_MAX_INLINE_CHARACTERS = 2_000
_MAX_INLINE_TOKENS = 4_000


def _is_short(*given: Any) -> bool:
    """Whether the texts have few characters, and there is little beside them. Looks no further than until it knows."""
    left = _MAX_INLINE_CHARACTERS
    values = list(given)
    while values and left >= 0:
        value = values.pop()
        if isinstance(value, str):
            left -= len(value)
        elif isinstance(value, list | dict):
            left -= 10 * len(value)
            if left >= 0:
                values.extend(value.values() if isinstance(value, dict) else value)
    return left >= 0


def opens_answer(body: ChatRequest | TokenizeRequest) -> bool:
    """Whether the template ends with the beginning of a new answer: yes, unless an old one is continued."""
    if not body.continue_final_message:
        return body.add_generation_prompt is not False
    if body.add_generation_prompt:
        raise invalid("continue_final_message: not together with add_generation_prompt.", "continue_final_message")
    return False


async def render(model: ServedModel, chat: str | list[dict[str, Any]], **options: Any) -> RenderedPrompt:
    """`Renderer.render_prompt`, in a thread if the text is long or there are images, which may have to be fetched; what
    cannot fit into the model is refused first."""
    renderer = model.renderer
    options["max_tokens"] = model.max_model_len
    if sources := renderer.image_sources(chat):
        return await model.images.call(partial(renderer.render_prompt, chat, **options), sources)
    if not options.get("tools") and _is_short(chat, options):
        # a short chat may become a long text, and a template may take long over it
        with contextlib.suppress(NotBriefError):
            return renderer.render_prompt(chat, is_brief=True, **options)
    return await model.text_threads.call(renderer.render_prompt, chat, **options)


async def text_of(model: ServedModel, token_ids: list[int], *, skip_special_tokens: bool) -> str:
    """`Renderer.decode`, in a thread if there are many tokens."""
    decode = model.renderer.decode
    if len(token_ids) <= _MAX_INLINE_TOKENS:
        return decode(token_ids, skip_special_tokens)
    return await model.text_threads.call(decode, token_ids, skip_special_tokens)
