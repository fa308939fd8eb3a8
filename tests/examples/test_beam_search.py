"""The example of beam search runs as it stands."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "beam_search.py"


def test_beams_stand_best_first_beside_samples():
    command = [sys.executable, str(EXAMPLE), "2+3=", "--width", "3", "--max-tokens", "6"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines if not line.startswith(" ")] == ["beams", "greedy", "drawn"]
    scores = [float(line.split()[0]) for line in lines[1:4]]
    assert scores == sorted(scores, reverse=True)
    assert len(lines) == 3 + 3 + 1 + 3
