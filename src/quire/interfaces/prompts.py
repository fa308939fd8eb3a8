"""The forms in which a prompt may be given to LLM and AsyncLLM, brought into one."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from quire.errors import RequestError, suggestion
from quire.renderer import RenderedPrompt
from quire.renderer.image_parts import NOTHING_FETCHED

if TYPE_CHECKING:
    from quire.renderer import Renderer

# a text, {"prompt": text}, {"prompt_token_ids": ids}, {"prompt_embeds": vectors}, or ids themselves; a mapping may also
# hold "cache_salt"
Prompt: TypeAlias = "str | Mapping[str, Any] | Sequence[int]"
_FORMS = 'a text, {"prompt": text}, {"prompt_token_ids": [ids]} or a list of token ids'
_CHAT_HINT = " Messages of a chat are rendered first: render_prompt(messages) of the renderer; or call LLM.chat."
_LIST_HINT = " Several prompts are a list: list(prompts)."
_ITERATOR_HINT = (
    " A prompt that arrives in pieces is an asynchronous iterator, and given to AsyncLLM's generate, stream or receive."
)
_VECTORS = "prompt_embeds"
_KEYS = ("prompt", "prompt_token_ids", _VECTORS)
_SALT = "cache_salt"
_MEDIA = "multi_modal_data"
_T = TypeVar("_T")


def text_of(prompt: object) -> str | None:
    """The text that must be tokenised, or None where the prompt is tokens already. Keys of a mapping are checked."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Mapping):
        return None
    _check_keys(prompt)
    return str(prompt["prompt"]) if isinstance(prompt.get("prompt"), str) else None


def render(
    prompt: Any, renderer: Renderer, max_tokens: int, fetched: Mapping[str, bytes] = NOTHING_FETCHED
) -> RenderedPrompt:
    """A prompt in any form, also one that was rendered before. `text` is that of the user, if there is one.

    A text that cannot be max_tokens or fewer is refused before it is tokenised. `fetched`: by URLs of its images.
    """
    if isinstance(prompt, RenderedPrompt):
        return prompt
    text = text_of(prompt)
    if text is not None:
        rendered = renderer.render_prompt(
            text,
            max_tokens=max_tokens,
            images=images_of(prompt),
            videos=videos_of(prompt),
            fetched=fetched,
            sound=sound_of(prompt),
        )
        rendered.text = text
        return rendered
    prompt = _as_plain(prompt)
    if isinstance(prompt, Mapping):
        if _VECTORS in prompt:
            return renderer.render_vectors(prompt[_VECTORS], max_tokens)
        if "prompt_token_ids" in prompt:
            ids = _ids(prompt["prompt_token_ids"])
            return renderer.render_tokens(
                ids, images_of(prompt), max_tokens, fetched, sound_of(prompt), videos_of(prompt)
            )
    elif is_token_ids(prompt) or (isinstance(prompt, list | tuple) and not prompt):
        return RenderedPrompt(list(prompt))
    hint = _LIST_HINT if isinstance(prompt, Iterator) else ""
    hint += _ITERATOR_HINT if isinstance(prompt, AsyncIterable | Iterator) else ""
    raise RequestError(f"prompt={_short(prompt)}: must be {_FORMS}.{hint}", param="prompt")


def are_vectors(prompt: object) -> bool:
    """To be checked beside the event loop."""
    return isinstance(prompt, Mapping) and _VECTORS in prompt


def images_of(prompt: object) -> list[Any]:
    """{"multi_modal_data": {"image": one or a list}}, in the order of their placeholders."""
    images = _media_of(prompt).get("image")
    if images is None:
        return []
    return list(images) if isinstance(images, list | tuple) else [images]


def videos_of(prompt: object) -> list[Any]:
    """{"multi_modal_data": {"video": one or a list}}. A list of images, or of arrays of three dimensions, is one."""
    videos = _media_of(prompt).get("video")
    if videos is None:
        return []
    if not isinstance(videos, list) or (videos and _is_frame(videos[0])):
        return [videos]
    return list(videos)


def _is_frame(value: object) -> bool:
    return hasattr(value, "getbands") or len(getattr(value, "shape", ())) == 3


