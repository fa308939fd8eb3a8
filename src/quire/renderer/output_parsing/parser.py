"""One answer on its way through the formats of its model: `push` each difference of its text, take what it means.

One object an answer. Never raises for anything that a model may write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.renderer.output_parsing.answer import Answer, Piece, Reasoning
from quire.renderer.output_parsing.format import ReasoningFormat, ToolFormat, new_call_id
from quire.renderer.output_parsing.reader import Reader, Steps


class OutputParser:
    """From text to content, reasoning and calls."""

    def __init__(
        self,
        tool_format: ToolFormat | None = None,
        reasoning_format: ReasoningFormat | None = None,
        *,
        is_thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        hidden: frozenset[str] = frozenset(),
        max_calls: int | None = None,
        shows_reasoning: bool = True,
    ) -> None:
        """is_thinking: the prompt ended inside a thought. hidden: special tokens that are not shown. max_calls: those
        that come after are dropped. shows_reasoning: else thoughts are read, counted and left out."""
        self._shows_reasoning = shows_reasoning
        new_id = tool_format.new_id if tool_format is not None else new_call_id
        self._answer = Answer(new_id, max_calls=max_calls)
        self._reader = Reader(self._answer, tools=tools, has_reasoning=reasoning_format is not None, hidden=hidden)
        self._steps = _read(self._reader, tool_format, reasoning_format, is_thinking)
        self._is_finished = False

    def push(self, text: str, *, is_last: bool) -> list[Piece]:
        """What the text so far says beyond what was said before."""
        if self._is_finished:
            return []
        self._reader.feed(text)
        if is_last:
            self._is_finished = True
            self._reader.end()
        try:
            next(self._steps)
        except StopIteration:
            self._is_finished = True
        if is_last:
            self._answer.finish()
        pieces = self._answer.take()
        return pieces if self._shows_reasoning else [piece for piece in pieces if not isinstance(piece, Reasoning)]

    @property
    def thoughts(self) -> list[tuple[int, int]]:
        """Where reasoning stands in the text so far: letters from, to."""
        return self._reader.thoughts

    def finish_reason(self, reason: str | None) -> str | None:
        """An answer that ended by itself and called is one that waits for the results: every call in it is whole."""
        has_calls = self._answer.num_calls > 0 and not self._answer.has_broken_call
        return "tool_calls" if reason == "stop" and has_calls else reason


def _read(
    reader: Reader, tool_format: ToolFormat | None, reasoning_format: ReasoningFormat | None, is_thinking: bool
) -> Steps[None]:
    if reasoning_format is not None:
        yield from reasoning_format.read(reader, is_thinking)
    if tool_format is not None:
        yield from tool_format.read(reader)
    # what a format leaves is text
    yield from reader.content_until(())
