"""Documents name nothing that does not exist: files, links, modules, commands, flags, routes, metrics, extras.

A page is read for what it writes as code, and for its links. Names that a reader makes up (`my_package`, `/models/x`)
are not among the patterns; a placeholder in a path (`worker/models/<model_type>.py`) stands for any name.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from quire.config.engine_options import EngineOptions
from quire.interfaces.cli import program
from quire.interfaces.compat.vllm_options import OPTIONS
from quire.interfaces.deploy.route_options import RouteOptions
from quire.interfaces.gateway import create_app
from quire.interfaces.server.options import ServerOptions

ROOT = Path(__file__).parents[2]
# docs/log.md tells what was, and its entries are not rewritten
DOCS = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "log.md"]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
# not of the tree: what tools leave behind
SKIPPED = {
    ".git",
    ".venv",
    "build",
    "dist",
    "__pycache__",
    ".hypothesis",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
}
CODE = {".py", ".sh", ".mjs", ".js", ".html", ".cpp", ".h", ".c"}
# flags of docker, of uv, and of vLLM, whose page tells them apart
FLAGS_OF_OTHERS = {"--rm", "--torch-backend", *(option.flag for option in OPTIONS)}
PLACEHOLDER = re.compile(r"<[^>]*>|\{[^}]*\}")


def paths_below(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name not in SKIPPED:
            yield path
            if path.is_dir():
                yield from paths_below(path)


@cache
def tree() -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in paths_below(ROOT)]


@cache
def sources() -> str:
    """The text of all programs."""
    return text_of(path for path in tree() if not path.startswith("tests/") or path.startswith("tests/support/"))


@cache
def sources_of_tests() -> str:
    """Apart, because they name things that must not exist."""
    return text_of(path for path in tree() if path.startswith("tests/"))


def text_of(paths: Iterable[str]) -> str:
    return "\n".join((ROOT / path).read_text(encoding="utf-8") for path in paths if Path(path).suffix in CODE)


@cache
def code_of(page: Path) -> list[str]:
    """What a page writes as code: spans, and lines of blocks."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    return spans + [line for block in blocks for line in block.splitlines()]


def wrong_names(pattern: str, exists: Callable[[str], object]) -> list[str]:
    """What the pattern finds in code and does not exist, as "page: name"."""
    uses = {(page.name, name) for page in PAGES for code in code_of(page) for name in re.findall(pattern, code)}
    assert uses, f"nothing was compared: no page has {pattern}"
    return sorted(f"{page}: {name}" for page, name in uses if not exists(name))


def path_exists(name: str) -> bool:
    """A path from the root, or the end of one: pages write `worker/worker.py`."""
    pattern = PLACEHOLDER.sub("*", name)
    return any(fnmatch(path, pattern) or fnmatch(path, f"*/{pattern}") for path in tree())


def test_files():
    assert wrong_names(r"(?<![\w/.~-])((?:[\w.<>*-]+/)*[\w<>*-]+\.(?:py|mjs|cpp|sh|md))(?![\w.])", path_exists) == []


def test_paths():
    tops = "|".join(sorted({path.partition("/")[0] for path in tree() if "/" in path and path[0] != "."}))
    assert wrong_names(rf"(?<![\w/.~-])((?:{tops})/[\w./<>*-]*[\w>*])", path_exists) == []


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links():
    wrong = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            if "://" not in link and not (target.exists() and (not anchor or anchor in anchors_of(target))):
                wrong.append(f"{page.name}: {link}")
    assert wrong == []


def module_file(dotted: str) -> Path | None:
    path = ROOT / "src" / dotted.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def is_module_or_name(dotted: str) -> bool:
    """A module, a name that a module's text has, or a text of the code: a logger, a group of entry points."""
    module, _, name = dotted.rpartition(".")
    file = module_file(module) if module else None
    in_module = file is not None and re.search(rf"\b{name}\b", file.read_text(encoding="utf-8"))
    return bool(module_file(dotted) or in_module or f'"{dotted}"' in sources())


def test_modules_and_groups_of_entry_points():
    assert wrong_names(r"(?<![\w./-])(quire(?:\.[A-Za-z_]\w*)+)", is_module_or_name) == []


def test_commands():
    assert wrong_names(r"^(?:\$ )?quire ([a-z][\w-]*)", program.COMMANDS.__contains__) == []
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert wrong_names(r"^make ([a-z][\w-]*)", targets.__contains__) == []


def test_flags():
    declared = {field.name for options in (EngineOptions, ServerOptions, RouteOptions) for field in fields(options)}

    def exists(flag: str) -> bool:
        name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        return name in declared or flag in FLAGS_OF_OTHERS or f'"{flag}"' in sources()

    assert wrong_names(r"(?<![\w-])(--[a-z][\w-]*\w)(?![\w-])", exists) == []


def test_variables_of_the_environment():
    assert wrong_names(r"\b(QUIRE_[A-Z_]+[A-Z])\b", lambda name: f'"{name}"' in sources() + sources_of_tests()) == []


def test_routes():
    routes = [PLACEHOLDER.sub("*", route.path) for route in create_app(is_local=True).routes]

    def exists(name: str) -> bool:
        path = PLACEHOLDER.sub("x", name)
        is_family = any(route.startswith(f"{path}/") for route in routes)
        # a collector's path, say: no route of the server
        return is_family or any(fnmatch(path, route) for route in routes) or f'{name}"' in sources()

    assert wrong_names(r"(?<![\w/.])(/v1/[\w/{}<>-]*[\w}>])", exists) == []


def test_metrics():
    def exists(name: str) -> bool:
        return any(f'"{text}"' in sources() for text in (name, re.sub(r"_(bucket|sum|count|total)$", "", name)))

    assert wrong_names(r"\b(quire:[a-z_]+)\b", exists) == []


def test_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert wrong_names(r"(?:quire|\.)\[([a-z]+)\]", extras.__contains__) == []
