"""What stands beside tokenizer.json: named special tokens, added tokens, and whether a text begins with `bos`.

Owns the reading of tokenizer_config.json, special_tokens_map.json and added_tokens.json in the spellings of
Transformers 4 and 5. Called by Tokenizer (which applies it) and ChatTemplates (which show the names to templates).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.errors import ModelError, one_line
from quire.json_files import read_object
from quire.renderer.gguf_tokenizer import read_special


@dataclass(frozen=True)
class SpecialTokens:
    """`by_name`: bos_token, eos_token, ... ; `all`: every string that is special; `added`: by their declared id."""

    by_name: dict[str, str] = field(default_factory=dict)
    unnamed: tuple[str, ...] = ()
    added: dict[int, dict[str, Any]] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.by_name.values(), *self.unnamed)))

    @classmethod
    def read(cls, folder: Path) -> SpecialTokens:
        if folder.is_file():
            return cls(**read_special(folder))
        config = read_json(folder / "tokenizer_config.json")
        named = {**read_json(folder / "special_tokens_map.json"), **config}
        by_name = {}
        for name, value in named.items():
            text = _text_of(value)
            if name.endswith("_token") and text:
                by_name[name] = text
        unnamed = [*_listed(named, "additional_special_tokens"), *_listed(named, "extra_special_tokens")]
        by_name |= {name: text for name, text in _mapped(named, "extra_special_tokens").items() if text}
        by_name |= {name: text for name, text in _mapped(named, "model_specific_special_tokens").items() if text}
        added = _added_in(config, folder / "tokenizer_config.json")
        return cls(
            by_name=by_name,
            unnamed=tuple(text for text in unnamed if text),
            added=added,
            add_bos=bool(config.get("add_bos_token")),
            add_eos=bool(config.get("add_eos_token")),
        )


def _added_in(config: dict[str, Any], file: Path) -> dict[int, dict[str, Any]]:
    declared = config.get("added_tokens_decoder") or {}
    try:
        return {int(token_id): dict(value) for token_id, value in declared.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(
            f"{file}: added_tokens_decoder must be an object of tokens by their ids ({one_line(error)}). Correct it."
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file, or nothing if there is no such file."""
    return read_object(file) if file.is_file() else {}


def _text_of(value: Any) -> str | None:
    """A token is written as a string, or as an object with its `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _listed(named: dict[str, Any], name: str) -> list[str | None]:
    value = named.get(name)
    return [_text_of(item) for item in value] if isinstance(value, list) else []


def _mapped(named: dict[str, Any], name: str) -> dict[str, str | None]:
    value = named.get(name)
    return {key: _text_of(item) for key, item in value.items()} if isinstance(value, dict) else {}
