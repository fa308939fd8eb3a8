"""What documents and pyproject.toml name is there: files, packages, modules, extras, and options of the commands."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FILES = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
# a file by its name, or by the last parts of its path
NAMED_FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)*\.(?:py|sh|mjs|toml|cpp|h)(?![\w(])")
# what a page tells people to write themselves, and files of a model or of another project
EXAMPLES = {"model.py", "configuration_x.py", "modeling_llama.py"}


def spans_of(page: Path) -> list[str]:
    """What a page writes as code, without the blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page):
    named = {name for span in spans_of(page) for name in NAMED_FILE.findall(span) if "*" not in span}
    ends = {"/".join(file.split("/")[-count:]) for file in FILES for count in range(1, 8)}
    missing = {name for name in named if name not in ends and name not in EXAMPLES}
    assert not missing


def test_extras_that_pages_install_are_there():
    extras = set(PROJECT["project"]["optional-dependencies"])
    for page in PAGES:
        for named in re.findall(r"(?:quire|\.)\[([\w,]+)\]\"?[\s`]", page.read_text(encoding="utf-8")):
            assert set(named.split(",")) <= extras, page


def test_packages_of_the_dependencies_page_are_those_of_the_project():
    """And each has its row."""
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8").partition("## Left out")[0]
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| ") and "---" not in line]
    named = {word.strip() for row in rows for cell in row for word in re.split(r", | with | and ", cell)}
    optional = PROJECT["project"]["optional-dependencies"]
    declared = {
        re.split(r"[\[<>=!~ ]", line)[0]
        for line in (*PROJECT["project"]["dependencies"], *(line for lines in optional.values() for line in lines))
    }
    assert declared <= named
    brought_by_uvicorn = {"uvloop", "httptools", "websockets"}
    assert named & installed() <= declared | brought_by_uvicorn | {"hatchling"}


def installed() -> set[str]:
    return {distribution.metadata["Name"] for distribution in distributions()}


def test_modules_that_the_settings_name_can_be_found():
    """Or belong to an extra."""
    optional = {"gguf", "uvloop"}
    for override in PROJECT["tool"]["mypy"].get("overrides", []):
        modules = [override["module"]] if isinstance(override["module"], str) else override["module"]
        for module in modules:
            parts = [part for part in module.split(".") if part != "*"]
            assert parts[0] in optional or find_spec(parts[0]), module
            if parts[0] == "quire":
                folders = (ROOT / "src").glob("/".join(module.removesuffix(".*").split(".")) + "*")
                assert any(folders), module


def test_folders_of_the_source_distribution_are_there():
    for name in PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]:
        assert (ROOT / name.strip("/")).exists(), name
