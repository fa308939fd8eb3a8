"""pyproject.toml names nothing that does not exist, and docs/dependencies.md has a reason for each dependency."""

from __future__ import annotations

import re
import tomllib
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
DOCUMENT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, TOOL = DOCUMENT["project"], DOCUMENT["tool"]


def packages(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=]", requirement)[0] for requirement in requirements}


def rows_by_section() -> dict[str, list[list[str]]]:
    """The cells of the tables of docs/dependencies.md."""
    rows = {}
    for section in (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        title = section.split("\n")[0].partition(" (")[0]
        lines = re.findall(r"^\| (.*) \|$", section, re.MULTILINE)[2:]
        rows[title] = [line.split(" | ") for line in lines]
    return rows


def packages_in(cells: list[str]) -> set[str]:
    """`uvicorn, with uvloop and websockets` is uvicorn: the others come with it."""
    return {name for cell in cells for name in cell.partition(", with ")[0].split(", ")}


def test_each_dependency_has_a_reason_and_each_reason_a_dependency():
    rows = rows_by_section()
    extras = {extra: packages(requirements) for extra, requirements in PROJECT["optional-dependencies"].items()}
    assert packages_in([row[0] for row in rows["Needed to run"]]) == packages(PROJECT["dependencies"])
    assert packages_in([row[0] for row in rows["Needed to test"]]) == extras.pop("test")
    assert packages_in([row[0] for row in rows["Needed to build"]]) == packages(DOCUMENT["build-system"]["requires"])
    assert {row[0]: packages_in([row[1]]) for row in rows["Needed for one feature"]} == extras


def test_files_and_folders():
    hatch = TOOL["hatch"]
    patterns = [
        *(path.strip("/") for path in hatch["build"]["targets"]["sdist"]["include"]),
        *hatch["build"]["targets"]["wheel"]["packages"],
        hatch["build"]["targets"]["wheel"]["hooks"]["custom"]["path"],
        hatch["version"]["path"],
        PROJECT["readme"],
        *PROJECT["license-files"],
        *TOOL["pytest"]["ini_options"]["testpaths"],
        *TOOL["mypy"]["files"],
        *TOOL["ruff"]["lint"]["per-file-ignores"],
    ]
    assert [pattern for pattern in patterns if not any(ROOT.glob(pattern))] == []


def test_a_source_distribution_has_what_its_tests_import():
    included = {path.strip("/") for path in TOOL["hatch"]["build"]["targets"]["sdist"]["include"]}
    own = {folder.name for folder in ROOT.iterdir() if any(folder.glob("*.py"))}
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE))
    assert (imported & own) - included == set()


def test_scripts():
    for script in PROJECT["scripts"].values():
        module, _, name = script.partition(":")
        assert callable(getattr(import_module(module), name))


def test_markers_are_used():
    names = [marker.partition(":")[0] for marker in TOOL["pytest"]["ini_options"]["markers"]]
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in names if not re.search(rf"pytest\.mark\.{name}\b", text)] == []


def test_modules_that_mypy_treats_otherwise_are_there():
    checked = [path for folder in TOOL["mypy"]["files"] for path in (ROOT / folder).rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in checked)
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE)) - {"quire", "tests"}
    modules = [module for override in TOOL["mypy"]["overrides"] for module in override["module"]]
    own = [module for module in modules if module.partition(".")[0] not in imported]
    patterns = {module: module.removesuffix(".*").replace(".", "/") for module in own}
    roots = (SOURCE, ROOT)
    assert [module for module, path in patterns.items() if not any(any(root.glob(f"{path}*")) for root in roots)] == []
