"""House rules that a reader cannot be trusted to notice: names, and calls that run what they are given."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "quire"

# Uses of what FORBIDDEN_MODULES and FORBIDDEN_CALLS name, "path:name" with a reason. It is to stay empty: scanners
# refuse a whole release for one line, whether or not it can be reached.
ALLOWED_USES: dict[str, str] = {
    "worker/checkpoints/pickled_files.py:torch.load": "weights_only: tensors and plain containers, or an error",
}

EMPTY_NAMES = {"utils", "util", "common", "misc", "helpers", "helper"}
EMPTY_WORDS = {"Base", "Impl"}
# What unpickles or runs data. Weights are safetensors, messages are msgspec structs, options are literals.
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load"}
FORBIDDEN_METHODS = {"recv_pyobj", "send_pyobj"}  # pyzmq's pickles


def python_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def empty_name_of(path: str) -> str | None:
    """The part of a path that says nothing about what is inside."""
    return next((part for part in Path(path).with_suffix("").parts if part in EMPTY_NAMES), None)


def empty_word_of(class_name: str, is_model: bool) -> str | None:
    """The part of a class name that says what it is not: a base, an implementation, an edition."""
    words = re.findall(r"[A-Z]+(?![a-z])\d*|[A-Z][a-z]*\d*", class_name)
    for word in words:
        if word in EMPTY_WORDS or re.fullmatch(r"Manager\d+", word):
            return word
        # A model's own name may hold its edition: DeepseekV3ForCausalLM.
        if re.fullmatch(r"V\d+", word) and not is_model:
            return word
    return None


def forbidden_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found = [alias.name for alias in names if alias.name.split(".")[0] in FORBIDDEN_MODULES]
            case ast.ImportFrom(module=str(module), names=names):
                whole = [f"{module}.{alias.name}" for alias in names]
                found = [name for name in whole if module.split(".")[0] in FORBIDDEN_MODULES or name in FORBIDDEN_CALLS]
            case ast.Call(func=func, keywords=keywords):
                called = ast.unparse(func)
                found = [called] if called in FORBIDDEN_CALLS or called.rpartition(".")[2] in FORBIDDEN_METHODS else []
                found += [
                    "allow_pickle"
                    for keyword in keywords
                    if keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False"
                ]
                found += [
                    str(argument.value)
                    for argument in getattr(node, "args", [])[:1]
                    if called.endswith(("import_module", "__import__"))
                    and isinstance(argument, ast.Constant)
                    and argument.value in FORBIDDEN_MODULES
                ]
            case _:
                found = []
        yield from ((node.lineno, name) for name in found)


def test_no_file_has_a_name_that_says_nothing():
    assert [relative(path) for path in python_files() if empty_name_of(relative(path))] == []


def test_no_class_is_named_by_what_it_is_not():
    found = []
    for path in python_files():
        is_model = relative(path).startswith("worker/models/")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and empty_word_of(node.name, is_model):
                found.append(f"{relative(path)}:{node.lineno} {node.name}")
    assert found == []


def test_nothing_unpickles_or_runs_what_it_is_given():
    used = {
        f"{relative(path)}:{name}": line
        for path in python_files()
        for line, name in forbidden_uses(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert {name: line for name, line in used.items() if name not in ALLOWED_USES} == {}
    assert [name for name in ALLOWED_USES if name not in used] == [], "no longer needed in ALLOWED_USES"


@pytest.mark.parametrize(
    ("path", "part"),
    [("worker/utils.py", "utils"), ("worker/common/x.py", "common"), ("renderer/helpers.py", "helpers")],
)
def test_an_empty_file_name_is_found(path: str, part: str):
    assert empty_name_of(path) == part
    assert empty_name_of("worker/kv_cache.py") is None


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("BaseScheduler", "Base"),
        ("SchedulerBase", "Base"),
        ("LLMBase", "Base"),
        ("SchedulerImpl", "Impl"),
        ("BlockManager2", "Manager2"),
        ("EngineV1", "V1"),
        ("LLMV1", None),  # one word of capitals: not worth a cleverer pattern
        ("Database", None),
        ("Qwen3Attention", None),
        ("KVCacheManager", None),
        ("Implicit", None),
    ],
)
def test_an_empty_word_in_a_class_name_is_found(name: str, word: str | None):
    assert empty_word_of(name, is_model=False) == word


def test_a_model_may_carry_its_edition():
    assert empty_word_of("DeepseekV3ForCausalLM", is_model=True) is None
    assert empty_word_of("DeepseekV3ForCausalLM", is_model=False) == "V3"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import pickle", "pickle"),
        ("def f():\n    from marshal import loads", "marshal.loads"),
        ("import importlib\nimportlib.import_module('dill')", "dill"),
        ("eval('1')", "eval"),
        ("exec(text)", "exec"),
        ("torch.load(path)", "torch.load"),
        ("from torch import load", "torch.load"),
        ("socket.recv_pyobj()", "recv_pyobj"),
        ("numpy.load(path, allow_pickle=True)", "allow_pickle"),
    ],
)
def test_a_forbidden_use_is_found(text: str, name: str):
    assert [found for _, found in forbidden_uses(ast.parse(text)) if found.endswith(name)] != []


@pytest.mark.parametrize(
    "text", ["model.eval()", "cursor.exec()", "json.load(f)", "numpy.load(path, allow_pickle=False)"]
)
def test_what_only_looks_alike_is_left_alone(text: str):
    assert list(forbidden_uses(ast.parse(text))) == []
