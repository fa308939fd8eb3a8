"""Calls the renderer beside the event loop: long texts take long to become tokens, and the other way round."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quire.interfaces.server.openai.requests import ChatRequest, TokenizeRequest
from quire.interfaces.server.served_model import ServedModel
from quire.interfaces.server.wire.errors import invalid, invalid_at_vllm
from quire.renderer import NotBriefError, RenderedPrompt, Renderer
from quire.renderer.fill_in_middle import middle_marks

# Up to here rendering takes less than a hand-over to a thread.
_MAX_INLINE_CHARACTERS = 2_000
_MAX_INLINE_TOKENS = 4_000


LEFT, RIGHT = "left", "right"
# a text that is cut may be so many times as long as the model
_MOST_LENGTHS = 8
# characters of one text that goes with several others, counted with each of them: as in the longest body
_MOST_REPEATED = 2**23


@dataclass(frozen=True)
class Cut:
    """How much of a prompt counts: `length` tokens of its end, or of its beginning. None: all of it."""

    length: int | None = None
    side: str = LEFT

    @classmethod
    def asked(cls, length: int | None, side: str | None, limit: int, room: int, *, default: str = LEFT) -> Cut:
        """`limit`: the most that may be asked for. `room`: what -1 stands for."""
        if side not in (None, LEFT, RIGHT):
            raise invalid(f"truncation_side={side[:40]!r}: must be {LEFT} or {RIGHT}.", "truncation_side")
        if length is None:
            return cls()
        if length > limit:
            # its clients compare the whole sentence
            text = "truncate_prompt_tokens value is greater than max_model_len."
            raise invalid_at_vllm(f"{text} Please request a smaller truncation size.", "truncate_prompt_tokens")
        if length < 1 and length != -1:
            text = "must be at least 1, or -1 for as many as the model takes"
            raise invalid(f"truncate_prompt_tokens={length}: {text}.", "truncate_prompt_tokens")
        return cls(max(1, room) if length == -1 else length, side or default)

    def of(self, token_ids: list[int], num_before: int = 0, num_after: int = 0) -> list[int]:
        """The first `num_before` and the last `num_after` stay, where there is room for more than them."""
        if self.length is None or len(token_ids) <= self.length:
            return token_ids
        if self.length <= num_before + num_after:
            return self.of(token_ids)
        room = self.length - num_before - num_after
        end = len(token_ids) - num_after
        start = end - room if self.side == LEFT else num_before
        return [*token_ids[:num_before], *token_ids[start : start + room], *token_ids[end:]]

    def is_needed(self, prompt: RenderedPrompt) -> bool:
        return self.length is not None and len(prompt.token_ids) > self.length

    def rendered(self, prompt: RenderedPrompt, num_before: int = 0, num_after: int = 0) -> RenderedPrompt:
        """Unchanged, or its tokens alone."""
        token_ids = self.of(prompt.token_ids, num_before, num_after)
        if token_ids is prompt.token_ids:
            return prompt
        if prompt.media:
            raise invalid(
                "truncate_prompt_tokens: not with images and videos, which must be whole.", "truncate_prompt_tokens"
            )
        return replace(prompt, token_ids=token_ids)

    def longest(self, limit: int) -> int:
        """Tokens that a text may have before it is cut."""
        return limit if self.length is None else _MOST_LENGTHS * limit


WHOLE = Cut()


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


# How much a model is to think: OpenAI's words for it, and the last one of DeepSeek and Anthropic.
NO_EFFORT = "none"
EFFORTS = (NO_EFFORT, "minimal", "low", "medium", "high", "xhigh", "max")
# Qwen's and most others' name; DeepSeek's and Granite's
_SWITCHES = ("enable_thinking", "thinking")


def thinking_switch(*, is_on: bool) -> dict[str, Any]:
    """Values for the template. One that has no such switch does not look at them."""
    return dict.fromkeys(_SWITCHES, is_on)


def template_kwargs_of(effort: str | None, own: Mapping[str, Any] | None) -> dict[str, Any]:
    """The effort, and whether there is to be any; `own` are the request's values for the template, and win."""
    if effort is None:
        return dict(own or {})
    if effort not in EFFORTS:
        text = f"must be one of {', '.join(EFFORTS)}; what a level means is the model's"
        raise invalid(f"reasoning_effort={effort[:40]!r}: {text}.", "reasoning_effort")
    return {"reasoning_effort": effort, **thinking_switch(is_on=effort != NO_EFFORT), **(own or {})}