def sound_of(prompt: object) -> Any:
    """{"multi_modal_data": {"audio": one}}, which stands before the text; None: there is none."""
    sound = _media_of(prompt).get("audio")
    if isinstance(sound, list) and len(sound) == 1:
        sound = sound[0]
    if isinstance(sound, list):
        raise RequestError(f"{_MEDIA}: audio={len(sound)} sounds; a prompt has one.", param=_MEDIA)
    return sound


def _media_of(prompt: object) -> Mapping[str, Any]:
    data = prompt.get(_MEDIA) if isinstance(prompt, Mapping) else None
    if data is None:
        return {}
    if not isinstance(data, Mapping) or any(key not in ("image", "video", "audio") for key in data):
        raise RequestError(
            f'{_MEDIA}: must be {{"image": IMAGE or a list of them, "video": VIDEO or a list of them}} or '
            '{"audio": SOUND}; nothing else is read.',
            param=_MEDIA,
        )
    return data


def salt_of(prompt: object, asked: str | None = None) -> Any:
    """The cache_salt that comes with a prompt, or else the one that was asked for beside it."""
    salt = prompt.get(_SALT) if isinstance(prompt, Mapping) else None
    if salt is None:
        return asked
    if asked not in (None, salt):
        raise RequestError(
            f"{_SALT}={asked!r}: the prompt has {_SALT}={_short(salt)}, and a request has one. Give one of them.",
            param=_SALT,
        )
    return salt


def check_unsalted(prompt: object, why: str) -> None:
    """For prompts that belong to something that has a salt of its own."""
    if isinstance(prompt, Mapping) and _SALT in prompt:
        raise RequestError(f"{_SALT}={_short(prompt[_SALT])}: {why}", param=_SALT)


def check_no_media(media: list[Any], what: str) -> None:
    """For prompts that are named by their tokens alone."""
    if not media:
        return
    name, things = (_VECTORS, "vectors") if media[0].is_vectors else (_MEDIA, "images and videos")
    raise RequestError(f"{name}: {what} takes text only. Leave the {things} out, or ask with generate.", param=name)


def as_list(prompts: object) -> list[object]:
    """Many prompts, or the one that was given, as a list."""
    prompts = _as_plain(prompts)
    if isinstance(prompts, list | tuple) and not is_token_ids(prompts):
        return list(prompts)
    return [prompts]


def each_of(given: _T | Sequence[_T], count: int, name: str) -> Sequence[_T]:
    """One for each of `count` prompts: those that were given, or the same for all."""
    many = _as_plain(given)
    if not isinstance(many, Sequence) or isinstance(many, str | bytes):
        return [many] * count  # type: ignore[list-item]
    if len(many) != count:
        what = "1 prompt" if count == 1 else f"{count} prompts"
        raise RequestError(
            f"{name}: {len(many)} given for {what}. Give one for all, or one for each.",
            param=name,
        )
    return many


def is_token_ids(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Integral)


def _as_plain(value: object) -> Any:
    """Arrays of numpy and tensors as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _ids(value: object) -> list[int]:
    value = _as_plain(value)
    if isinstance(value, list | tuple):
        return list(value)
    raise RequestError(f"prompt_token_ids={_short(value)}: must be a list of token ids.", param="prompt")


def _check_keys(prompt: Mapping[str, Any]) -> None:
    known = (*_KEYS, _SALT, _MEDIA)
    for key in prompt:
        if key not in known:
            hint = _CHAT_HINT if key in ("role", "content") else suggestion(str(key), known)
            raise RequestError(
                f"prompt: {key!r} is not supported, only {', '.join(known[:-1])} and {known[-1]} are.{hint}",
                param="prompt",
            )
    given = [key for key in _KEYS if key in prompt]
    if len(given) > 1:
        raise RequestError(f"prompt: both {' and '.join(given)} are given. Give one of them.", param="prompt")
    if _VECTORS in prompt and prompt.get(_MEDIA) is not None:
        raise RequestError(f"{_MEDIA}: not with {_VECTORS}, which are all of the prompt. Leave one out.", param=_MEDIA)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
