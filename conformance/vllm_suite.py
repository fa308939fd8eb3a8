"""vLLM's own tests against `quire serve` and `quire.vllm`, from its source distribution. Nothing of it is kept here.

    pip download --no-deps --no-binary :all: --no-build-isolation vllm==0.33.0   # its archive, in a venv with torch
    pip install pytest-asyncio pytest-timeout pybase64 httpx
    python -m conformance.vllm_suite --sources FOLDER_OF_THE_SOURCES [TESTS ...]

Its server class, its runner and its package are stood in for by `conformance/vllm_plugin.py`; the models that its tests
name are folders made by `conformance/vllm_models.py`. A test that touches what only vLLM has inside counts as internal.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from conformance.vllm_reasons import DECISION, INSIDE, NOT_BUILT, REAL_MODEL, kind_of, reason_of

ROOT = Path(__file__).resolve().parents[1]
_OPENAI = "tests/entrypoints/openai"
_CHAT = f"{_OPENAI}/chat_completion"
TESTS = (
    *(f"{_CHAT}/test_{name}.py" for name in (
        "chat", "chat_completion", "chat_echo", "chat_logit_bias_validation", "completion_with_function_calling",
        "enable_force_include_usage", "include_reasoning", "logprob_token_ids", "root_path", "thinking_token_budget",
        "batched_chat_completions", "chat_completion_with_prompt_embeds",
    )),
    f"{_OPENAI}/completion/test_completion.py",
    f"{_OPENAI}/completion/test_prompt_validation.py",
    f"{_OPENAI}/completion/test_token_in_token_out.py",
    f"{_OPENAI}/completion/test_completion_with_prompt_embeds.py",
    f"{_OPENAI}/models/test_models.py",
    *(f"{_OPENAI}/test_{name}.py" for name in (
        "chunked_prompt", "return_token_ids", "return_tokens_as_ids", "stop_token_ids", "session_id",
    )),
    *(f"tests/entrypoints/serve/{name}" for name in (
        "tokenize/test_tokenization.py", "instrumentator/test_basic.py", "instrumentator/test_metrics.py",
        "lora/test_lora_adapters.py", "middleware/test_optional_middleware.py",
    )),
    "tests/entrypoints/anthropic/test_messages.py",
    "tests/entrypoints/openai/responses/test_simple.py",
    "tests/entrypoints/pooling/embed/test_online.py",
    "tests/entrypoints/pooling/embed/test_offline.py",
    "tests/entrypoints/pooling/basic/test_truncation.py",
    "tests/entrypoints/pooling/basic/test_encode.py",
    *(f"tests/entrypoints/llm/test_{name}.py" for name in (
        "chat", "generate", "prompt_validation", "collective_rpc", "struct_output_generate",
    )),
    *(f"tests/samplers/test_{name}.py" for name in (
        "beam_search", "ignore_eos", "logprobs", "no_bad_words", "non_finite_params",
    )),
)  # fmt: skip


_UNKNOWN = "not known"
_OPENING = """\
# vLLM's tests

