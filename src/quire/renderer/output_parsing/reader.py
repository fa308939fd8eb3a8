"""The core of all formats: the text of one answer, read from its beginning while it arrives.

A format is a generator: it reads with the methods below and *yields* wherever the text so far does not decide, so it is
written as if the whole text were there, and gives the same whatever pieces the text comes in. Nothing is read twice:
time is linear. What is held back until it is certain is bounded. Owned by an OutputParser.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from quire.renderer.output_parsing.answer import Answer, Malformed

T = TypeVar("T")
# A reading: yields when it needs more text, and returns what it read.
Steps = Generator[None, None, T]

# Characters that may turn out to be no call after all.
MAX_HELD = 65_536
# of a name, or of what else is short
_LONGEST_TEXT = 256
_SPACES = re.compile(r"\s+")
_NEVER = re.compile(r"(?!)")


class Marks:
    """Texts that mean something, found also where they are cut in two."""

    def __init__(self, texts: Iterable[str]) -> None:
        ordered = sorted({text for text in texts if text}, key=lambda text: (-len(text), text))
        self.pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else _NEVER
        letters = "".join(sorted({re.escape(text[0]) for text in ordered}))
        self._first_letter = re.compile(f"[{letters}]") if letters else _NEVER
        self._beginnings = {text[:length] for text in ordered for length in range(1, len(text))}
        self._longest = max(map(len, ordered), default=1)

    def open_end(self, text: str, start: int) -> int:
        """Where a mark begins that the end of the text has cut off; the end itself if none does."""
        for match in self._first_letter.finditer(text, max(start, len(text) - self._longest + 1)):
            if text[match.start() :] in self._beginnings:
                return match.start()
        return len(text)


@lru_cache(maxsize=256)
def marks_of(texts: tuple[str, ...], hidden: frozenset[str]) -> Marks:
    return Marks((*texts, *hidden))


class Reader:
    """`feed` and `end` are for who owns it, everything else for formats."""

    def __init__(
        self,
        answer: Answer,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        has_reasoning: bool = False,
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        self._answer = answer
        self._text = ""
        self._at = 0
        # letters of the answer before `_text`
        self._num_before = 0
        self._is_ended = False
        # what was read since an attempt began; None where nothing could be taken back
        self._record: list[str] | None = None
        self._num_recorded = 0
        # special tokens, which are no part of what a user reads
        self._hidden = hidden
        self._has_reasoning = has_reasoning
        # where thoughts stand in the whole answer: from, to
        self.thoughts: list[tuple[int, int]] = []
        self.functions: dict[str, Mapping[str, Any]] = {tool["function"]["name"]: tool["function"] for tool in tools}

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._num_before += self._at
        self._at = 0

    def end(self) -> None:
        self._is_ended = True

    # ------------------------------------------------------------------------------------------ what a format reads

    def peek(self) -> Steps[str]:
        """The next letter; nothing at the end."""
        while self._at == len(self._text):
            if self._is_ended:
                return ""
            yield
        return self._text[self._at]

    def next_letter(self) -> Steps[str]:
        """The same behind white space."""
        while True:
            letter = yield from self.peek()
            if not letter.isspace():
                return letter
            self.take_run(_SPACES)

    def take(self, length: int = 1) -> str:
        """So many letters, which have been seen to be there."""
        taken = self._text[self._at : self._at + length]
        self._at += len(taken)
        if self._record is not None:
            self._record.append(taken)
            self._num_recorded += len(taken)
            if self._num_recorded > MAX_HELD:
                raise Malformed
        return taken

    def take_run(self, pattern: re.Pattern[str]) -> str:
        """As much as is there of what the pattern matches: it may go on in the next text."""
        match = pattern.match(self._text, self._at)
        return self.take(match.end() - self._at) if match else ""

    def word(self, pattern: re.Pattern[str], limit: int = 256) -> Steps[str]:
        """All of a run of letters; may be empty."""
        runs: list[str] = []
        while (yield from self.peek()) and (run := self.take_run(pattern)):
            runs.append(run)
            if sum(map(len, runs)) > limit:
                raise Malformed
        return "".join(runs)

    def literal(self, expected: str) -> Steps[bool]:
        """Takes this text if it comes next, else nothing."""
        while True:
            found = self._text[self._at : self._at + len(expected)]
            if found == expected:
                self.take(len(expected))
                return True
            if self._is_ended or not expected.startswith(found):
                return False
            yield

    def follows(self, expected: str) -> Steps[bool]:
        """Takes this text, behind white space, if it comes next."""
        yield from self.next_letter()
        return (yield from self.literal(expected))

    def expect(self, expected: str) -> Steps[None]:
        if not (yield from self.follows(expected)):
            raise Malformed

    def goes_on(self, opening: str, closing: str) -> Steps[bool]:
        """Takes one of the two, behind white space: whether it is the opening of something more."""
        if (yield from self.follows(opening)):
            return True
        yield from self.expect(closing)
        return False

    def until(self, texts: tuple[str, ...], write: Callable[[str], None]) -> Steps[str | None]:
        """Hands over what stands before the first of these texts, and takes it; None if none comes any more."""
        marks = marks_of(texts, self._hidden)
        while True:
            text = self._text
            match = marks.pattern.search(text, self._at)
            certain = len(text) if self._is_ended else marks.open_end(text, self._at)
            if match is None or match.start() >= certain:
                if certain > self._at:
                    write(self.take(certain - self._at))
                if self._is_ended:
                    return None
                yield
                continue
            if match.start() > self._at:
                write(self.take(match.start() - self._at))
            found = self.take(match.end() - match.start())
            if found in texts:
                return found

    def text_until(self, texts: tuple[str, ...]) -> Steps[tuple[str, str]]:
        """A short text and what ended it."""
        parts: list[str] = []

        def collect(part: str) -> None:
            parts.append(part)
            if sum(map(len, parts)) > _LONGEST_TEXT:
                raise Malformed

        found = yield from self.until(texts, collect)
        if found is None:
            raise Malformed
        return "".join(parts), found

    def attempt(self, opening: str, steps: Steps[T]) -> Steps[T | None]:
        """Reads what may be a call. If it is none, it is content, with the `opening` that was taken before it."""
        self._record, self._num_recorded = [opening], len(opening)
        try:
            return (yield from steps)
        except Malformed:
            if self._answer.is_in_call:
                self._answer.break_call()
            else:
                self.content(self._visible("".join(self._record or ())))
            return None
        finally:
            self._record = None

    def accept(self) -> None:
        """Within an attempt: what was read so far has its meaning, and never becomes content."""
        self._record = []
        self._num_recorded = 0

    def each_behind(self, mark: str, call: Callable[[Reader], Steps[None]]) -> Steps[None]:
        """Within an attempt: calls that follow each other, at least one, and before each of them this text."""
        yield from self.expect(mark)
        yield from call(self)
        while True:
            self.accept()
            if not (yield from self.follows(mark)):
                return
            yield from call(self)

    def _visible(self, text: str) -> str:
        return marks_of((), self._hidden).pattern.sub("", text) if self._hidden else text

    # ------------------------------------------------------------------------------------------ what it has found

    def content(self, text: str) -> None:
        self._answer.content(text)

    def content_until(self, texts: tuple[str, ...]) -> Steps[str | None]:
        return (yield from self.until(texts, self.content))

    def attempts(self, openings: tuple[str, ...], calls: Callable[[Reader], Steps[None]]) -> Steps[None]:
        """To the end of the answer: content, and behind each of these texts what may be calls."""
        while mark := (yield from self.content_until(openings)):
            yield from self.attempt(mark, calls(self))

    def reasoning(self, text: str) -> None:
        """What was just taken."""
        if not self._has_reasoning:
            self._answer.content(text)
            return
        self._answer.reasoning(text)
        end = self._num_before + self._at
        start = end - len(text)
        if self.thoughts and self.thoughts[-1][1] == start:
            start = self.thoughts.pop()[0]
        self.thoughts.append((start, end))

    def end_reasoning(self) -> None:
        self._answer.end_reasoning()

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """Only within an attempt. From here on the client knows of the call."""
        self._answer.start_call(name, call_id)
        self._record = None

    def arguments(self, text: str) -> None:
        self._answer.arguments(text)

    def end_call(self) -> None:
        self._answer.end_call()
        self.accept()

    def call(self, name: str, arguments: str) -> None:
        """A whole one."""
        self.start_call(name)
        self.arguments(arguments)
        self.end_call()
