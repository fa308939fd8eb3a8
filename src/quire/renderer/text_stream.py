"""The text of one sequence while its tokens arrive: detokenising and stop strings.

Owns what is held back (bytes of an unfinished character, the beginning of a stop string). Must never emit a broken
character, text of the prompt, or text that a stop string cuts later. Called once a sequence and step by the front end,
so its cost counts: benchmarks/detokenise.py measures it.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from quire.failpoints import failpoint
from quire.renderer.stop_strings import StopMatcher
from quire.renderer.text_decoder import TextDecoder


class TextDelta(msgspec.Struct, gc=False):
    """What a push brought. `num_tokens` of the pushed tokens belong to the output: fewer only at a stop string."""

    text: str
    stop_string: str | None
    num_tokens: int


class TextStream:
    """`push` until `is_last`, or until a delta names a stop string; after that nothing comes any more."""

    __slots__ = ("_decoder", "_is_finished", "_matcher", "_min_tokens", "_num_tokens", "_silent_last")

    def __init__(
        self,
        decoder: TextDecoder,
        matcher: StopMatcher | None = None,
        *,
        min_tokens: int = 0,
        silent_last: Collection[int] = (),
    ) -> None:
        self._decoder = decoder
        self._matcher = matcher
        # A stop string counts only if it ends in a later token than these.
        self._min_tokens = min_tokens
        # Token ids that end a sequence: as its last token they leave no text.
        self._silent_last = silent_last
        self._num_tokens = 0
        self._is_finished = False

    @property
    def is_plain(self) -> bool:
        """No stop string is looked for."""
        return self._matcher is None

    @property
    def is_open(self) -> bool:
        """The last token ends within a character."""
        return self._decoder.is_open

    def push_plain(self, token_ids: list[int]) -> str:
        """The text that `push` brings of tokens in the middle of a plain stream: all that most tokens need."""
        failpoint("in_detokenise", token_ids)
        return self._decoder.push(token_ids)

    def push(self, token_ids: list[int], *, is_last: bool) -> TextDelta:
        failpoint("in_detokenise", token_ids)
        if self._is_finished:
            return TextDelta("", None, 0)
        num_tokens = len(token_ids)
        if is_last:
            self._is_finished = True
            if token_ids and token_ids[-1] in self._silent_last:
                token_ids = token_ids[:-1]
        if self._matcher is not None:
            return self._push_matched(self._matcher, token_ids, num_tokens, is_last)
        text = self._decoder.push(token_ids)
        if is_last:
            text += self._decoder.finish()
        return TextDelta(text, None, num_tokens)

    def _push_matched(self, matcher: StopMatcher, token_ids: list[int], num_tokens: int, is_last: bool) -> TextDelta:
        """Token by token, because the answer says in which token the stop string ended."""
        decoder = self._decoder
        pieces = []
        stop = None
        for count, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            text = decoder.push((token_id,))
            if text:
                text, stop = matcher.push(text, may_stop=self._num_tokens > self._min_tokens)
                pieces.append(text)
                if stop is not None:
                    self._is_finished = True
                    return TextDelta("".join(pieces), stop, count)
        if is_last:
            text, stop = matcher.push(decoder.finish(), may_stop=self._num_tokens > self._min_tokens)
            pieces += [text, matcher.finish()]
        return TextDelta("".join(pieces), stop, num_tokens)
