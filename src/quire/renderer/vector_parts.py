"""Vectors among the parts of a chat: a letter of private use and a number stand for each while the template runs.

    {"type": "prompt_embeds", "data": base64 of torch.save(tensor)}      in a content, or in the place of a reasoning

A template may move texts and trim them; what it leaves out or writes twice is refused, because nobody could say then
which vectors the model was to see. Called by Renderer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import RequestError
from quire.renderer.quoting import unused_letter

_KIND = "prompt_embeds"
_REASONING = ("reasoning", "reasoning_content")


@dataclass(frozen=True)
class VectorParts:
    """A chat without its vectors; these, each with its place; and the letter beside their numbers."""

    chat: Any
    given: list[tuple[Any, str]]
    letter: str

    def text_of(self, pieces: Sequence[str]) -> str:
        """What there is to read."""
        return re.sub(self._pattern, "", "".join(pieces))

    def placed(
        self, pieces: Sequence[str], encode: Callable[[list[str]], list[int]], encode_next: Callable[[str], list[int]]
    ) -> list[list[int] | int]:
        """Tokens of what stands between the vectors, and the numbers of these."""
        found: list[list[int] | int] = []
        texts: list[str] = []
        for piece in pieces:
            first, *rest = re.split(self._pattern, piece)
            texts.append(first)
            for number, text in zip(rest[::2], rest[1::2], strict=True):
                found += [self._tokens(texts, encode, encode_next, is_first=not found), int(number)]
                texts = [text]
        found.append(self._tokens(texts, encode, encode_next, is_first=not found))
        numbers = [one for one in found if isinstance(one, int)]
        if sorted(numbers) != list(range(len(self.given))):
            raise RequestError(
                f"messages: the chat template does not write each of the {len(self.given)} prompt_embeds once. Give "
                "them as parts of a content that it writes, or start the engine with another chat_template.",
                param="messages",
            )
        return found

    @property
    def _pattern(self) -> str:
        return f"{self.letter}([0-9]{{1,9}}){self.letter}"

    @staticmethod
    def _tokens(
        texts: list[str],
        encode: Callable[[list[str]], list[int]],
        encode_next: Callable[[str], list[int]],
        *,
        is_first: bool,
    ) -> list[int]:
        if is_first:
            return encode(texts)
        return [token for text in texts for token in encode_next(text)]


def has_vectors(chat: Any) -> bool:
    """Whether rendering it takes long."""
    return isinstance(chat, Sequence) and any(
        _is_vectors(part) for message in chat if isinstance(message, Mapping) for part in _places(message)
    )


def take_vectors(chat: Sequence[Any]) -> VectorParts:
    """Of a chat that has some."""
    letter = unused_letter(chat)
    given: list[tuple[Any, str]] = []

    def stand_in(part: Mapping[str, Any], where: str) -> str:
        data = part.get("data")
        if data is None:
            raise RequestError(f"{where}.data: this field is required; it holds the vectors.", param=f"{where}.data")
        given.append((data, f"{where}.data"))
        return f"{letter}{len(given) - 1}{letter}"

    messages = []
    for number, message in enumerate(chat):
        where = f"messages[{number}]"
        if isinstance(message, Mapping):
            message = dict(message)
            for name in _REASONING:
                if _is_vectors(message.get(name)):
                    message[name] = stand_in(message[name], f"{where}.{name}")
            content = message.get("content")
            if isinstance(content, list | tuple):
                message["content"] = [
                    {"type": "text", "text": stand_in(part, f"{where}.content[{place}]")} if _is_vectors(part) else part
                    for place, part in enumerate(content)
                ]
        messages.append(message)
    return VectorParts(messages, given, letter)


def _places(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    parts = list(content) if isinstance(content, list | tuple) else []
    return [*parts, *(message.get(name) for name in _REASONING)]


def _is_vectors(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == _KIND
