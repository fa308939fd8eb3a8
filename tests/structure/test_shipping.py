"""The tools that make what is shipped, and try it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("versions", "oldest"),
    [
        ((), 28),
        ((b"GLIBC_2.2.5", b"GLIBC_2.27"), 28),
        ((b"GLIBC_2.34", b"GLIBC_2.2.5", b"GLIBCXX_3.4.30"), 34),
        ((b"GLIBC_2.3.4", b"GLIBC_2.100"), 100),
    ],
)
def test_the_name_of_a_wheel_says_what_its_kernels_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: tuple[bytes, ...], oldest: int
) -> None:
    # it is there where a wheel is made
    interface = ModuleType("interface")
    interface.BuildHookInterface = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hatchling.builders.hooks.plugin.interface", interface)
    library = tmp_path / "kernels.so"
    library.write_bytes(b"\x7fELF\0" + b"\0".join(versions) + b"\0")
    assert tool("wheel_tag").oldest_glibc([library]) == oldest


def test_a_dockerfile_is_done_step_by_step(tmp_path: Path) -> None:
    """Stages, folders and variables are those of Docker; nothing runs here."""
    bare = tool("bare_debian")
    base = tmp_path / "base"
    (base / "usr/local/bin").mkdir(parents=True)
    ran: list[tuple[str, str]] = []
    bare.Tree.run = lambda tree, command, folder="/": ran.append((folder, command[-1]))
    build = bare.Build(base, tmp_path, {"INDEX": "mine"}, ())
    text = """
FROM python:3 AS build
# a remark
ARG INDEX=theirs
WORKDIR /source
COPY README.md LICENSE ./
RUN first \\
    # inside
    && second
FROM python:3
COPY --from=build /source /copied
ENV A=b PATH=/opt/bin:$PATH
USER quire
ENTRYPOINT ["quire", "serve"]
"""
    for word, rest in bare.instructions(text):
        build.do(word, rest)
    assert [(folder, " ".join(command.split())) for folder, command in ran] == [("/source", "first && second")]
    assert (tmp_path / "stage-last/copied/LICENSE").exists()
    assert build.tree.environment["PATH"].startswith("/opt/bin:/usr/local/bin")
    assert (build.user, build.entry) == ("quire", ["quire", "serve"])


@pytest.mark.parametrize(
    ("command", "links", "settings"),
    [
        (["true"], "", {}),
        (["true"], "/wheels", {"PIP_FIND_LINKS": "/wheels"}),
        (["false"], "/wheels", {"PIP_FIND_LINKS": "/wheels", "PIP_NO_INDEX": "1"}),
        (["false"], "", None),
        (["sleep", "60"], "", None),
    ],
)
def test_pip_is_not_waited_for_where_there_is_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], links: str, settings: dict[str, str] | None
) -> None:
    bare = tool("bare_debian")
    monkeypatch.setattr(bare, "INDEX_SECONDS", 0.3 if command[0] == "sleep" else 60.0)
    bare.Tree.run = lambda tree, command, folder="/": None
    bare.Tree.command = lambda tree, command_in_tree: command
    if settings is None:
        with pytest.raises(SystemExit, match=r"pip reaches no packages from here: .* give --wheels FOLDER"):
            bare.pip_settings(bare.Tree(tmp_path), "python3", links)
    else:
        assert bare.pip_settings(bare.Tree(tmp_path), "python3", links) == settings


def test_the_dockerfiles_have_no_other_steps() -> None:
    bare = tool("bare_debian")
    known = {"FROM", "ARG", "ENV", "WORKDIR", "RUN", "COPY", "USER", "ENTRYPOINT", "CMD"}
    known |= {"VOLUME", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL"}
    for name in ("Dockerfile", "Dockerfile.cuda"):
        words = {word for word, _ in bare.instructions((ROOT / "deploy" / name).read_text())}
        assert words <= known
