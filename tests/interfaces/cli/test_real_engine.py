"""One command with everything real: a process, the model in the package, and its tokenizer."""

import json
import os
import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).parents[3] / "src"


def test_generate_with_the_model_in_the_package():
    argv = [
        "generate",
        "one two",
        "three",
        "--json",
        "--max-tokens",
        "4",
        "--ignore-eos",
        "--seed",
        "1",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "quire.interfaces.cli", *argv, "--device", "cpu"],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    # whoever has no compiler is told so, and whoever starts for the first time hears that kernels are built
    said = [line for line in done.stderr.splitlines() if "CPU kernels" not in line]
    assert (done.returncode, said) == (0, [])
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["prompt"] for answer in answers] == ["one two", "three"]
    assert [answer["outputs"][0]["num_tokens"] for answer in answers] == [4, 4]
    assert all(answer["outputs"][0]["finish_reason"] == "length" for answer in answers)
