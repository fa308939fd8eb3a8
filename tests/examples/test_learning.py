"""The examples that learn run as they stand: in small by default, to the end at night."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.kv_servers import free_ports

EXAMPLES = Path(__file__).parents[2] / "examples"
IN_SMALL = {
    "learning.py": [
        "--steps",
        "4",
        "--every",
        "2",
        "--batch",
        "2",
        "--held",
        "2",
        "--good",
        "0.01",
        "--minutes",
        "0.01",
    ],
    "reinforce.py": ["--rounds", "2", "--prompts", "1", "--stories", "2", "--gain", "-9"],
}


def ran(name: str, options: list[str], seconds: float) -> tuple[int, str]:
    if name == "learning.py":
        options = [*options, "--port", "0", "--server-port", str(free_ports(1)[0])]
    command = [sys.executable, str(EXAMPLES / name), *options]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    return finished.returncode, finished.stdout + finished.stderr


def test_a_server_learns_in_small():
    """Corrections arrive, versions are loaded; after four steps nothing is learned yet, and the program says so."""
    status, said = ran("learning.py", IN_SMALL["learning.py"], 240)
    assert status == 1, said
    assert "corrections" in said
    assert "Traceback" not in said


def test_the_ratio_is_one_in_small():
    status, said = ran("reinforce.py", IN_SMALL["reinforce.py"], 240)
    assert status == 0, said
    assert said.count("at the first step: 0.0") == 2


@pytest.mark.nightly
def test_a_skill_is_learned_from_corrections():
    status, said = ran("learning.py", ["--good", "0.9", "--minutes", "20"], 1500)
    assert status == 0, said
    assert "   0%" in said.splitlines()[next(i for i, line in enumerate(said.splitlines()) if "step    0" in line)]


@pytest.mark.nightly
def test_rewards_grow():
    status, said = ran("reinforce.py", [], 1500)
    assert status == 0, said
