"""What the embedded model tells about Quire must be true of the tree: commands, options and folders that it names."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from quire.config import EngineOptions, options_of
from quire.interfaces.cli.program import COMMANDS

ROOT = Path(__file__).parents[2]
FAQ = tomllib.loads((ROOT / "training" / "faq.toml").read_text(encoding="utf-8"))
# An answer may name a place for what is to come, if it says so.
ANSWERS = [answer for _, answer in (*FAQ["define"], *FAQ["questions"]) if "not built yet" not in answer]


def test_there_are_a_few_hundred_questions() -> None:
    assert len(FAQ["define"]) + len(FAQ["questions"]) >= 300


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_an_answer_names_is_there(answer: str) -> None:
    for command in re.findall(r"\bquire ([a-z-]+)", answer):
        if command in {"is", "serves"}:
            continue
        assert command in COMMANDS, f"there is no command quire {command}"
    for folder in re.findall(r"(?<![/\w])([a-z_]+/[a-z_/]*(?:\.md)?)", answer):
        places = (ROOT / folder, ROOT / "src" / "quire" / folder, ROOT / "src" / folder)
        assert any(place.exists() for place in places), f"there is no {folder}"


def test_options_that_are_defined_exist() -> None:
    known = {*options_of(EngineOptions), "max_tokens", "num_computed_tokens", "num_total_tokens", "allocate_slots"}
    terms = [term for term, _ in FAQ["define"] if re.fullmatch(r"[a-z]+(_[a-z]+)+", term)]
    unknown = set(terms) - known - {"top_p", "top_k", "get_computed_blocks", "tool_choice"}
    assert not unknown, unknown
