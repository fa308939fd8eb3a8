"""Schemathesis against the real server: what /openapi.json describes is tried, operation by operation.

    python -m conformance.fuzz --cases 300                 goes on where an earlier run of the same settings stopped
    python -m conformance.fuzz --operation create_chat_completion

Right and wrong data, all phases (examples, coverage, fuzzing, stateful). It is installed into build/fuzz at first use.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from conformance.own_server import own_server

BUILD = Path(__file__).parents[1] / "build"
_PYTHON = BUILD / "fuzz" / "bin" / "python"
_STATE = BUILD / "fuzz-api.json"
_CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "negative_data_rejection", "unsupported_method", "allow_header_conformance",
    "missing_required_header", "ignored_auth",
)  # fmt: skip
# Not an operation: requests one after the other, each made of what an earlier one answered.
_SEQUENCES = "sequences"
# Long answers would measure the model, not the server.
_MAX_MODEL_LEN = 256


def main() -> int:
    arguments = _parser().parse_args()
    _install()
    with own_server(secrets.token_urlsafe(16), "--max-model-len", str(_MAX_MODEL_LEN)) as (server, key):
        runs = _Runs(server.wait_ready(300), key, arguments)
        for operation in [arguments.operation] if arguments.operation else runs.operations:
            runs.run(operation)
            if server.has_ended:
                print(server.output[-5000:], file=sys.stderr)
                raise SystemExit(f"{operation}: the server ended")
        has_traceback = "Traceback" in server.output
        if has_traceback:
            print(server.output[server.output.index("Traceback") :][:5000], file=sys.stderr)
    return int(not runs.summary() or has_traceback)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m conformance.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=300, help="of the fuzzing phase, an operation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="that an answer may take")
    parser.add_argument("--operation", help="nothing but this operationId, also if it was done before")
    return parser


def _install() -> None:
    if not _PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", str(BUILD / "fuzz")], check=True)
    if not _PYTHON.with_name("schemathesis").exists():
        pip = [str(_PYTHON), "-m", "pip", "install", "-q", "--disable-pip-version-check", "schemathesis"]
        subprocess.run(pip, check=True)


class _Runs:
    """One run an operation; what is done is written down at once."""

    def __init__(self, url: str, key: str, arguments: argparse.Namespace) -> None:
        self._url, self._key, self._arguments = url, key, arguments
        request = urllib.request.Request(f"{url}/openapi.json", headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request) as response:
            data = response.read()
        document = json.loads(data)
        self.operations = [one["operationId"] for methods in document["paths"].values() for one in methods.values()]
        self.operations.append(_SEQUENCES)
        # another interface or other settings: begin anew
        settings = [hashlib.sha256(data).hexdigest(), arguments.cases, arguments.seed, arguments.seconds]
        state = json.loads(_STATE.read_text()) if _STATE.exists() else {}
        self._state: dict[str, Any] = state if state.get("settings") == settings else {"settings": settings, "done": {}}

    def run(self, operation: str) -> None:
        if operation in self._state["done"] and not self._arguments.operation:
            return
        report = BUILD / f"fuzz-{operation}.json"
        report.unlink(missing_ok=True)
        began = time.monotonic()
        environment = {**os.environ, "SCHEMATHESIS_HOOKS": "fuzz_hooks", "PYTHONPATH": str(Path(__file__).parent)}
        command = self._command(operation, report)
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=BUILD, env=environment)
        found = json.loads(report.read_text()) if report.exists() else {}
        num_cases = found.get("test_cases", {}).get("generated", 0)
        row = {"cases": num_cases, "passed": done.returncode == 0, "seconds": round(time.monotonic() - began, 1)}
        self._state["done"][operation] = row
        _STATE.write_text(json.dumps(self._state, indent=1))
        print(
            f"{'ok' if row['passed'] else 'FAIL':<4}  {operation:<28} {num_cases:>6} cases {row['seconds']:>7} s",
            flush=True,
        )
        if not row["passed"]:
            print(done.stdout[-12_000:], done.stderr[-2_000:], flush=True)

    def _command(self, operation: str, report: Path) -> list[str]:
        options = self._arguments
        return [
            str(_PYTHON.with_name("schemathesis")), "run", f"{self._url}/openapi.json",
            "--header", f"Authorization: Bearer {self._key}",
            *(("--phases", "stateful") if operation == _SEQUENCES else ("--include-operation-id", operation)),
            "--mode", "all",
            "--max-examples", str(options.cases),
            "--seed", str(options.seed),
            "--checks", ",".join(_CHECKS),
            "--max-response-time", str(options.seconds),
            "--report-json-path", str(report),
            "--continue-on-failure", "--no-color", "--generation-database", "none",
            "--suppress-health-check", "all", "--warnings", "off",
        ]  # fmt: skip

    def summary(self) -> bool:
        rows = self._state["done"].values()
        num_failed = sum(not row["passed"] for row in rows)
        print(f"{len(rows)} operations, {sum(row['cases'] for row in rows)} cases, {num_failed} operations failed")
        return num_failed == 0


if __name__ == "__main__":
    raise SystemExit(main())