async def render(
    model: ServedModel, chat: str | list[dict[str, Any]], *, cut: Cut = WHOLE, **options: Any
) -> RenderedPrompt:
    """`Renderer.render_prompt`, in a thread if the text is long or there are images, which may have to be fetched; what
    cannot fit into the model is refused first, unless it is cut."""
    options["max_tokens"] = cut.longest(model.max_model_len)
    if model.template_kwargs and not isinstance(chat, str):
        options["template_kwargs"] = {**model.template_kwargs, **(options.get("template_kwargs") or {})}
    prompt = await _rendered(model, chat, options)
    if isinstance(chat, str) and options.get("add_special_tokens") is not False and cut.is_needed(prompt):
        # as models were trained on texts that were cut: those that the tokenizer adds are still there
        return cut.rendered(prompt, *map(len, model.renderer.tokens_around))
    return cut.rendered(prompt)


async def _rendered(model: ServedModel, chat: str | list[dict[str, Any]], options: dict[str, Any]) -> RenderedPrompt:
    renderer = model.renderer
    sources = renderer.media_sources(chat)
    if not sources and not options.get("tools") and _is_short(chat, options):
        # a short chat may become a long text, and a template may take long over it
        with contextlib.suppress(NotBriefError):
            return renderer.render_prompt(chat, is_brief=True, **options)
    if sources or renderer.has_vectors(chat):
        return await model.images.call(partial(renderer.render_prompt, chat, **options), sources)
    return await model.text_threads.call(renderer.render_prompt, chat, **options)


async def render_vectors(model: ServedModel, given: str, where: str) -> RenderedPrompt:
    """`Renderer.render_vectors`, in a thread; one prompt at a time, where there is room for it."""
    return await model.images.call(partial(model.renderer.render_vectors, given, model.max_model_len, where))


async def render_pair(model: ServedModel, first: str, second: str) -> RenderedPrompt:
    """`Renderer.render_pair`, in a thread unless the texts are short, of a model whose tokenizer alone pairs them."""
    renderer = model.renderer
    pair = partial(renderer.render_pair, first, second, max_tokens=model.max_model_len)
    if _is_short(first, second) and not renderer.has_pair_template and renderer.has_known_tokenizer:
        return pair()
    return await model.text_threads.call(pair)


def around_a_hole(renderer: Renderer, prompt: str, suffix: str) -> str:
    """What a model is asked that fills in the middle."""
    marks = middle_marks(renderer)
    if marks is None:
        text = "this model knows no tokens for a hole between two texts. Serve one that fills in the middle"
        raise invalid(f"suffix: not supported: {text}.", "suffix")
    return marks.around(prompt, suffix)


def check_repeated(text: str, count: int, name: str, others: str) -> None:
    """Refuses a text by which a small body would become a large one, because each of `count` others goes with it."""
    most = _MOST_REPEATED // count
    if len(text) > most:
        problem = f"{len(text)} characters go with each of {count} {others}, and at most {most} are allowed then"
        raise invalid(f"{name}: {problem}. Send fewer {others} at a time.", name)


async def text_of(model: ServedModel, token_ids: list[int], *, skip_special_tokens: bool) -> str:
    """`Renderer.decode`, in a thread if there are many tokens."""
    decode = model.renderer.decode
    if len(token_ids) <= _MAX_INLINE_TOKENS:
        return decode(token_ids, skip_special_tokens)
    return await model.text_threads.call(decode, token_ids, skip_special_tokens)
