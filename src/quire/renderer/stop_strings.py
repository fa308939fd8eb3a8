"""Stop strings across tokens: an automaton over characters (Aho and Corasick), linear whatever the strings are.

Owns the text that might be the beginning of a stop string, and holds back not one character more. The match that ends
first wins; of several that end together, the longest. So the result does not depend on how the text was cut into
pieces. Called by TextStream.
"""

from __future__ import annotations

import re
from functools import lru_cache


class StopAutomaton:
    """All stop strings of a request as one automaton. Immutable, shared by its sequences."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.fallback = [0]
        # how many characters of a stop string have been seen at this node: what must be held back
        self.depth = [0]
        # the longest stop string that ends at this node
        self.match: list[str | None] = [None]
        for string in strings:
            self._insert(string)
        self._link()
        self.first_letter = re.compile("[" + "".join(re.escape(letter) for letter in sorted(self.children[0])) + "]")

    def _insert(self, string: str) -> None:
        node = 0
        for letter in string:
            following = self.children[node].get(letter)
            if following is None:
                following = len(self.children)
                self.children[node][letter] = following
                self.children.append({})
                self.fallback.append(0)
                self.depth.append(self.depth[node] + 1)
                self.match.append(None)
            node = following
        self.match[node] = string

    def _link(self) -> None:
        """Breadth first: a node falls back to the longest proper suffix that is also a beginning."""
        queue = list(self.children[0].values())
        for node in queue:
            for letter, child in self.children[node].items():
                self.fallback[child] = self.step(self.fallback[node], letter)
                self.match[child] = self.match[child] or self.match[self.fallback[child]]
                queue.append(child)

    def step(self, node: int, letter: str) -> int:
        children = self.children
        while node and letter not in children[node]:
            node = self.fallback[node]
        return children[node].get(letter, 0)


@lru_cache(maxsize=256)
def stop_automaton(strings: tuple[str, ...]) -> StopAutomaton:
    """Requests of one client mostly ask for the same stop strings."""
    return StopAutomaton(strings)


class StopMatcher:
    """The state of one sequence: where it is in the automaton, and the text that is held back."""

    __slots__ = ("_automaton", "_held", "_includes_stop", "_node")

    def __init__(self, strings: list[str], *, includes_stop: bool) -> None:
        self._automaton = stop_automaton(tuple(strings))
        self._includes_stop = includes_stop
        self._node = 0
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Text that no stop string can cut any more, and the stop string that was met."""
        automaton = self._automaton
        node = self._node
        start = 0
        if node == 0:
            found = automaton.first_letter.search(text)
            if found is None:
                return text, None
            start = found.start()
        held_before = len(self._held)
        text = self._held + text
        for position in range(held_before + start, len(text)):
            node = automaton.step(node, text[position])
            stop = automaton.match[node]
            if stop is not None and may_stop:
                self._held = ""
                self._node = 0
                end = position + 1
                return text[: end if self._includes_stop else end - len(stop)], stop
            if stop is not None and not automaton.children[node]:
                # passed by (min_tokens): a whole stop string is no beginning of one
                node = automaton.fallback[node]
        self._node = node
        cut = len(text) - automaton.depth[node]
        self._held = text[cut:]
        return text[:cut], None

    def finish(self) -> str:
        """The held text, when nothing can follow that would complete a stop string."""
        held = self._held
        self._held = ""
        self._node = 0
        return held
