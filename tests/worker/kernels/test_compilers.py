"""Compilers end with the process that has started them, however that one ends."""

import os
import signal
import subprocess
import sys

import pytest

from quire.worker.kernels.cpu.compilers import BuildError, ending_with_us, run

# a compiler that starts another one, which outlives it
BUILDER = """
import subprocess, sys
from quire.worker.kernels.cpu.compilers import ending_with_us
with ending_with_us():
    subprocess.run([sys.executable, "-c", "import os; os.system('echo compiling; sleep 600')"])
"""


def test_they_end_with_a_builder_that_is_killed():
    builder = subprocess.Popen(
        [sys.executable, "-c", BUILDER],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert builder.stdout is not None
    assert builder.stdout.readline() == "compiling\n"
    builder.send_signal(signal.SIGKILL)
    # all of them have the pipe open, so this comes to an end when they do
    assert builder.communicate(timeout=60) == ("", None)


def test_a_group_that_others_have_made_is_left_alone(monkeypatch):
    monkeypatch.setattr(os, "getpgrp", lambda: os.getpid() + 1)
    monkeypatch.setattr(subprocess, "Popen", None)
    with ending_with_us():
        pass


def test_they_write_where_they_are_told(tmp_path):
    assert run(["sh", "-c", "echo $TMPDIR"], tmp_path).strip() == str(tmp_path)


def test_what_they_say_is_the_reason():
    with pytest.raises(BuildError, match="sh failed: error: no such header"):
        run(["sh", "-c", "echo note >&2; echo 'error: no such header' >&2; exit 1"])
