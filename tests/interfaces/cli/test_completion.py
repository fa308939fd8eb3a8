"""What shells complete: all commands, and all flags that they declare."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from quire.config import EngineOptions, options_of
from quire.interfaces.cli.completion import SHELLS, script
from quire.interfaces.cli.program import COMMANDS
from quire.interfaces.server.options import ServerOptions


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_flag_is_there(shell: str) -> None:
    text = script(shell)
    assert all(name in text for name in COMMANDS)
    mark = "-l " if shell == "fish" else "--"
    options = [option for declared in (EngineOptions, ServerOptions) for option in options_of(declared).values()]
    assert not [one for one in options if not one.is_file_only and one.flag.replace("--", mark) not in text]
    assert not [one for one in options if one.is_file_only and one.flag.replace("--", mark) in text]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_can_read_it(shell: str, tmp_path: Path) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not here")
    file = tmp_path / "completion"
    file.write_text(script(shell))
    subprocess.run([program, "-n", str(file)], check=True)


def completed(*words: str) -> set[str]:
    """By bash, with the last word begun."""
    lines = [
        script("bash"),
        f"COMP_WORDS=({' '.join(map(repr, words))})",
        f"COMP_CWORD={len(words) - 1}",
        "_quire",
        'printf "%s\\n" "${COMPREPLY[@]}"',
    ]
    found = subprocess.run(["bash", "-c", "\n".join(lines)], check=True, capture_output=True, text=True)
    return {*found.stdout.split()}


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not here")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("quire", "ro"), {"route"}),
        (("quire", "serve", "--max-model"), {"--max-model-len"}),
        (("quire", "serve", "--kv-cache-d"), {"--kv-cache-dtype"}),
        (("quire", "serve", "--log-format", ""), {"text", "json"}),
        (("quire", "serve", "--log-format", "=", "js"), {"json"}),
        (("quire", "completion", "--nothing"), set()),
        (("quire", "route", "--pre"), {"--prefill", "--prefill-timeout"}),
    ],
)
def test_bash_completes(words: tuple[str, ...], found: set[str]) -> None:
    assert completed(*words) == found
