"""How large the house is, and how its rooms hang together: `python tools/house.py [--chat] [FOLDER]`.

A table to look at before and after a change; nothing is enforced. `--chat` also serves one streamed chat of 8 tokens
and counts the files of which a function ran. FOLDER: another checkout, to compare.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

# Who reads the code of a feature does not read these; their sizes are told apart.
TESTS_MACHINERY = "testing"
# what the engine's own state is made of: each field should have one writer
STATE = ("Request", "Sequence", "Rows")
# made by a command and compared by a test, or records that grow
GENERATED_PAGES = (
    "coming-from.md",
    "composition.md",
    "models.md",
    "options.md",
    "gpu-kernels.md",
    "vllm-tests.md",
    "metrics.md",
    "fields.md",
    "log.md",
    "benchmarks.md",
)

# Runs before everything else in each process of a server. While `armed` is there, files of called functions are kept.
TRACER = """
import os, sys, threading, time
folder, package = os.environ["HOUSE_FOLDER"], os.environ["HOUSE_PACKAGE"]
seen = set()
is_armed = False
def profile(frame, event, argument):
    if is_armed and event == "call":
        code = frame.f_code
        seen.add((code.co_filename, code.co_qualname))
def watch():
    global is_armed
    while True:
        is_armed = os.path.exists(folder + "/armed")
        time.sleep(0.05)
        if seen:
            lines = [f"{file}\\t{name}\\n" for file, name in list(seen) if file.startswith(package)]
            with open(f"{folder}/{os.getpid()}.part", "w") as file:
                file.writelines(lines)
            os.replace(f"{folder}/{os.getpid()}.part", f"{folder}/{os.getpid()}.seen")
threading.Thread(target=watch, daemon=True).start()
sys.setprofile(profile)
threading.setprofile(profile)
"""


class Source:
    """One file of the package, read once."""

    def __init__(self, file: Path, package: Path) -> None:
        self.file = file
        self.room = file.relative_to(package).parts[0] if file.parent != package else "(front door)"
        self.name = ".".join(("quire", *file.relative_to(package).with_suffix("").parts)).removesuffix(".__init__")
        text = file.read_text(encoding="utf-8")
        self.num_lines = text.count("\n")
        self.tree = ast.parse(text)


def sources_of(package: Path) -> list[Source]:
    return [Source(file, package) for file in sorted(package.rglob("*.py"))]


def size_of(sources: Iterable[Source]) -> str:
    sources = list(sources)
    return f"{sum(source.num_lines for source in sources):,} lines in {len(sources)} files"


# ---- how lines are written ------------------------------------------------------------------------------------------


def num_packings(source: Source) -> int:
    """`a, b = x, y`"""
    return sum(
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        and len(node.targets[0].elts) == len(node.value.elts)
        for node in ast.walk(source.tree)
    )


def num_chains(source: Source) -> int:
    """`self.a.b.c`, each counted once, however long."""
    inner = {id(node.value) for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)}
    return sum(
        _depth(node) >= 3 for node in ast.walk(source.tree) if isinstance(node, ast.Attribute) and id(node) not in inner
    )


def _depth(node: ast.expr) -> int:
    """Of attributes behind `self`; 0 behind anything else."""
    depth = 0
    while isinstance(node, ast.Attribute):
        depth += 1
        node = node.value
    return depth if isinstance(node, ast.Name) and node.id == "self" else 0


def per_thousand(count: int, sources: Iterable[Source]) -> str:
    return f"{1000 * count / max(1, sum(source.num_lines for source in sources)):.1f}"


# ---- what imports what ----------------------------------------------------------------------------------------------


def imports_of(source: Source, names: set[str]) -> Iterator[str]:
    """Modules of the package, wherever in the file they are imported."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield from {whole if whole in names else node.module} & names
        elif isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & names


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Groups of which each reaches each other, the largest first."""
    reached = {name: _reached_from(name, arrows) for name in arrows}
    groups = {tuple(sorted(other for other in reached[name] if name in reached.get(other, ()))) for name in arrows} - {
        ()
    }
    return sorted((list(group) for group in groups if len(group) > 1), key=len, reverse=True)


def _reached_from(start: str, arrows: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for name in arrows.get(waiting.pop(), set()) - reached:
            reached.add(name)
            waiting.append(name)
    return reached


def arrows_up(arrows: Counter[tuple[str, str]]) -> int:
    """Of the best order of these rooms from above to below: the fewest arrows that no order can avoid, nearly."""
    order = _importers_first(arrows)
    best = _num_up(order, arrows)
    has_moved = True
    while has_moved:
        has_moved = False
        for room, place in itertools.product(list(order), range(len(order))):
            moved = [other for other in order if other != room]
            moved.insert(place, room)
            if (cost := _num_up(moved, arrows)) < best:
                order, best, has_moved = moved, cost, True
    return best


def _importers_first(arrows: Counter[tuple[str, str]]) -> list[str]:
    """Without an arrow up, if that is possible at all."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(room: str) -> None:
        if room not in seen:
            seen.add(room)
            for importer, imported in sorted(arrows):
                if importer == room:
                    visit(imported)
            order.append(room)

    for room in sorted({room for pair in arrows for room in pair}):
        visit(room)
    return order[::-1]


def _num_up(order: list[str], arrows: Counter[tuple[str, str]]) -> int:
    place = {room: number for number, room in enumerate(order)}
    return sum(count for (importer, imported), count in arrows.items() if place[importer] > place[imported])


