"""Speculative decoding as a user says it (one JSON object), checked and resolved.

What is left open is inferred: a draft with an Eagle architecture is read as one, any other is a draft model, and
without a draft only ngram remains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config.model_facts import ModelFacts
from quire.config.model_source import EMBEDDED_DRAFT, embedded_draft_path, locate
from quire.errors import OptionError, suggestion

OPTION = "speculative_config"
METHODS = ("ngram", "draft_model", "eagle", "mtp")
# vLLM has a name for each generation, and for each model that brings a head; the checkpoint says which one it is
_ALIASES = {"eagle3": "eagle"} | {f"{model}_mtp": "mtp" for model in ("deepseek", "glm4_moe", "qwen3_5", "qwen3_next")}
# an older way of vLLM's to ask for it
_NGRAM_AS_MODEL = "[ngram]"
_KEYS = ("method", "num_speculative_tokens", "model", "prompt_lookup_min", "prompt_lookup_max")
# How many drafts a row really gets is decided each step by what they bring, so these are only upper bounds. A look-up
# costs next to nothing and what it finds is often long; each token of a model costs a pass of that model.
_NUM_TOKENS = {"ngram": 8, "draft_model": 4, "eagle": 4, "mtp": 2}
_MOST_TOKENS = 64
_MOST_LOOKUP = 32
_LOOKUP_MIN = 2
_LOOKUP_MAX = 4


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Who proposes tokens, and how many at most."""

    method: str
    num_speculative_tokens: int
    # the checkpoint of the draft; None for ngram, and for a head that is in the model's own
    model_path: str | None = None
    # ngram: how many of the last tokens are looked up, longest first
    prompt_lookup_min: int = _LOOKUP_MIN
    prompt_lookup_max: int = _LOOKUP_MAX

    @property
    def lookahead(self) -> int:
        """Slots that a row needs beyond its granted tokens: the drafts of a model have keys and values of their own."""
        return 0 if self.method == "ngram" else self.num_speculative_tokens


def resolve_speculation(given: Mapping[str, Any] | None) -> tuple[SpeculationConfig | None, tuple[object, str]]:
    """The configuration, or None where nothing is asked for; beside it the value and the reason for the table."""
    if given is None:
        return None, ("none", "default")
    if given.get("model") == _NGRAM_AS_MODEL:
        given = {**given, "model": None, "method": given.get("method") or "ngram"}
    _check_names(given)
    path = _locate_draft(given["model"]) if given.get("model") is not None else None
    method, reason = _method(given, path)
    _check_model(method, given)
    count = _whole_number(given, "num_speculative_tokens", _NUM_TOKENS[method], _MOST_TOKENS)
    longest = _whole_number(given, "prompt_lookup_max", None, _MOST_LOOKUP)
    shortest = _whole_number(given, "prompt_lookup_min", min(_LOOKUP_MIN, longest or _LOOKUP_MAX), _MOST_LOOKUP)
    longest = longest or max(_LOOKUP_MAX, shortest)
    if shortest > longest:
        raise OptionError(
            f"{OPTION}: prompt_lookup_min={shortest}, prompt_lookup_max={longest}: the shortest text that is looked up "
            f"must not be longer than the longest. Lower prompt_lookup_min to {longest}, or leave one of them out."
        )
    config = SpeculationConfig(
        method=method,
        num_speculative_tokens=count,
        model_path=None if path is None else str(path),
        prompt_lookup_min=shortest,
        prompt_lookup_max=longest,
    )
    return config, (f"{method}, at most {count} tokens", reason)


def _check_names(given: Mapping[str, Any]) -> None:
    for key in given:
        if key not in _KEYS:
            raise OptionError(
                f"{OPTION}: {key!r}: there is no such key, there are {', '.join(_KEYS)}.{suggestion(str(key), _KEYS)}"
            )
    for key in ("method", "model"):
        value = given.get(key)
        if value is not None and (not isinstance(value, str) or not value.strip()):
            raise OptionError(f"{OPTION}: {key}={value!r}: must be a text that is not empty, or be left out.")


def _locate_draft(model: str) -> Path:
    return embedded_draft_path() if model == EMBEDDED_DRAFT else locate(model, name=f"{OPTION}: model")


def _method(given: Mapping[str, Any], path: Path | None) -> tuple[str, str]:
    asked = given.get("method")
    if asked is not None:
        method = _ALIASES.get(asked, asked)
        if method not in METHODS:
            raise OptionError(
                f"{OPTION}: method={asked!r}: must be one of {', '.join(METHODS)}.{suggestion(asked, METHODS)}"
            )
        return method, "as asked"
    if path is not None:
        architecture = ModelFacts.read(path).architecture
        method = "eagle" if "eagle" in architecture.lower() else "draft_model"
        return method, f"the draft is a {architecture or 'checkpoint that names no architecture'}"
    if given.get("prompt_lookup_max") is not None or given.get("prompt_lookup_min") is not None:
        return "ngram", "the keys of prompt look-up were given"
    raise OptionError(
        f"{OPTION}={dict(given)}: must say who proposes tokens. "
        'Give a method ("ngram" needs nothing else), or a model that drafts.'
    )


def _check_model(method: str, given: Mapping[str, Any]) -> None:
    model = given.get("model")
    if method == "ngram" and model is not None:
        raise OptionError(
            f"{OPTION}: method='ngram', model={model!r}: ngram proposes from the text alone and has no model. "
            "Leave out model, or set method to draft_model."
        )
    if method == "mtp" and model is not None:
        raise OptionError(
            f"{OPTION}: method='mtp', model={model!r}: the head is in the model's own checkpoint. Leave out model, or "
            "set method to eagle or draft_model."
        )
    if method == "ngram":
        return
    if model is None and method != "mtp":
        raise OptionError(
            f"{OPTION}: method={method!r}, model=None: a model must propose the tokens. Give its directory or hub name"
            f"; {EMBEDDED_DRAFT!r} drafts for the embedded model."
        )
    for key in ("prompt_lookup_min", "prompt_lookup_max"):
        if given.get(key) is not None:
            raise OptionError(
                f"{OPTION}: method={method!r}, {key}={given[key]!r}: only ngram looks tokens up in the text. "
                f"Leave out {key}, or set method to ngram and leave out model."
            )


def _whole_number(given: Mapping[str, Any], key: str, default: int | None, most: int) -> Any:
    value = given.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise OptionError(f"{OPTION}: {key}={value!r}: must be a whole number of tokens.")
    if not 1 <= value <= most:
        raise OptionError(f"{OPTION}: {key}={value}: must be between 1 and {most} tokens.")
    return value