Made by `python -m conformance.vllm_suite --sources FOLDER --report docs/vllm-tests.md`, which runs tests of vLLM's
source distribution against `quire serve` and `quire.vllm` ([how](conformance.md#vllms-tests)). The models that they
name are folders with the embedded weights. A reason that begins with "needs a real model" or "inside of vLLM" says
nothing about a server, and its tests are not counted.
"""

# a test looks into vLLM itself, or puts a part of it into the place of another
_INTERNAL = ("InternalOfVllmError", "'_Internal'", "Mock object")


@dataclass(frozen=True)
class Outcome:
    test: str
    kind: str  # passed, failed, internal, skipped
    text: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", required=True, type=Path, help="folder of vLLM's source distribution")
    parser.add_argument("--report", type=Path, help="file for the page about what did not pass")
    parser.add_argument("--folder", type=Path, help="where models, logs and reports of the run are written")
    parser.add_argument("--go-on", action="store_true", help="take the reports that are in --folder, and run the rest")
    parser.add_argument("tests", nargs="*", help="files or tests; all that are listed here if left out")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    outcomes = run(arguments.sources.resolve(), arguments.tests or TESTS, folder, goes_on=arguments.go_on)
    found = page(outcomes, _version_of(arguments.sources))
    print(found)
    if arguments.report is not None:
        arguments.report.write_text(f"{_OPENING}\n{found}\n", encoding="utf-8")
    return int(any(one.kind == "failed" and not reason_of(one.test) for one in outcomes))


def run(sources: Path, tests: tuple[str, ...] | list[str], folder: Path, *, goes_on: bool = False) -> list[Outcome]:
    """Each file in a pytest of its own: what one breaks in its process is not the next one's."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))),
        "QUIRE_VLLM_MODELS": str(folder / "models"),
        "OMP_NUM_THREADS": "1",
    }
    outcomes: list[Outcome] = []
    for name in tests:
        report = folder / f"{name.removeprefix('tests/').replace('/', '--')}.xml"
        command = [
            sys.executable, "-m", "pytest", "--noconftest", "-p", "conformance.vllm_plugin", "-p", "no:cacheprovider",
            "-o", "asyncio_mode=auto", "-c", os.devnull, f"--rootdir={sources}", f"--junitxml={report}", "-q",
            "--timeout=400", "--color=no", name,
        ]  # fmt: skip
        if not (goes_on and report.exists()):
            with report.with_suffix(".log").open("w") as log:
                subprocess.run(command, cwd=sources, env=environment, stdout=log, stderr=log, check=False)
        mine = list(read(report)) if report.exists() else [Outcome(name, "failed", "no report")]
        outcomes += mine
        print(f"{name}: {dict(Counter(one.kind for one in mine))}", flush=True)
    return outcomes


def read(report: Path) -> Iterator[Outcome]:
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').removeprefix('tests.')}::{case.get('name')}"
        bad = [one for one in case if one.tag in ("failure", "error", "skipped")]
        text = (bad[0].get("message") or "") + (bad[0].text or "") if bad else ""
        if not bad:
            kind = "passed"
        elif any(mark in text for mark in _INTERNAL):
            kind = "internal"
        else:
            kind = "skipped" if bad[0].tag == "skipped" else "failed"
        yield Outcome(name, kind, " ".join((bad[0].get("message") or "").split())[:160] if bad else "")


def page(outcomes: list[Outcome], version: str) -> str:
    """All that did not pass, by its reason: for docs/."""
    counts = Counter(one.kind for one in outcomes)
    failed = [one for one in outcomes if one.kind == "failed"]
    kinds = Counter(kind_of(reason_of(one.test)) or _UNKNOWN for one in failed)
    meant = counts["passed"] + kinds[DECISION] + kinds[NOT_BUILT] + kinds[_UNKNOWN]
    lines = [
        f"{counts['passed']} of {meant} that say something about a server passed (vLLM {version}, "
        f"{datetime.date.today():%Y-%m-%d}). Of the others "
        + ", ".join(f"{kinds[kind]}: {kind}" for kind in (DECISION, NOT_BUILT, _UNKNOWN))
        + f". Beside them {kinds[REAL_MODEL]} need a real model, {counts['internal'] + kinds[INSIDE]} look into vLLM, "
        f"and {counts['skipped']} were skipped.",
        "",
        "| why | number | tests |",
        "|---|---|---|",
    ]
    tests_by_reason: dict[str, Counter[str]] = {}
    for one in failed:
        reason = reason_of(one.test) or f"{_UNKNOWN}: {one.text.replace('|', '/')}"
        tests_by_reason.setdefault(reason, Counter())[_name_of(one.test)] += 1
    for reason in sorted(tests_by_reason, key=lambda reason: (_place_of(reason), reason)):
        tests = tests_by_reason[reason]
        names = ", ".join(f"`{name}`" + (f" ({count})" if count > 1 else "") for name, count in sorted(tests.items()))
        lines.append(f"| {reason} | {tests.total()} | {names} |")
    return "\n".join([*lines, "", *_files_of(outcomes)])


def _files_of(outcomes: list[Outcome]) -> Iterator[str]:
    """What was run at all."""
    kinds_by_file: dict[str, Counter[str]] = {}
    for one in outcomes:
        # of one that cannot even be imported there is the file alone
        file = one.test.removeprefix("::tests.").partition("::")[0].removeprefix("entrypoints.")
        file = re.sub(r"\.Test\w+$", "", file)
        kinds_by_file.setdefault(file, Counter())[one.kind] += 1
    yield f"Of {len(TESTS)} files {len(kinds_by_file)} were run:"
    yield ""
    yield "| file | passed | failed | look into vLLM |"
    yield "|---|---|---|---|"
    for file, kinds in sorted(kinds_by_file.items()):
        yield f"| `{file}` | {kinds['passed']} | {kinds['failed']} | {kinds['internal']} |"


def _name_of(test: str) -> str:
    """Without its parameters and the folders of its file."""
    file, _, name = test.partition("[")[0].rpartition("::")
    return f"{file.rpartition('.')[2]}::{name}"


def _place_of(reason: str) -> int:
    """What says something about a server stands first."""
    order = (_UNKNOWN, DECISION, NOT_BUILT, REAL_MODEL, INSIDE)
    return next(place for place, kind in enumerate(order) if reason.startswith(kind))


def _version_of(sources: Path) -> str:
    found = re.search(r"^Version: (.+)$", (sources / "PKG-INFO").read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else "?"


if __name__ == "__main__":
    raise SystemExit(main())
