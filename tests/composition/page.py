"""docs/composition.md: the matrix as it came out."""

from __future__ import annotations

import itertools
import string
from collections.abc import Mapping

from tests.composition.features import ALTERNATIVES, FEATURES

_HEAD = """# What goes together

Each pair of features is run on a tiny model, by eight requests that arrive one after the other, and held against a
plain run: one request at a time, whole, on an engine that does nothing else. `=` means the same tokens, ends and
log-probabilities, to the last bit (with several workers that share a layer: the same tokens). A letter is the error
that whoever asks for both reads. `/`: one of the two is chosen. Each run must have shown what it is about: somebody
gave way, drafts were made, blocks were found.

This page is made by `python -m tests.composition --write docs/composition.md`; `make nightly ARGS="-k composition"`
runs all pairs and many triples, the default tests a sample. Beams make no drafts; the requests beside them do. Sounds
take the way of [encoder and decoder](encoder-decoder.md#on-the-way), here with prompts of T5.

"""


def pairs() -> list[frozenset[str]]:
    """Those that somebody can ask for."""
    return [pair for pair in map(frozenset, itertools.combinations(FEATURES, 2)) if pair not in ALTERNATIVES]


def page(refusals: Mapping[frozenset[str], str]) -> str:
    """`refusals`: by pair, what was said. All others came out the same."""
    texts = dict.fromkeys(refusals[pair] for pair in pairs() if pair in refusals)
    letters = dict(zip(texts, string.ascii_lowercase, strict=False))
    names = list(FEATURES)
    lines = ["| | " + " | ".join(map(str, range(1, len(names)))) + " |", "| --- |" + " :-: |" * (len(names) - 1)]
    for row, name in enumerate(names):
        cells = [_cell(frozenset({name, other}), refusals, letters) for other in names[:row]]
        lines.append("| " + " | ".join([f"{row + 1} {name}", *cells, *[""] * (len(names) - 1 - len(cells))]) + " |")
    notes = [f"- **{letter}** {text}" for text, letter in letters.items()]
    return _HEAD + "\n".join([*lines, "", *notes, ""])


def _cell(pair: frozenset[str], refusals: Mapping[frozenset[str], str], letters: Mapping[str, str]) -> str:
    if pair in ALTERNATIVES:
        return "/"
    return letters[refusals[pair]] if pair in refusals else "="
