"""Tokens of a text that arrives in pieces, before it is whole (streaming prefill, 4.4.4).

Owns the text of one prompt. Where a piece ends says nothing about where a token ends: what follows may still merge with
it. So the end of the text is held back, to the last place where a word begins with a space: tokens do not reach across
it in the tokenizers of language models. In a text without spaces (Chinese, a line of code) the last characters are held
back. Both are likely, not certain, for a tokenizer may do anything. `whole` is what counts: whoever sent tokens before
the end compares them with it.

Costs what a piece holds, not what came before. Called by AsyncLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from quire.errors import RequestError
from quire.renderer.tokenizer import Tokenizer

# (token ids, where each begins and ends in the text)
Spanned = tuple[list[int], list[tuple[int, int]]]

_LINE_END = "\n"
# A text without a place to cut is held back for so long; then all but the last characters are taken for settled.
_LONGEST_HELD = 64
_NUM_HELD = 32
# So much of what was settled stays in front of what is tokenised next, where it was cut inside a word.
_NUM_CONTEXT = 64
# Two parts of a text, to see how the second is tokenised alone.
_SAMPLE = ("The dog", " sees it")


class PieceEncoder:
    """What is found out once about a tokenizer: how to tokenise a part of a text as it stands in the whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def encode_later_part(self) -> Callable[[str], Spanned] | None:
        """For a part that does not begin the text; None if this tokenizer has no such way."""
        first, second = _SAMPLE
        opening = self.tokenizer.encode(first, add_special_tokens=False)
        wanted = self.tokenizer.encode(first + second, add_special_tokens=False)
        for way in (self.tokenizer.encode_with_spans, self._behind_a_line_end):
            if opening + way(second)[0] == wanted:
                return way
        return None

    @cached_property
    def around(self) -> tuple[list[int], list[int]] | None:
        """Special tokens that the tokenizer puts before and behind a text; None if that cannot be told."""
        try:
            return self.tokenizer.around
        except RequestError:
            return None

    def _behind_a_line_end(self, text: str) -> Spanned:
        """For tokenizers that put a space before whatever they are given."""
        token_ids, spans = self.tokenizer.encode_with_spans(_LINE_END + text)
        count = sum(end <= 1 for _, end in spans)
        return token_ids[count:], [(max(0, start - 1), end - 1) for start, end in spans[count:]]


class GrowingText:
    """One text. `token_ids` are those that were taken for settled so far."""

    def __init__(self, encoder: PieceEncoder, max_tokens: int, *, add_special_tokens: bool = True) -> None:
        self.token_ids: list[int] = []
        self.num_characters = 0
        self._encoder = encoder
        self._max_tokens = max_tokens
        self._add_special_tokens = add_special_tokens
        self._pieces: list[str] = []
        # not settled, behind _num_context characters that are
        self._window = ""
        self._num_context = 0
        self._is_first = True
        around = encoder.around if add_special_tokens else ([], [])
        # nothing is settled before the end where this tokenizer cannot be foreseen
        self._is_foreseen = around is not None and encoder.encode_later_part is not None
        self._before, self._behind = around or ([], [])

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def push(self, text: str) -> list[int]:
        """Takes a piece; returns the tokens that are settled by it."""
        self.num_characters += len(text)
        self._encoder.tokenizer.check_size(self.num_characters, self._max_tokens, "prompt")
        self._pieces.append(text)
        if not self._is_foreseen:
            return []
        self._window += text
        settled: list[int] = []
        if cut := self._last_word_start():
            settled = self._settle_words(cut)
        if len(self._window) - self._num_context > _LONGEST_HELD:
            settled = settled + self._settle_inside_word()
        if settled and not self.token_ids:
            settled = self._before + settled
        self.token_ids += settled
        return settled

    def finish(self) -> list[int]:
        """The tokens that are left, if nothing unforeseen happened: to be compared with `whole`."""
        rest: list[int] = []
        if self._is_foreseen:
            token_ids, spans = self._encoded(self._window)
            rest = token_ids[self._first_new(token_ids, spans) :]
        rest = [*([] if self.token_ids else self._before), *rest, *self._behind]
        self.token_ids += rest
        return rest

    def whole(self) -> list[int]:
        """The tokens of the text as a whole."""
        return self._encoder.tokenizer.encode(self.text, add_special_tokens=self._add_special_tokens)

    def _last_word_start(self) -> int:
        """The last space that follows something else; 0 if there is none."""
        window = self._window
        found = len(self._window)
        while (found := window.rfind(" ", 0, found)) > self._num_context:
            if not window[found - 1].isspace():
                return found
        return 0

    def _settle_words(self, cut: int) -> list[int]:
        token_ids, spans = self._encoded(self._window[:cut])
        first = self._first_new(token_ids, spans)
        # Behind an added token some tokenizers begin as at the beginning of a text: then it must be seen again.
        is_added = first < len(spans) and token_ids[-1] in self._encoder.tokenizer.added_ids
        start = spans[-1][0] if is_added else cut
        self._move(start, num_context=cut - start)
        return token_ids[first:] if self._is_foreseen else []

    def _settle_inside_word(self) -> list[int]:
        limit = len(self._window) - _NUM_HELD
        token_ids, spans = self._encoded(self._window)
        first = self._first_new(token_ids, spans)
        count = cut = 0
        for number in range(first, len(spans) - 1):
            end = spans[number][1]
            if end > limit:
                break
            if end > self._num_context and spans[number + 1][0] >= end:  # the tokens of one character stay together
                count = number + 1 - first
                cut = end
        if not count or not self._is_foreseen:
            return []
        # the context begins where a token does
        starts = [start for start, _ in spans[: first + count] if start <= max(0, cut - _NUM_CONTEXT)]
        self._move(starts[-1] if starts else 0, num_context=cut - (starts[-1] if starts else 0))
        return token_ids[first : first + count]

    def _first_new(self, token_ids: list[int], spans: list[tuple[int, int]]) -> int:
        """The first token behind the context. One that reaches across its end shows that the cut was wrong, unless it
        is an added token that takes the space behind it."""
        first = sum(start < self._num_context for start, _ in spans)
        if first and spans[first - 1][1] > self._num_context:
            self._is_foreseen = token_ids[first - 1] in self._encoder.tokenizer.added_ids
        return first

    def _encoded(self, text: str) -> Spanned:
        later = self._encoder.encode_later_part
        assert later is not None
        return self._encoder.tokenizer.encode_with_spans(text) if self._is_first else later(text)

    def _move(self, start: int, *, num_context: int) -> None:
        if start:
            self._is_first = False
        self._window = self._window[start:]
        self._num_context = num_context
