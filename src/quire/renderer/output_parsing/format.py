"""What a file in `tool_parsers` or `reasoning_parsers` declares: all that is special about one format."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from quire.renderer.output_parsing.reader import Reader, Steps


def new_call_id() -> str:
    """OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, kw_only=True)
class JsonForm:
    """How calls are written by a format that is JSON between texts, so that structured output can enforce them."""

    begin: str
    end: str
    between: str
    arguments: str


def _never(text: str) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How a model writes calls of tools. `read` goes on to the end of the answer."""

    name: str
    read: Callable[[Reader], Steps[None]]
    # texts that it looks for: a tokenizer that has special tokens for them must show those
    marks: tuple[str, ...] = ()
    # whether a chat template teaches this format
    is_taught_by: Callable[[str], bool] = _never
    # what the template wants as the id of a call when the conversation comes back
    new_id: Callable[[], str] = new_call_id
    # None: calls cannot be enforced
    json_form: JsonForm | None = None


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """How a model writes what it thinks. `read` goes on to the end of the thought."""

    name: str
    # is_open: the prompt ended inside a thought
    read: Callable[[Reader, bool], Steps[None]]
    marks: tuple[str, ...] = ()
    is_taught_by: Callable[[str], bool] = _never
    # a prompt that ends with `opening` leaves the thought to the answer
    opening: str = ""
    closing: str = ""
    # answers begin with a thought even where the prompt does not show it
    is_always_open: bool = False
