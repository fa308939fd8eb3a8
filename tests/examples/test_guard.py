"""The example of a judge trained on the model's own vectors runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "guard.py"


def test_stories_go_on_and_explanations_are_stopped():
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert int(re.search(r"(\d+)%", first)[1]) >= 90
    ends = dict(zip(lines[::2], lines[1::2], strict=True))
    for question, answer in ends.items():
        is_stopped = question.startswith("What")
        assert f"({'content_filter, 8' if is_stopped else 'length, 40'} tokens)" in answer, f"{question} {answer}"
