"""docs/models.md: what `results.json` says, which the tests hold against what they run."""

from __future__ import annotations

import json
import re
import string
from pathlib import Path
from typing import Any

from tests.model_table.checks import CHECKS
from tests.model_table.rows import ENCODERS, LISTENERS, OTHER_NAMES, READERS, TOWERS

from quire.config.video_sizes import MODEL_TYPES as VIDEO_MODEL_TYPES

RESULTS = Path(__file__).with_name("results.json")
_HEAD = """# Models

Each kind of model is run as a tiny checkpoint with random weights, and its greedy tokens are held against those of
Transformers in float32: whole, in chunks, out of the prefix cache, after preemption, with drafts and with two workers;
beams against a search by hand, adapters against merged weights. `+` means that they are the same; a letter says what
whoever asks for it reads. Native models have a file of their own here, the others run through the Transformers library
with Quire's attention (`model_impl`), which takes longer and cannot divide a model.

This page is made by `python -m tests.model_table --write`; `make nightly ARGS="-k model_table"` runs every cell, the
default tests a sample.

"""


_SETTINGS = """
`hf_overrides` lays other values over a model's config.json before anything reads it: `{"architectures": [...]}`, or
`{"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}`, which makes the
model's length 131,072. A key that is in nobody's configuration ends the start, with the name that was probably meant.
The model's files stay as they are: what is read is a folder of links in the user's cache. 16 of those folders are kept
for the next start, and the others deleted.

A model with two sets of angles (`longrope`: Phi 3 and 4) takes those for long texts, for short ones too, where
`max_model_len` is above `original_max_position_embeddings` of its config.json, because keys in the cache cannot follow
a text that grows. Transformers chooses for each batch. Lower `max_model_len` for the other set."""


def read_results() -> dict[str, dict[str, str]]:
    """By model_type: `how`, and each column of CHECKS."""
    results: dict[str, dict[str, str]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return results


def page(results: dict[str, dict[str, str]]) -> str:
    served = {name: cells for name, cells in results.items() if cells["how"] in ("native", "Transformers")}
    reasons: dict[str, str] = {}
    lines = ["| model_type | runs | " + " | ".join(CHECKS) + " |", "| --- | --- |" + " :-: |" * len(CHECKS)]
    for name, cells in served.items():
        marks = [_mark(cells[column], name, reasons) for column in CHECKS]
        lines.append(f"| `{name}` | {cells['how']} | " + " | ".join(marks) + " |")
    notes = [f"- **{letter}** {reason}" for reason, letter in reasons.items()]
    more = [f"`{name}` runs {how}." for name, how in OTHER_NAMES.items()]
    names = ", ".join(f"`{name}`" for name in ENCODERS)
    more.append(f"With images: {names} ([images](images.md)).")
    names = ", ".join(f"`{name}`" for name in VIDEO_MODEL_TYPES)
    more.append(f"With videos: {names} ([videos](images.md#videos)).")
    names = ", ".join(f"`{name}`" for name in LISTENERS)
    more.append(f"With sounds: {names} ([speech](speech.md)).")
    names = ", ".join(f"`{name}`" for name in READERS)
    more.append(f"With an encoder that reads the prompt: {names} ([encoder and decoder](encoder-decoder.md)).")
    towers = ", ".join(f"`{name}`" for name in TOWERS)
    more.append(f"As their text alone, which the log says in one line: {towers}, and others whose text model is above.")
    more.append(_SETTINGS)
    refused = [f"- `{name}`: {_plain(cells['how'])}" for name, cells in results.items() if name not in served]
    parts = [*lines, "", *notes, "", *more, "", "## Refused", "", *refused]
    return _HEAD + "\n".join(parts) + "\n"


def _mark(cell: str, name: str, reasons: dict[str, str]) -> str:
    if cell == "yes":
        return "+"
    reason = _plain(cell).replace(name, "...")
    return reasons.setdefault(reason, _letter(len(reasons)))


def _letter(number: int) -> str:
    return string.ascii_lowercase[number % 26] * (number // 26 + 1)


def _plain(text: str) -> str:
    """Without the folder of the test and the model's own name."""
    return re.sub(r"(/[\w.-]+)+/(config\.json)", r"\2", re.sub(r"^model_type=\w+: ", "", text))


def write(results: dict[str, dict[str, Any]], docs: Path) -> None:
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (docs / "models.md").write_text(page(results), encoding="utf-8")
