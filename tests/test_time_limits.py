"""A test that hangs fails under its name, and the others run on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = {
    "pytest.ini": "[pytest]\ntimeout = 2\nmarkers = nightly\n",
    "conftest.py": "from tests.support import time_limits\ntime_limits.GRACE_SECONDS = 3.0\n",
}
FILES = {
    "test_a_waits.py": """
import threading

def wait_for(door):
    door.wait()

def test_before():
    pass

def test_in_python():
    door = threading.Event()
    threading.Thread(target=wait_for, args=(door,), daemon=True).start()
    threading.Event().wait()

def test_after_python():
    pass
""",
    # locked twice by a thread that keeps the interpreter's lock: nothing in Python can end it
    "test_b_waits.py": """
import ctypes

def test_before():
    pass

def test_in_c():
    lock = ctypes.create_string_buffer(256)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(lock)

def test_after_c():
    pass
""",
    "test_c_long.py": """
import time, pytest

@pytest.mark.nightly
def test_by_night():
    time.sleep(2.5)
""",
    **{f"test_d_{number}.py": "def test_short():\n    pass\n" for number in range(12)},
}
TEARDOWN = """
import threading, pytest

@pytest.fixture
def room():
    yield
    threading.Event().wait()

def test_that_fails(room):
    assert False
"""


def run(folder: Path, files: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    for name, text in {**SETTINGS, **files}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "tests.support.time_limits", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_wait_ends_under_the_name_of_its_test(tmp_path: Path) -> None:
    done = run(tmp_path, FILES, "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    lines = done.stdout.splitlines()
    failed = {line.split()[1] for line in lines if line.startswith("FAILED ")}
    assert failed == {"test_a_waits.py::test_in_python", "test_b_waits.py::test_in_c"}, done.stdout
    # whom the test may wait for is in its report, and what the ended process did in the log
    assert "in wait_for" in done.stdout
    assert "in test_in_c" in done.stderr
    passed = [line.split()[1] for line in lines if line.startswith("PASSED ")]
    assert len(set(passed)) == len(passed) == 4 + 1 + 12


def test_what_a_failed_test_leaves_behind_is_not_waited_for(tmp_path: Path) -> None:
    done = run(tmp_path, {"test_teardown.py": TEARDOWN})
    assert done.returncode == 1
    assert "in room" in done.stderr
