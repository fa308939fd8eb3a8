"""docs/models.md is what comes out: a sample by default, every cell in the night."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.model_table.checks import CHECKS, Subject, how, run
from tests.model_table.page import page, read_results
from tests.model_table.rows import OTHER_NAMES, ROWS

from quire.testing.tiny_checkpoints import ARCHITECTURES
from quire.worker.models.causal_lm import CausalLM
from quire.worker.models.registry import find_native, native_model_types

RESULTS = read_results()
SERVED = [name for name in ROWS if "chunks" in RESULTS.get(name, {})]
# two workers are two processes, which take seconds
QUICK = [column for column in CHECKS if column != "two workers"]
SAMPLE = [(name, QUICK[number % len(QUICK)]) for number, name in enumerate(SERVED[::9])]


def test_the_page_is_current() -> None:
    """`python -m tests.model_table --write` runs what is missing."""
    assert list(RESULTS) == list(ROWS)
    assert (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8") == page(RESULTS)


def test_every_native_decoder_has_a_row() -> None:
    classes = {name: find_native(name, []) for name in native_model_types()}
    decoders = {name for name, model in classes.items() if model is not None and issubclass(model, CausalLM)}
    read_more = {
        name
        for name in decoders
        if getattr(classes[name], "takes_images", False) or getattr(classes[name], "has_sources", False)
    }
    assert decoders - read_more <= {*ROWS, *OTHER_NAMES}
    assert {name: ARCHITECTURES[row][0] for name, row in ROWS.items()} == {name: name for name in ROWS}


def test_every_cell_was_run_and_came_out() -> None:
    for name in SERVED:
        assert list(RESULTS[name]) == ["how", *CHECKS]
    failed = {(name, column) for name, cells in RESULTS.items() for column in cells if "fails: " in cells[column]}
    assert failed == set()


@pytest.mark.parametrize(("name", "column"), SAMPLE)
def test_a_cell(name: str, column: str, tmp_path: Path) -> None:
    assert run(Subject(ROWS[name], tmp_path), column) == RESULTS[name][column]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ROWS)
def test_a_row(name: str, tmp_path: Path) -> None:
    subject = Subject(ROWS[name], tmp_path)
    assert _without_folders(how(subject)) == _without_folders(RESULTS[name]["how"])
    for column in [column for column in CHECKS if column in RESULTS[name]]:
        assert _without_folders(run(subject, column)) == _without_folders(RESULTS[name][column])


def _without_folders(text: str) -> str:
    return " ".join(word for word in text.split() if "/" not in word)
