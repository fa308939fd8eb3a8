"""`quire verify`: one table, and an exit status."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.interfaces.cli.program import OK, USER_MISTAKE, main
from quire.interfaces.cli.verify import DIFFERS, _compared
from quire.testing.tiny_adapters import make_adapter
from quire.testing.tiny_checkpoints import make_checkpoint

SMALL = ["--prompts", "3", "--max-tokens", "8", "--num-threads", "1"]


def table(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.strip().splitlines()


def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = make_checkpoint(tmp_path / "llama", "llama")
    capsys.readouterr()
    assert main(["verify", str(path), *SMALL]) == OK
    assert [line.split()[-1] for line in table(capsys)] == ["verdict", "same", "same", "same"]


def test_another_model_than_that_of_the_reference_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = make_checkpoint(tmp_path / "llama", "llama")
    capsys.readouterr()
    # what the engine makes of the weights is another model: 4-bit codes of wide random numbers
    assert main(["verify", str(path), *SMALL, "--quantization", "int4"]) == DIFFERS
    assert "differs" in " ".join(table(capsys))


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("qwen3", "lfm2")),
    ],
)
def test_the_engine_has_the_bits_of_the_training_forward(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str):
    path = make_checkpoint(tmp_path / name, name)
    capsys.readouterr()
    assert main(["verify", str(path), "--bitwise", *SMALL, "--dtype", "bfloat16"]) == OK
    rows = table(capsys)[1:]
    ways = ["whole", "chunked", "decoded", "batched", "cached", "preempted", "two"]
    assert [row.split()[0] for row in rows] == ways
    assert all(row.split()[-1] == "0.0" and int(row.split()[-2]) > 0 for row in rows)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next"])
def test_so_has_one_with_experts_which_ranks_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str):
    path = make_checkpoint(tmp_path / name, name)
    capsys.readouterr()
    assert main(["verify", str(path), "--bitwise", *SMALL]) == OK
    rows = table(capsys)[1:]
    assert [row.split()[-1] for row in rows[:-1]] == ["0.0"] * 6
    assert rows[-1].split() == ["two", "ranks", "0", "refused", "with", "experts"]


@pytest.mark.nightly
def test_so_has_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = make_checkpoint(tmp_path / "llama", "llama")
    adapter = make_adapter(tmp_path / "adapter", path, seed=1)
    capsys.readouterr()
    assert main(["verify", str(path), "--bitwise", "--adapter", str(adapter), *SMALL]) == OK
    assert [row.split()[-1] for row in table(capsys)[1:]] == [*["0.0"] * 6, "adapters"]


def test_what_is_no_number_is_a_difference():
    trained: Any = SimpleNamespace(logprobs=lambda sequences: [torch.tensor([-1.0, float("nan"), -1.0])])
    assert _compared(trained, [([1, 2, 3, 4], [-1.0, -1.0, -1.0])])[1] == "inf"


def test_an_adapter_is_compared_bit_by_bit_alone(capsys: pytest.CaptureFixture[str]):
    assert main(["verify", "--adapter", "somewhere"]) == USER_MISTAKE
    assert "--bitwise" in capsys.readouterr().err
