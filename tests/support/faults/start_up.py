"""Starts that cannot succeed (F18): each ends soon, with a status that is not 0, one clear line, and nobody left."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from tests.support.faults.case import Case, Core, Figures
from tests.support.faults.stage import Setting, left_in, private_folder

import quire

_MOST_SECONDS = 60.0
# to find that out libraries and a model must be loaded, which on a busy machine takes a while
_WITH_LOADING = 20.0
_WITHOUT = 10.0
# Of which the last line must hold the words; `options` are made in the folder of the trial.
Prepare = Callable[[Path], list[str]]


def model_in(folder: Path) -> Path:
    """A copy of the model in the package, to be broken."""
    return Path(shutil.copytree(Path(quire.__file__).parent / "embedded", folder / "model"))


def _with_config(**changes: object) -> Prepare:
    def prepare(folder: Path) -> list[str]:
        file = model_in(folder) / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **changes}), encoding="utf-8")
        return [str(file.parent)]

    return prepare


def _with_file(name: str, content: bytes | None) -> Prepare:
    """One file of the model has another content, or is not there."""

    def prepare(folder: Path) -> list[str]:
        file = model_in(folder) / name
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        return [str(file.parent)]

    return prepare


def _cut_weights(folder: Path) -> list[str]:
    [weights] = list(model_in(folder).glob("*.safetensors"))
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    return [str(weights.parent)]


def _options(*options: str) -> Prepare:
    return lambda folder: list(options)


def _case(name: str, words: str, prepare: Prepare, *, takes_port: bool = False, most_seconds: float = _WITHOUT) -> Case:
    async def run(setting: Setting) -> Figures:
        with private_folder() as folder, _port(takes_port) as port:
            return await fails(folder, [*prepare(folder), "--port", str(port)], words)

    return Case(f"F18 {name}", "a start that cannot succeed", run, {"exit": most_seconds}, 1, Core.EMBEDDED)


def _port(is_taken: bool) -> AbstractContextManager[object]:
    if not is_taken:
        return nullcontext(0)
    return _TakenPort()


class _TakenPort:
    def __enter__(self) -> int:
        self._socket = socket.create_server(("127.0.0.1", 0))
        return int(self._socket.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self._socket.close()


async def fails(folder: Path, options: list[str], words: str) -> Figures:
    (folder / "tmp").mkdir()
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "quire.interfaces.cli", "serve", *options,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(folder / "tmp")},
    )  # fmt: skip
    # the engine's process inherits the pipe, so this returns only when both are gone
    try:
        async with asyncio.timeout(_MOST_SECONDS):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
    took = time.monotonic() - began
    lines = said.decode(errors="replace").strip().splitlines()
    assert process.returncode not in (0, None), f"exit status {process.returncode}"
    assert lines[-1].startswith("quire: error: "), lines[-3:]
    assert words in lines[-1], lines[-1]
    assert not any("Traceback" in line for line in lines), lines
    assert not left_in(folder / "tmp")
    return {"exit": took}


CASES = (
    _case("a port in use", "in use", _options(), takes_port=True),
    _case("no such host", "not an address of this machine", _options("--host", "no.such.host.invalid")),
    _case("an unknown option", "--max-nun-seqs", _options("--max-nun-seqs", "4")),
    _case("a value out of bounds", "shutdown", _options("--shutdown-timeout", "-1")),
    _case("no such model", "nowhere", _options("./nowhere")),
    _case("no config.json", "config.json", _with_file("config.json", None)),
    _case("a config.json that is no JSON", "config.json", _with_file("config.json", b"{")),
    _case(
        "an unknown architecture",
        "model_type",
        _with_config(model_type="no_such_model", architectures=["NoSuch"]),
        most_seconds=_WITH_LOADING,
    ),
    _case("impossible sizes", "config.json", _with_config(num_attention_heads=-1), most_seconds=_WITH_LOADING),
    _case("a bad dtype", "dtype", _options("--dtype", "float7")),
    _case("no weights", "safetensors", _with_file("model.safetensors", None), most_seconds=_WITH_LOADING),
    _case(
        "corrupt weights", "safetensors", _with_file("model.safetensors", b"\xff" * 4096), most_seconds=_WITH_LOADING
    ),
    _case("weights cut short", "safetensors", _cut_weights, most_seconds=_WITH_LOADING),
    _case("a broken tokenizer", "tokenizer", _with_file("tokenizer.json", b"{"), most_seconds=_WITH_LOADING),
    _case(
        "no memory for the cache",
        "kv_cache_memory_bytes",
        _options("--kv-cache-memory-bytes", "900GiB"),
        most_seconds=_WITH_LOADING,
    ),
    _case("a device that is not there", "cuda", _options("--device", "cuda"), most_seconds=_WITH_LOADING),
    _case("a file of prefixes that is not there", "pinned_prefixes", _options("--pinned-prefixes", "/nowhere.json")),
)
