"""What the embedded model tells about Quire must be true of the tree: commands, options, names and folders."""

from __future__ import annotations

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from quire.config import EngineOptions, options_of
from quire.config.speculation import METHODS
from quire.interfaces.cli.program import COMMANDS

ROOT = Path(__file__).parents[2]
POLICIES = ROOT / "src" / "quire" / "engine_core" / "scheduler" / "policies"
SERVER = ROOT / "src" / "quire" / "interfaces" / "server"
FAQ = tomllib.loads((ROOT / "training" / "faq.toml").read_text(encoding="utf-8"))
EVERY = [answer for _, answer in (*FAQ["define"], *FAQ["questions"])]
# An answer may name a place for what is to come, if it says so.
ANSWERS = [answer for answer in EVERY if "not built yet" not in answer]
TO_COME = [answer for answer in EVERY if "not built yet" in answer]

FOLDER = re.compile(r"(?<![/\w])([a-z_]+/[a-z_/]*(?:\.md)?)")
SNAKE_CASE = re.compile(r"(?<![/\w])[a-z]+(?:_[a-z]+)+(?![\w/])")
KNOWN = {
    *options_of(EngineOptions),
    *SamplingParams.__struct_fields__,
    *BeamSearchParams.__struct_fields__,
    *vars(LLM),
    # numbers of a sequence, verbs of the KV cache manager, an executor, a field of the HTTP API and of config.json
    *("num_computed_tokens", "num_total_tokens", "get_computed_blocks", "allocate_slots", "check_invariants"),
    *("in_process", "use_beam_search", "model_type"),
    *METHODS,
    *(path.stem for path in POLICIES.glob("*.py")),
}


def is_there(folder: str) -> bool:
    return any((place / folder).exists() for place in (ROOT, ROOT / "src", ROOT / "src" / "quire"))


def test_there_are_a_few_hundred_questions() -> None:
    assert len(EVERY) >= 300


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_an_answer_names_is_there(answer: str) -> None:
    for command in re.findall(r"\bquire ([a-z-]+)", answer):
        if command in {"is", "serves"}:
            continue
        assert command in COMMANDS, f"there is no command quire {command}"
    for folder in FOLDER.findall(answer):
        assert is_there(folder), f"there is no {folder}"
    for name in SNAKE_CASE.findall(answer):
        assert name in KNOWN, f"there is no {name}"


@pytest.mark.parametrize("answer", TO_COME)
def test_what_is_to_come_is_not_there(answer: str) -> None:
    for folder in FOLDER.findall(answer):
        assert not is_there(folder), f"{folder} is built: say so, and train again"


@pytest.mark.parametrize("answer", EVERY)
def test_python_names_and_addresses_are_there(answer: str) -> None:
    for name in re.findall(r"\bLLM\.(\w+)", answer):
        assert callable(getattr(LLM, name, None)), f"LLM has no {name}"
    for module in re.findall(r"\bquire\.testing\.\w+", answer):
        assert find_spec(module), f"there is no {module}"
    for address in re.findall(r"/v1(/[a-z_/]+)", answer):
        assert any(address in path.read_text(encoding="utf-8") for path in SERVER.rglob("*.py")), f"/v1{address}"


def test_terms_that_are_defined_exist() -> None:
    terms = [term for term, _ in FAQ["define"]]
    unknown = {term for term in terms if SNAKE_CASE.fullmatch(term)} - KNOWN
    assert not unknown, unknown
    assert all(hasattr(LLM, term.removeprefix("LLM.")) for term in terms if term.startswith("LLM."))
    assert all(find_spec(term) for term in terms if term.startswith("quire."))
