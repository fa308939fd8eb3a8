"""Imports point one way: the layers of the package, read from its source.

The tables below are the sentence of docs/architecture.md ("Imports point one way") in a form that can be checked. The
test parses every module, finds what it imports, and fails on an arrow that points up, on a cycle, and on `torch` where
it must not be. An import counts as *top* if it runs when the module is imported, as *lazy* inside a function, and as
*typing* under `if TYPE_CHECKING`.
"""

import ast
import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "quire"

# ---- the plan of the house ------------------------------------------------------------------------------------------

# Which modules belong to which room. The first pattern that fits decides; `*` also crosses dots, and the folder itself
# belongs to its room.
ROOMS = {
    "front door": ("quire", "quire.vllm"),
    "server": ("quire.interfaces.server",),
    "gateway": ("quire.interfaces.gateway",),
    "deploy": ("quire.interfaces.deploy",),
    "compat": ("quire.interfaces.compat",),
    "command line": ("quire.interfaces.cli", "quire.__main__"),
    "interfaces": ("quire.interfaces",),
    "renderer": ("quire.renderer",),
    "engine_client": ("quire.engine_client",),
    "simulation": ("quire.simulation",),
    "request": (
        "quire.engine_core.request",
        "quire.engine_core.rows",
        "quire.engine_core.block_table",
        "quire.engine_core.step_observer",
        "quire.engine_core.whole_ranges",
    ),
    "scheduler": ("quire.engine_core.scheduler",),
    "decoding": ("quire.engine_core.decoding",),
    "executor": ("quire.engine_core.executor",),
    "structured_output": ("quire.structured_output",),
    "kv_cache_manager": ("quire.engine_core.kv_cache_manager",),
    "engine_core": ("quire.engine_core",),
    "connector scheduler half": ("quire.kv_connectors.*.scheduler",),
    "connector worker half": ("quire.kv_connectors.*.worker", "quire.kv_connectors.*.stage"),
    "kv_connectors": ("quire.kv_connectors",),
    "worker": ("quire.worker",),
    "modeling": ("quire.modeling",),
    "testing": ("quire.testing",),
    "observability": ("quire.observability",),
    "processes": ("quire.processes",),
    "routing": ("quire.routing",),
    "messages": (
        "quire.messages",
        "quire.chain_hashes",
        "quire.kv_events",
        "quire.state_layout",
        "quire.message_encoding",
        "quire.hooks",
        "quire.logits_processors",
        "quire.outputs",
        "quire.sampling_params",
        "quire.thought_marks",
        "quire.beam_search_params",
        "quire.lora_request",
        "quire.pooling_params",
        "quire.structured_outputs_params",
        "quire.uniform_numbers",
        "quire.watermark",
        "quire.parameter_checks",
    ),
    "config": ("quire.config",),
    "ground": (
        "quire.errors",
        "quire.version",
        "quire.embedded",
        "quire.failpoints",
        "quire.cache_folder",
        "quire.json_files",
        "quire.panics",
        "quire.asked_process",
    ),
}

# From the top down. A room may import its own modules and every floor below it. Rooms that stand on one floor are
# siblings: neither imports the other.
FLOORS = (
    ("front door",),
    ("command line",),
    ("deploy",),  # whole servers, as others see them
    ("gateway", "compat"),
    ("server",),
    ("interfaces",),
    ("renderer", "engine_client", "simulation"),
    ("engine_core",),
    ("scheduler", "executor"),
    ("decoding",),  # the scheduler hands each sampled token to the method that decodes the request
    ("kv_cache_manager", "connector scheduler half"),
    ("request", "kv_connectors"),
    ("observability",),
    ("routing",),  # pure: it knows no engine
    ("structured_output",),  # the front checks a grammar, the worker follows it
    ("messages",),
    ("config",),
    ("processes",),
    ("ground",),
)