def inner_report(sources: list[Source], folder: Path) -> str:
    """Of one room that has rooms inside."""
    inside = [source for source in sources if folder in source.file.parents]
    names = {source.name for source in inside}
    room = {source.name: source.file.relative_to(folder).parts[0].removesuffix(".py") for source in inside}
    files = {source.name: set(imports_of(source, names)) - {source.name} for source in inside}
    between = Counter(
        (room[name], room[imported])
        for name, those in files.items()
        for imported in those
        if room[name] != room[imported]
    )
    largest = len((circles(files) or [[]])[0])
    rooms = f"{len(set(room.values()))} rooms, {arrows_up(between)} arrows up, largest circle of {largest} files"
    return f"{size_of(inside)}, {rooms}"


# ---- who writes a field ---------------------------------------------------------------------------------------------


def writers(sources: Iterable[Source]) -> dict[str, dict[str, set[str]]]:
    """For each class of STATE and each of its fields the classes that write it after its `__init__`.

    `self.field` is the field of the class that it stands in, `request.field` that of the class Request, `kept.field` of
    KeptSequence; under any other name it may be of each class that has such a field.
    """
    classes = [node for source in sources for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)]
    names = [node.name.lower() for node in classes]
    found: dict[str, dict[str, set[str]]] = {
        node.name: {name: set() for owner, name in _written(node) if owner == "self"}
        for node in classes
        if node.name in STATE
    }
    for node in classes:
        later = [part for part in node.body if getattr(part, "name", "") != "__init__"]
        for receiver, name in {pair for part in later for pair in _written(part)}:
            of = node.name.lower() if receiver == "self" else receiver
            is_known = any(one.startswith(of) for one in names)
            for owner, fields in found.items():
                if name in fields and (owner.lower().startswith(of) or not is_known):
                    fields[name].add(node.name)
    return found


def _written(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(of what, name) of the attributes that are assigned, whole or in part."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            target: ast.expr = node
            while isinstance(target, ast.Subscript):
                target = target.value
            if isinstance(target, ast.Attribute):
                receiver = target.value
                name = getattr(receiver, "id", None) or getattr(receiver, "attr", "?")
                yield str(name).strip("_"), target.attr


# ---- one chat -------------------------------------------------------------------------------------------------------


def chat_report(package: Path) -> str:
    """Files, lines and functions of both processes that one streamed chat of 8 tokens runs through, and how many of the
    files run while nobody asks: those of who watches the engine."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(TRACER)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((name, str(package.parent))),
            "HOUSE_FOLDER": name,
            "HOUSE_PACKAGE": str(package),
        }
        command = [sys.executable, "-m", "quire", "serve", "--port", "0"]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as server:
            try:
                url = _url_of(server)
                # the first of each kind makes what later ones keep
                _chat(url)
                time.sleep(1)
                (folder / "armed").touch()
                time.sleep(1)
                num_idle = len(_files_of(_called(folder)))
                _chat(url)
                time.sleep(0.5)
                # what the end of the server runs through is not the chat's
                (folder / "armed").unlink()
                time.sleep(0.2)
            finally:
                server.terminate()
        called = _called(folder)
    files = _files_of(called)
    num_lines = sum(Path(file).read_text(encoding="utf-8").count("\n") for file in files)
    of_them = f"{num_idle} of the files also while nobody asks"
    return f"{len(files)} files, {num_lines:,} lines, {len(called)} functions; {of_them}"


def _called(folder: Path) -> set[str]:
    return {line for seen in folder.glob("*.seen") for line in seen.read_text().splitlines()}


def _files_of(called: set[str]) -> set[str]:
    return {line.split("\t")[0] for line in called}


def _url_of(server: subprocess.Popen[bytes]) -> str:
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.search(rb"serves .* at (http://\S+)", line):
            return found[1].decode()
    raise SystemExit("the server ended before it served")


def _chat(url: str) -> None:
    messages = [{"role": "user", "content": "What is seven plus five?"}]
    body = {"messages": messages, "max_tokens": 8, "stream": True, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


# ---- the table ------------------------------------------------------------------------------------------------------


def rows_of(root: Path, *, with_chat: bool) -> Iterator[tuple[str, str]]:
    package = root / "src" / "quire"
    sources = sources_of(package)
    product = [source for source in sources if source.room != TESTS_MACHINERY]
    core = [source for source in product if source.room == "engine_core"]
    yield "package", size_of(sources)
    yield "without the tests' machinery", size_of(product)
    if with_chat:
        yield "one streamed chat of 8 tokens runs through", chat_report(package)
    yield "`a, b = x, y` per 1,000 lines", per_thousand(sum(map(num_packings, product)), product)
    yield "`self.a.b.c` per 1,000 lines of the engine core", per_thousand(sum(map(num_chains, core)), core)
    rooms = Counter[str]()
    for source in product:
        rooms[source.room] += source.num_lines
    total = rooms.total()
    yield "rooms", ", ".join(f"{room} {100 * lines / total:.0f} %" for room, lines in rooms.most_common(5))
    for name in ("server", "gateway"):
        yield name, inner_report(sources, package / "interfaces" / name)
    for owner, by_field in writers(core).items():
        several = sorted(name for name, those in by_field.items() if len(those) > 1)
        yield f"fields of {owner}", f"{len(by_field)}, of which {len(several)} have several writers {' '.join(several)}"
    pages = [*root.glob("*.md"), *(page for page in (root / "docs").rglob("*.md") if page.name not in GENERATED_PAGES)]
    num_words = sum(len(page.read_text(encoding="utf-8").split()) for page in pages)
    yield "documents written by hand", f"{num_words:,} words in {len(pages)} pages"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parents[1], help="a checkout")
    parser.add_argument("--chat", action="store_true", help="serve one chat and count what it runs through")
    options = parser.parse_args()
    for name, value in rows_of(options.folder.resolve(), with_chat=options.chat):
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
