"""The clients that people use, each in an environment of its own under build/clients, which is made at first use.

A client is a script that gets URL, KEY and MODEL from the environment and prints a line a check: `ok NAME` or
`FAIL NAME: reason`. It passes if all are ok, it ends with 0, and it has warned of nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
BUILD = FOLDER.parents[1] / "build" / "clients"


@dataclass(frozen=True)
class Client:
    """What is installed and what is run."""

    name: str
    script: str
    # an environment may serve several clients; `npm` is Node's
    environment: str
    packages: tuple[str, ...]
    # shown with the score
    version_of: str


# mcp: LiteLLM imports it for calls of tools; transformers: the harness counts tokens with it
_LLM = ("litellm", "mcp", "langchain-openai", "lm_eval[api]", "transformers", "instructor", "anthropic")
CLIENTS = (
    Client("openai for Node", "openai_node.mjs", "npm", ("openai",), "openai"),
    Client("anthropic", "anthropic_client.py", "python", _LLM, "anthropic"),
    Client("LangChain", "langchain_client.py", "python", _LLM, "langchain-openai"),
    Client("LiteLLM", "litellm_client.py", "python", _LLM, "litellm"),
    Client("Instructor", "instructor_client.py", "python", _LLM, "instructor"),
    Client("lm-evaluation-harness", "lm_eval_client.py", "python", _LLM, "lm_eval"),
)


def run_clients(url: str, key: str, model: str, tokenizer: str) -> bool:
    """True if every client that can be run here passed. `tokenizer`: its folder or name, for those that need it."""
    if not model:
        from conformance.target import Target

        target = Target(url, api_key=key)
        model = target.model
        target.close()
    print()
    # all are run, also after one that failed
    return sum(not _run(client, url, key, model, tokenizer) for client in CLIENTS) == 0


def _run(client: Client, url: str, key: str, model: str, tokenizer: str) -> bool:
    made = _environment(client)
    if isinstance(made, str):
        print(f"skip  {client.name}: {made}")
        return True
    environment = {**os.environ, "URL": f"{url}/v1", "KEY": key, "MODEL": model, "OPENAI_API_KEY": key}
    environment.pop("PYTHONPATH", None)
    if tokenizer:
        environment["TOKENIZER"] = tokenizer
    done = subprocess.run(made, capture_output=True, text=True, env=environment, check=False, cwd=BUILD)
    lines = done.stdout.splitlines()
    passed = [line for line in lines if line.startswith("ok ")]
    failed = [line for line in lines if line.startswith("FAIL ")]
    warned = [line for line in done.stderr.splitlines() if "warn" in line.lower()]
    is_good = bool(passed) and not failed and not warned and done.returncode == 0
    score = f"{len(passed)}/{len(passed) + len(failed)}, {len(warned)} warnings"
    print(f"{'ok' if is_good else 'FAIL':<4}  {client.name} {_version(client)}: {score}")
    if not is_good:
        print("\n".join([*failed, *warned, done.stderr[-3000:]]))
    return is_good


def _environment(client: Client) -> list[str] | str:
    """The command that runs the script, or why it cannot be run."""
    BUILD.mkdir(parents=True, exist_ok=True)
    if client.environment == "npm":
        return _node(client)
    folder = BUILD / client.environment
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    wanted = " ".join(client.packages)
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *client.packages]
        if subprocess.run(install, check=False).returncode:
            return "its packages cannot be installed here"
        stamp.write_text(wanted)
    return [str(python), str(FOLDER / client.script)]


def _node(client: Client) -> list[str] | str:
    node, npm = shutil.which("node"), shutil.which("npm")
    if not node or not npm:
        return "node and npm are not installed (sudo apt install nodejs npm)"
    folder = BUILD / "npm"
    folder.mkdir(exist_ok=True)
    if not (folder / "node_modules" / client.version_of).exists():
        install = [npm, "install", "--no-audit", "--no-fund", "--silent", *client.packages]
        if subprocess.run(install, cwd=folder, check=False).returncode:
            return "its package cannot be installed here"
    # modules are looked for beside the script
    script = folder / client.script
    script.write_text((FOLDER / client.script).read_text())
    return [node, str(script)]


def _version(client: Client) -> str:
    if client.environment == "npm":
        import json

        return str(json.loads((BUILD / "npm/node_modules" / client.version_of / "package.json").read_text())["version"])
    code = f"import importlib.metadata as m; print(m.version({client.version_of!r}))"
    python = BUILD / client.environment / "bin" / "python"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