# Rooms that stand apart from the floors: what each may import, and nothing else.
BELOW_KV_CACHE_MANAGER = ("observability", "structured_output", "messages", "config", "ground")
APART = {
    "worker": ("connector worker half", "kv_connectors", *BELOW_KV_CACHE_MANAGER),
    "connector worker half": ("kv_connectors", *BELOW_KV_CACHE_MANAGER),
    "modeling": ("worker", *BELOW_KV_CACHE_MANAGER),
    "testing": tuple(ROOMS),
}

# Arrows that the floors alone would forbid, allowed inside functions only.
LAZY_ONLY = {
    ("executor", "worker"): "the process that holds the engine core stays free of torch until it builds a worker",
    ("kv_connectors", "connector scheduler half"): "the table of connectors finds a half by name",
    ("kv_connectors", "connector worker half"): "the same",
    ("front door", "modeling"): "`quire.modeling` is for authors of models; `import quire` must not pay for it",
    ("command line", "modeling"): "`quire verify` holds the served model against the one that is trained",
    ("engine_client", "engine_core"): "the client reaches the core only where it launches it",
    ("engine_client", "executor"): "the same",
}

# What takes seconds to import, and the rooms that may import it at the top. Others do it inside functions.
HEAVY = ("torch", "transformers", "triton")
HEAVY_ROOMS = ("worker", "connector worker half", "modeling", "testing")
# The engine core is a state machine without tensors: these rooms never import them, not even inside functions.
NEVER_HEAVY = ("engine_core", "request", "scheduler", "decoding", "kv_cache_manager", "messages", "config", "ground")


# ---- reading the source ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    importer: str
    imported: str  # a module of the package, or the dotted name of something outside
    kind: str  # top, lazy or typing
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported} ({self.kind})"


def modules_of(source: Path) -> dict[str, Path]:
    """Module name -> file, for the package whose folder this is."""
    modules = {}
    for path in sorted(source.rglob("*.py")):
        parts = (source.name, *path.relative_to(source).with_suffix("").parts)
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def statements_with_kind(node: ast.AST, kind: str = "top") -> Iterator[tuple[ast.AST, str]]:
    for child in ast.iter_child_nodes(node):
        yield child, kind
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from statements_with_kind(child, "lazy")
        elif isinstance(child, ast.If) and is_type_checking(child.test):
            for statement in child.body:
                yield statement, "typing"
                yield from statements_with_kind(statement, "typing")
            for statement in child.orelse:
                yield statement, kind
                yield from statements_with_kind(statement, kind)
        else:
            yield from statements_with_kind(child, kind)


