"""`import quire` answers at once: what takes seconds to import is imported by those who need it.

Nothing here is timed; a busy machine would decide. What was imported is looked up in a fresh interpreter.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
HEAVY = ("torch", "transformers", "triton")

REPORT = """
import json, sys
{statement}
print(json.dumps([name for name in {names} if name in sys.modules]))
"""


def imported_by(statement: str, names: tuple[str, ...]) -> list[str]:
    """Those of `names` that are in sys.modules after the statement ran in a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", REPORT.format(statement=statement, names=list(names))],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "statement",
    [
        "import quire",
        "from quire import SamplingParams",
        "from quire import errors",
        "import quire.config",
        "import quire.messages",
        "import quire.interfaces.cli",
    ],
)
def test_takes_no_torch_and_no_transformers(statement: str):
    assert imported_by(statement, HEAVY) == []


def test_the_version_needs_no_server_either():
    assert imported_by("import quire; quire.__version__", ("numpy", "fastapi", "uvicorn", "pydantic")) == []


def test_keys_are_checked_and_the_engine_starts_before_fastapi_is_imported():
    assert imported_by("import quire.interfaces.gateway.run", ("fastapi", "starlette", "pydantic")) == []


def test_a_server_imports_no_database_before_something_is_stored():
    assert imported_by("import quire.interfaces.server.app", ("fastapi", "sqlalchemy")) == ["fastapi"]


def test_what_is_imported_is_found():
    assert imported_by("import json, decimal", ("decimal", "torch")) == ["decimal"]


# Two seconds of processor time that a native model has no use for; and what is for outputs of a form alone.
COMPILER = ("transformers", "torch._dynamo", "torch._inductor", "sympy", "llguidance")
OPTIONS = "device='cpu', num_threads=1, max_num_seqs=4"
LLM_STATEMENT = f"""
from quire import LLM, SamplingParams
with LLM({OPTIONS}) as llm:
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    outputs = llm.generate("2+3=", sampling, use_tqdm=False)
    outputs += llm.chat([{{"role": "user", "content": "Hi"}}], sampling, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 2]
"""
CORE_STATEMENT = """
from quire.config.model_source import embedded_path
from quire.testing.greedy import generate_greedy, real_core
core = real_core(embedded_path())
assert len(generate_greedy(core, [[5, 6, 7]], 2)[0]) == 2
core.shutdown()
"""


@pytest.mark.parametrize("statement", [CORE_STATEMENT, LLM_STATEMENT], ids=["core", "llm"])
def test_a_native_model_starts_and_answers_without_transformers_and_compiler(statement: str):
    assert imported_by(statement, (*COMPILER, "torch")) == ["torch"]
