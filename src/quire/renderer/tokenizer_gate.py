"""Whether a tokenizer.json may be loaded into this process.

It comes with a model, and some lines of it can take any amount of time and memory, at loading or later with a text that
a client sends. Most tokenizers are made of a few well-known parts, which a look at the file tells. Any other is tried
first in a process of its own, with bounds of time and memory (`tokenizer_trial`), and later it never runs on an event
loop.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from quire.errors import ModelError
from quire.json_files import read_bytes, read_object
from quire.renderer.gguf_tokenizer import KNOWN_PATTERNS

_WALL_SECONDS = 120.0
_MOST_PARTS = 8
_MOST_CHARACTERS = 16
# of a text, by all replacements together
_MOST_GROWTH = 32
_MOST_CHARACTERS_OF_WORD = 1_000
_MOST_ADDED = 200_000
_MOST_CHARACTERS_ADDED = 8_000_000
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.readline()); "
    "from quire.renderer.tokenizer_trial import main; main()"
)

_HARMLESS = {
    "normalizer": {
        "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "Strip", "StripAccents", "BertNormalizer", "ByteLevel",
    },
    "pre_tokenizer": {
        "ByteLevel", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "Metaspace", "BertPreTokenizer",
        "UnicodeScripts", "CharDelimiterSplit",
    },
    "post_processor": {"ByteLevel", "BertProcessing", "RobertaProcessing"},
    "decoder": {"ByteLevel", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece", "BPEDecoder", "CTC"},
    "model": {"BPE", "WordPiece", "WordLevel", "Unigram"},
}  # fmt: skip
_INNER = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
_VOCABULARY = {"vocab", "merges"}
_PATTERNS = {*KNOWN_PATTERNS, r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s", r"\d{1,3}", r"\p{N}{1,3}", r"\p{N}", " {2,}"}


def check(file: Path) -> bool:
    """Whether it is known to be harmless; False: it was tried. Raises ModelError for one that may not be loaded."""
    content = _outline_of(file)
    reason = unknown_part(content)
    if reason:
        _try(file, reason, sorted(_characters_of_patterns(content)))
    return not reason


def _outline_of(file: Path) -> dict[str, Any]:
    """All but the vocabulary, which is most of the file and decides nothing here."""
    content = read_bytes(file)
    try:
        sections = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        model = msgspec.json.decode(sections.pop("model"), type=dict[str, msgspec.Raw])
        outline = {name: msgspec.json.decode(raw) for name, raw in sections.items()}
        outline["model"] = {name: msgspec.json.decode(raw) for name, raw in model.items() if name not in _VOCABULARY}
    except (msgspec.MsgspecError, KeyError, RecursionError):
        # what is wrong is said by one reader for all files
        return read_object(file)
    return outline


def unknown_part(content: dict[str, Any]) -> str:
    """What is not known to be harmless, in words; nothing: all is."""
    return next(_unknown_parts(content), "")


def _unknown_parts(content: dict[str, Any]) -> Iterator[str]:
    growth = 1
    for section in _HARMLESS:
        parts = list(_parts_of(content.get(section), section))
        if len(parts) > _MOST_PARTS:
            yield f"{section} has more than {_MOST_PARTS} parts"
            return
        for part in parts:
            kind = part.get("type")
            size = _growth_of(section, part)
            growth *= size or 1
            if not size and not (isinstance(kind, str) and kind in _HARMLESS[section]):
                yield f"{section} of the type {str(kind)[:_MOST_CHARACTERS]}"
    if growth > _MOST_GROWTH:
        yield f"replacements that make a text more than {_MOST_GROWTH} times as long"
    model = content.get("model")
    longest = model.get("max_input_chars_per_word", 0) if isinstance(model, dict) else None
    if not isinstance(longest, int) or longest > _MOST_CHARACTERS_OF_WORD:
        yield "max_input_chars_per_word"
    added = content.get("added_tokens") or []
    if not isinstance(added, list):
        yield "added_tokens"
        return
    texts = [token["content"] for token in added if isinstance(token, dict) and isinstance(token.get("content"), str)]
    is_small = len(added) <= _MOST_ADDED and sum(map(len, texts)) <= _MOST_CHARACTERS_ADDED
    if not is_small or len(texts) < len(added) or "" in texts:
        yield "added_tokens"


def _parts_of(section: Any, name: str, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Those of a sequence one after the other."""
    if section is None:
        return
    if not isinstance(section, dict):
        yield {}
        return
    inner = section.get(_INNER.get(name, ""))
    if section.get("type") != "Sequence" and not any(key in section for key in _INNER.values()):
        yield section
    elif section.get("type") == "Sequence" and isinstance(inner, list) and depth <= 1:
        for part in inner:
            yield from _parts_of(part, name, depth + 1)
    else:
        # what is nested deeper, or may be a sequence for the library and is none here, is a part of no known type
        yield {}


def _growth_of(section: str, part: dict[str, Any]) -> int:
    """How many characters one becomes at most, for parts whose values decide whether they are harmless; 0: any."""
    match part:
        case {"type": "Prepend", "prepend": str(text)} if section == "normalizer" and len(text) <= _MOST_CHARACTERS:
            return 1
        case {"type": "Replace", "pattern": {"String": str(text)}, "content": str(new)} if text:
            return max(1, -(-len(new) // len(text))) if len(new) <= _MOST_CHARACTERS else 0
        case {"type": "Replace", "pattern": {"Regex": str(pattern)}, "content": str(new)} if pattern in _PATTERNS:
            return max(1, len(new)) if len(new) <= _MOST_CHARACTERS else 0
        case {"type": "Split", "pattern": {"Regex": str(pattern)}} if section == "pre_tokenizer":
            return 1 if pattern in _PATTERNS else 0
        case {"type": "Split", "pattern": {"String": str(text)}} if section == "pre_tokenizer" and text:
            return 1
        case {"type": "TemplateProcessing", "single": list(single), "pair": list(pair)} if section == "post_processor":
            return 1 if len(single) <= _MOST_PARTS and len(pair) <= 2 * _MOST_PARTS else 0
    return 0


def _characters_of_patterns(content: Any) -> set[str]:
    """Of all regular expressions: texts of one of these alone are what hurts them."""
    characters: set[str] = set()
    left = [content.get(section) for section in _HARMLESS if section != "model"]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            pattern = value.get("Regex")
            characters.update(pattern[:2_000] if isinstance(pattern, str) else "")
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)
    return characters


def _try(file: Path, reason: str, characters: list[str]) -> None:
    """In a process that may hang, abort or eat memory."""
    question = f"{json.dumps(sys.path)}\n{json.dumps([str(file), characters])}\n"
    said = ""
    with contextlib.suppress(subprocess.TimeoutExpired):
        answered = subprocess.run(
            [sys.executable, "-c", _BOOTSTRAP],
            input=question.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_WALL_SECONDS,
            start_new_session=True,
            check=False,
        )
        said = answered.stdout.decode("utf-8", "replace").strip()
    if said == "good":
        return
    why = said or "it takes too much time or memory, or ends its process"
    raise ModelError(
        f"{file}: {why}. It has {reason}, which is not known to be harmless, so it was tried in a process with bounds "
        "of time and memory. Take the tokenizer.json of the model's author, or give tokenizer= another folder."
    )
