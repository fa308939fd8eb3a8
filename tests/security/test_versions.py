"""Versions of dependencies below which something is known to be broken (SEC-23)."""

import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

# the first version that is whole, and what was broken before
FLOORS = {
    "torch": "2.6",  # torch.load ran code with weights_only
    "starlette": "1.0.1",  # paths were taken from the Host header
    "jinja2": "3.1.6",  # ways out of the sandbox
}
# what pyproject.toml must not let in
DECLARED = {"torch": "2.6", "jinja2": "3.1.6"}


@pytest.mark.parametrize("name", FLOORS)
def test_what_is_installed(name):
    assert Version(version(name)) >= Version(FLOORS[name])


@pytest.mark.parametrize("name", DECLARED)
def test_what_is_asked_for(name):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    [asked] = [one for one in map(Requirement, project["dependencies"]) if one.name == name]
    below = str(Version(DECLARED[name]).release[0]) + "." + str(max(0, Version(DECLARED[name]).release[1] - 1)) + ".0"
    assert not asked.specifier.contains(below)


def test_h11_is_not_used():
    """It is the parser of chunks that smuggled requests; the server's own parser is httptools."""
    source = Path(__file__).parents[2] / "src" / "quire"
    assert not [file for file in source.rglob("*.py") if "import h11" in file.read_text(encoding="utf-8")]