def names_imported(node: ast.AST, package: str) -> Iterator[tuple[str, str | None]]:
    """(module, name taken from it) for each part of an import; `package` is what a leading dot stands for."""
    match node:
        case ast.Import(names=names):
            yield from ((alias.name, None) for alias in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            base = package.rsplit(".", level - 1)[0] if level else ""
            origin = ".".join(part for part in (base, module) if part)
            yield from ((origin, alias.name) for alias in names)
        case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
            if ast.unparse(func) in ("importlib.import_module", "import_module", "__import__"):
                yield name, None


def imports_of(source: Path) -> list[Import]:
    modules = modules_of(source)
    found = []
    for module, path in modules.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for node, kind in statements_with_kind(ast.parse(path.read_text(encoding="utf-8"))):
            for origin, name in names_imported(node, package):
                # `from package import name` reaches a module if there is one of that name, else the package itself.
                target = f"{origin}.{name}" if f"{origin}.{name}" in modules else origin
                found.append(Import(module, target, kind, node.lineno))
    return found


def room_of(module: str) -> str | None:
    for room, patterns in ROOMS.items():
        for pattern in patterns:
            # The front door is one module; every other pattern covers what stands inside it.
            if module == pattern or (pattern != "quire" and fnmatch.fnmatchcase(module, f"{pattern}.*")):
                return room
            if "*" in pattern and fnmatch.fnmatchcase(module, pattern):
                return room
    return None


# ---- the rules ------------------------------------------------------------------------------------------------------


def why_not(importer: str, imported: str, kind: str) -> str | None:
    """The reason why one room must not import another, or None."""
    if importer == imported:
        return None
    if (importer, imported) in LAZY_ONLY:
        return "allowed inside functions only: " + LAZY_ONLY[importer, imported] if kind == "top" else None
    if importer in APART:
        return None if imported in APART[importer] else f"{importer} stands apart and may not import {imported}"
    if imported in APART:
        return f"{imported} stands apart; {importer} may not import it"
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    if floor[importer] == floor[imported]:
        return f"{importer} and {imported} are siblings: neither imports the other"
    return None if floor[importer] < floor[imported] else f"the arrow from {importer} to {imported} points up"


def broken_arrows(source: Path) -> list[str]:
    broken = []
    for one in imports_of(source):
        importer = room_of(one.importer)
        if importer is None:
            broken.append(f"{one.importer} belongs to no room: enter it in ROOMS and FLOORS")
        elif one.imported.split(".")[0] in HEAVY:
            if one.kind == "top" and importer not in HEAVY_ROOMS:
                broken.append(f"{one}: import it inside the function that needs it")
            elif one.kind == "lazy" and importer in NEVER_HEAVY:
                broken.append(f"{one}: {importer} has no tensors")
        elif one.imported.split(".")[0] == source.name:
            imported = room_of(one.imported)
            reason = "no such room" if imported is None else why_not(importer, imported, one.kind)
            if reason:
                broken.append(f"{one}: {reason}")
    return sorted(set(broken))


def cycles(source: Path) -> list[str]:
    """Groups of modules that import each other at the top, by Tarjan's algorithm."""
    modules = modules_of(source)
    graph: dict[str, list[str]] = {module: [] for module in modules}
    for one in imports_of(source):
        if one.kind == "top" and one.imported in modules and one.imported != one.importer:
            graph[one.importer].append(one.imported)
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for imported in graph[module]:
            if imported not in order:
                visit(imported)
                low[module] = min(low[module], low[imported])
            elif imported in stack:
                low[module] = min(low[module], order[imported])
        if low[module] == order[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                groups.append(" <-> ".join(sorted(group)))

    for module in graph:
        if module not in order:
            visit(module)
    return sorted(groups)


# ---- the package keeps them -----------------------------------------------------------------------------------------


def test_no_arrow_of_the_package_points_up():
    broken = broken_arrows(SOURCE)
    assert not broken, "\n" + "\n".join(broken)


def test_no_modules_of_the_package_import_each_other():
    found = cycles(SOURCE)
    assert not found, "\n" + "\n".join(found)


def test_each_room_stands_in_one_place():
    placed = [room for rooms in FLOORS for room in rooms] + list(APART)
    assert sorted(placed) == sorted(ROOMS)


# ---- and the test can fail ------------------------------------------------------------------------------------------


def write_tree(root: Path, files: dict[str, str]) -> Path:
    source = root / "quire"
    for name, text in files.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return source


SCHEDULER = "engine_core/scheduler/scheduler.py"
ALLOWED = {
    "downwards": ("interfaces/llm.py", "from quire.engine_core.engine_core import EngineCore"),
    "over several floors": ("renderer/renderer.py", "from quire.errors import QuireError"),
    "inside a room": (SCHEDULER, "from . import queues"),
    "the two numbers": (SCHEDULER, "from quire.engine_core.request import Sequence"),
    "a method of decoding": (SCHEDULER, "from quire.engine_core.decoding.method import DecodingMethod"),
    "the manager knows the sequence": (
        "engine_core/kv_cache_manager/manager.py",
        "from quire.engine_core.request import Sequence",
    ),
    "the launcher": ("engine_client/launch.py", "def launch():\n    from quire.engine_core.process import run"),
    "the executor": ("engine_core/executor/in_process.py", "def start():\n    from quire.worker.worker import Worker"),
    "a worker half": ("worker/worker.py", "from quire.kv_connectors.cpu.worker import CpuConnector"),
    "torch in a worker": ("worker/worker.py", "import torch.nn.functional as F"),
    "torch in a worker half": ("kv_connectors/cpu/worker.py", "import torch"),
    "transformers, lazily": ("renderer/tokenizer.py", "def load():\n    from transformers import AutoTokenizer"),
    "torch in an annotation": (
        "engine_core/executor/in_process.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
    ),
    "modeling re-exports": ("modeling.py", "from quire.worker.layers.linear import ColumnParallelLinear"),
}
FORBIDDEN = {
    "up": (SCHEDULER, "from quire.engine_core.engine_core import EngineCore", "points up"),
    "up, inside a function": (SCHEDULER, "def f():\n    from quire.interfaces.llm import LLM", "points up"),
    "up, for a type": (
        SCHEDULER,
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from quire.interfaces.llm import LLM",
        "points up",
    ),
    "up, by a relative import": (SCHEDULER, "from ..engine_core import EngineCore", "points up"),
    "up, by name": (
        SCHEDULER,
        "import importlib\ndef f():\n    importlib.import_module('quire.interfaces.llm')",
        "points up",
    ),
    "a method of decoding that schedules": (
        "engine_core/decoding/beam_search.py",
        "from quire.engine_core.scheduler import scheduler",
        "points up",
    ),
    "siblings in the core": (SCHEDULER, "from quire.engine_core.executor import in_process", "siblings"),
    "siblings": ("renderer/renderer.py", "from quire.engine_client import client", "siblings"),
    "the client, at the top": (
        "engine_client/client.py",
        "from quire.engine_core.process import run",
        "inside functions",
    ),
    "the executor, at the top": ("engine_core/executor/ray.py", "from quire.worker.worker import Worker", "inside"),
    "a worker from elsewhere": ("interfaces/llm.py", "def f():\n    import quire.worker.worker", "stands apart"),
    "a worker that knows the core": (
        "worker/worker.py",
        "from quire.engine_core.request import Sequence",
        "stands apart",
    ),
    "a worker and a scheduler half": ("worker/worker.py", "import quire.kv_connectors.cpu.scheduler", "stands apart"),
    "testing in production": ("interfaces/llm.py", "from quire.testing.fakes import FakeModel", "stands apart"),
    "config knows messages": ("config/options.py", "from quire.messages import Grant", "points up"),
    "the front door": ("interfaces/llm.py", "from quire import __version__", "points up"),
    "torch": ("interfaces/llm.py", "import torch", "inside the function"),
    "torch, in a try": ("interfaces/llm.py", "try:\n    import torch\nexcept ImportError:\n    torch = None", "inside"),
    "torch, in a class": ("interfaces/llm.py", "class A:\n    import torch", "inside"),
    "torch in the core": (SCHEDULER, "def f():\n    import torch", "no tensors"),
    "a new room": ("colours/red.py", "import quire.errors", "no room"),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_an_arrow_that_points_down_is_allowed(tmp_path: Path, case: str):
    name, text = ALLOWED[case]
    assert broken_arrows(write_tree(tmp_path, {name: text})) == []


@pytest.mark.parametrize("case", FORBIDDEN)
def test_a_wrong_arrow_is_found(tmp_path: Path, case: str):
    name, text, reason = FORBIDDEN[case]
    [broken] = broken_arrows(write_tree(tmp_path, {name: text, "engine_core/engine_core.py": ""}))
    assert reason in broken


def test_a_cycle_is_found_and_a_lazy_import_makes_none(tmp_path: Path):
    ring = {"config/a.py": "from . import b", "config/b.py": "from quire.config import c"}
    source = write_tree(tmp_path, {"config/__init__.py": "", **ring, "config/c.py": "import quire.config.a"})
    assert cycles(source) == ["quire.config.a <-> quire.config.b <-> quire.config.c"]
    write_tree(tmp_path, {"config/c.py": "def f():\n    import quire.config.a"})
    assert cycles(source) == []


def test_a_package_that_gathers_its_modules_is_no_cycle(tmp_path: Path):
    gather = {"config/__init__.py": "from quire.config.a import A", "config/a.py": "from quire.config.b import B"}
    assert cycles(write_tree(tmp_path, {**gather, "config/b.py": "B = 1"})) == []
    assert cycles(write_tree(tmp_path, {"config/b.py": "from quire.config import A"})) != []
