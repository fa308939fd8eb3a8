"""Servers whose engine answers at once: Quire's, and vLLM's around a fake of its engine; each in its own process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

from rival_engines import DRIVERS, ENGINES, Build

sys.path.append(str(Path(__file__).parents[1]))  # a script has its own folder there, not the root with tests/

from tests.support.null_core import FIRST, MAX_MODEL_LEN, NUM, PACE

from quire.testing.fake_llm import fake_config, fake_renderer

_TICKS = os.sysconf("SC_CLK_TCK")
_START_SECONDS, _END_SECONDS, _QUIET_SECONDS = 300.0, 15.0, 60.0
_ANSWER_SECONDS = 120.0
# a model's folder that vLLM takes its tokenizer and its shape from
_EMBEDDED = Path(__file__).parents[1] / "src" / "quire" / "embedded"


class WrongAnswerError(Exception):
    """A stream that is not what the core said."""


@dataclass(frozen=True)
class Server:
    """How one is started; `{port}` stands for the port in its command."""

    name: str
    command: list[str]
    variables: dict[str, str] = field(default_factory=dict)


def quire_server() -> Server:
    return Server("quire", [sys.executable, "-m", "tests.support.null_server", "--port", "{port}"])


def vllm_server(folder: Path, *, with_statistics: bool = False) -> Server:
    """From the environment `vllm` of `rivals.py --build FOLDER --install`: no log of accesses, a token an event.

    `with_statistics`: as `vllm serve` runs by itself; without them it is faster, and has no figures of its requests.
    """
    engine = next(engine for engine in ENGINES if engine.name == "vllm")
    # before Build, which makes folders
    if not (folder / "vllm").is_dir() or not (build := Build(folder, folder / "model")).is_installed(engine):
        raise SystemExit(f"--rivals {folder}: no vLLM there. `python benchmarks/rivals.py --install --build {folder}`.")
    command = [build.python(engine), str(DRIVERS / "vllm_null_server.py"), "--model", str(_EMBEDDED)]
    command += ["--host", "127.0.0.1", "--port", "{port}", "--max-model-len", str(MAX_MODEL_LEN)]
    command += [
        "--served-model-name",
        fake_config().served_model_name,
        "--disable-uvicorn-access-log",
        "--stream-interval",
        "1",
    ]
    if not with_statistics:
        command.append("--disable-log-stats")
    variables = build.variables(engine, threads=1)
    variables |= {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "NULL_CORE_TOKENS": json.dumps([FIRST, NUM])}
    return Server("vllm-statistics" if with_statistics else "vllm", command, variables)


class Running:
    """One that was started; its first process is the API process."""

    def __init__(self, server: Server, steps_a_second: float, log: Path) -> None:
        self.name, self.port, self._log = server.name, _free_port(), log
        command = [part.format(port=self.port) for part in server.command]
        variables = {**os.environ, **server.variables, PACE: str(steps_a_second)}
        with log.open("wb") as words:
            self._process = subprocess.Popen(
                command, env=variables, stdout=words, stderr=words, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def wait_ready(self) -> None:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return
            time.sleep(0.2)
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise SystemExit(f"{self.name}: not ready ({lines[-1][:200] if lines else 'it said nothing'})")

    def processor_seconds(self) -> float:
        """Of the API process."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def wait_quiet(self) -> None:
        """Until it has done with streams whose client has gone."""
        end, before = time.monotonic() + _QUIET_SECONDS, self.processor_seconds()
        while time.monotonic() < end:
            time.sleep(0.3)
            before, last = self.processor_seconds(), before
            if before - last <= 0.02:
                return
        raise SystemExit(f"{self.name}: still at work {_QUIET_SECONDS:.0f} s after its last client had gone")

    def end(self) -> None:
        """With hundreds of streams in the middle of an answer nothing is to be put in order."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        # its engine's process is in the same group
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


class Answer:
    """What every stream says, in turn: the texts of the tokens, from the one on that this request begins with."""

    def __init__(self, texts: list[str]) -> None:
        self._ends = list(accumulate(len(text) for text in texts))
        self._num_by_end = {end: number for number, end in enumerate(self._ends, 1)} | {0: 0}

    def num_tokens(self, num_letters: int) -> int:
        """Tokens in the first so many letters. A length at which no token ends is an answer that is not right."""
        cycles, rest = divmod(num_letters, self._ends[-1])
        if rest not in self._num_by_end:
            raise WrongAnswerError(f"a text of {num_letters} letters: no token ends there.")
        return cycles * len(self._ends) + self._num_by_end[rest]


def first_answer(server: Running, path: str, body: dict[str, Any]) -> Answer:
    """Asks once for the whole cycle of tokens, and says in how many events it came: a late server joins some."""
    said = _said(server, path, body)
    answer = said_right(server.name, said, token_texts())
    print(f"{server.name}: a first answer that is right, {NUM} tokens in {len(said)} events", flush=True)
    return answer


def said_right(name: str, said: list[str], texts: list[str]) -> Answer:
    """The cycle as this stream said it: every token once, in order, from any one of them on."""
    for start in range(len(texts)):
        turned = texts[start:] + texts[:start]
        if "".join(said) == "".join(turned):
            return Answer(turned)
    raise WrongAnswerError(f"{name}: says {''.join(said)[:80]!r}, which is not what its core says.")


def _said(server: Running, path: str, body: dict[str, Any]) -> list[str]:
    asked = json.dumps({**body, "max_tokens": NUM}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}", asked, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as response:
            events = response.read().decode().split("\n\n")
    except urllib.error.HTTPError as error:
        raise WrongAnswerError(f"{server.name}: {error.code} {error.read().decode()[:200]}") from None
    return [text for event in events if (text := _text_of(event))]


def token_texts() -> list[str]:
    return [fake_renderer().token_text(token_id) for token_id in range(FIRST, FIRST + NUM)]


def _text_of(event: str) -> str:
    if not event.startswith("data: {"):
        return ""
    [choice] = json.loads(event[len("data: ") :])["choices"]
    text: str = choice.get("text") or choice.get("delta", {}).get("content") or ""
    return text


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
