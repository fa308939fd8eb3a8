"""Texts that no client gets to see: an answer ends before the first of them.

quire serve --hook 'banned_text:{"texts": ["BEGIN PRIVATE KEY"]}'
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.hooks import Hook, SequenceTokens, Verdict


class BannedText(Hook):
    """Holds back no more than what may become one of the texts."""

    def __init__(self, texts: Sequence[str], reason: str = "banned text") -> None:
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"texts={texts!r}: a list of texts that are not empty is expected")
        self._texts = tuple(texts)
        self._reason = reason
        self._longest = max(map(len, texts))

    def on_tokens(self, tokens: SequenceTokens) -> Verdict | None:
        # what has been shown holds none of them, but may hold the text before a cut
        shown = tokens.lengths[tokens.num_shown - 1] if tokens.num_shown else 0
        first = max(0, shown - self._longest)
        found = [place for text in self._texts if (place := tokens.text.find(text, first)) >= 0]
        if found:
            return Verdict(stop=self._reason, keep=tokens.tokens_before(min(found)))
        if tokens.is_last:
            return None
        num_certain = tokens.tokens_before(self._begins_at(tokens.text))
        return Verdict(hold=len(tokens.token_ids) - num_certain)

    def _begins_at(self, text: str) -> int:
        """Where the longest end of the text begins that may be a banned one's beginning."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            end = text[start:]
            if any(banned.startswith(end) for banned in self._texts):
                return start
        return len(text)
