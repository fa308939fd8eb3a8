"""`quire run-batch`: answers a file of requests without a server. Files, lines and answers are those of /v1/batches."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import EngineDeadError, OptionError, UserError
from quire.interfaces.cli.engine_flags import add_engine_flags, add_model_argument, engine_options_of
from quire.interfaces.cli.session import open_engine
from quire.interfaces.progress import Progress

if TYPE_CHECKING:
    from quire.interfaces.async_llm import AsyncLLM
    from quire.interfaces.gateway.batches.endpoint_calls import Called, EndpointCalls
    from quire.interfaces.gateway.batches.input_lines import InputLine
    from quire.interfaces.gateway.batches.results import Results

# some requests have an error for an answer
SOME_FAILED = 3
_DEFAULT_CONCURRENCY = "256"
_MAX_ERRORS_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] -i INPUT -o OUTPUT [options]"
    add_model_argument(parser)
    group = parser.add_argument_group("files")
    group.add_argument(
        "-i", "--input-file", required=True, metavar="FILE",
        help="requests, one line of JSON each: custom_id, method, url and body",
    )  # fmt: skip
    group.add_argument("-o", "--output-file", required=True, metavar="FILE", help="where the answers are written")
    group.add_argument(
        "--error-file", metavar="FILE", help="where errors are written; among the answers if left out"
    )  # fmt: skip
    group.add_argument("--resume", action="store_true", help="skip the requests that are in OUTPUT, and append to it")
    group.add_argument("--force", action="store_true", help="replace OUTPUT if it is there")
    group.add_argument(
        "--concurrency", default=_DEFAULT_CONCURRENCY, metavar="N",
        help="requests that are handed to the engine at a time (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--no-progress", action="store_true", help="no progress bar")
    add_engine_flags(parser)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What was asked for, checked."""

    source: Path
    output: Path
    errors: Path
    is_resumed: bool
    has_progress: bool
    concurrency: int


def run(arguments: argparse.Namespace) -> int:
    options = engine_options_of(arguments)
    plan = _plan_of(arguments)
    return asyncio.run(_run(options, plan))


def _plan_of(arguments: argparse.Namespace) -> _Plan:
    output = _local("--output-file", arguments.output_file)
    errors = _local("--error-file", arguments.error_file) if arguments.error_file else output
    source = _local("--input-file", arguments.input_file)
    if not source.is_file():
        raise OptionError(f"--input-file {source}: there is no such file.")
    if arguments.resume and arguments.force:
        raise OptionError("--resume, --force: one goes on with the output, the other replaces it. Give one of them.")
    if arguments.error_file and errors.resolve() == output.resolve():
        raise OptionError("--error-file: is the output file. Leave it out: errors are written there then.")
    for name, path in (("--output-file", output), ("--error-file", errors)):
        if path.resolve() == source.resolve():
            raise OptionError(f"{name} {path}: is the input file. Give another name.")
        if path.exists() and not (arguments.resume or arguments.force):
            raise OptionError(
                f"{name} {path}: is there already. Give --resume to go on with it, --force to replace it."
            )
        if not path.parent.is_dir():
            raise OptionError(f"{name} {path}: the folder {path.parent} does not exist.")
    text = arguments.concurrency
    if not (text.isascii() and text.isdigit() and int(text)):
        raise OptionError(f"--concurrency {text}: must be a whole number, 1 or more.")
    return _Plan(source, output, errors, arguments.resume, not arguments.no_progress, int(text))


def _local(name: str, text: str) -> Path:
    if "://" in text:
        raise OptionError(f"{name} {text}: is an address. Only files of this machine are read and written.")
    return Path(text)


async def _run(options: dict[str, Any], plan: _Plan) -> int:
    from starlette.datastructures import State

    from quire.interfaces.gateway.batches.endpoint_calls import EndpointCalls
    from quire.interfaces.server.access.caller import Caller
    from quire.interfaces.server.options import ServerOptions
    from quire.interfaces.server.parts import parts_of

    parts = parts_of(ServerOptions())
    calls = EndpointCalls(State(parts), lambda _, request_id: Caller(request_id=request_id, is_patient=True))
    # before the model loads: a mistake in the file is found at once
    num_lines = await asyncio.to_thread(_checked, plan.source, calls.paths)
    async with open_engine(options) as engine:
        parts["serving"].attach(engine)
        results = _opened(plan)
        try:
            await _answer_all(plan, engine, calls, results, num_lines)
        except OSError as error:
            raise UserError(
                f"{plan.output}: cannot be written ({error.strerror}). What was answered is in it; go on with --resume."
            ) from None
        finally:
            results.close()
    return _summed_up(plan, results)


def _checked(source: Path, paths: tuple[str, ...]) -> int:
    from quire.interfaces.gateway.batches.input_lines import check_input

    with source.open("rb") as file:
        found = check_input(file, paths, sys.maxsize)
    if not found.errors:
        return found.num_lines
    for error in found.errors[:_MAX_ERRORS_SHOWN]:
        where = source if error.line is None else f"{source}:{error.line}"
        print(f"{where}: {error.message}", file=sys.stderr)
    raise OptionError(f"--input-file {source}: has lines that are no requests. Nothing was run.")


def _opened(plan: _Plan) -> Results:
    from quire.interfaces.gateway.batches.results import Results

    results = Results(plan.output.resolve(), plan.errors.resolve(), mode=0o666)
    if plan.is_resumed and plan.errors != plan.output:
        # what failed is tried again
        plan.errors.unlink(missing_ok=True)
    elif not plan.is_resumed:
        for path in (plan.output, plan.errors):
            path.unlink(missing_ok=True)
    results.recover()
    # there in any case, also if every request fails
    plan.output.touch()
    return results


async def _answer_all(plan: _Plan, engine: AsyncLLM, calls: EndpointCalls, results: Results, num_lines: int) -> None:
    from quire.interfaces.gateway.batches.input_lines import good_lines
    from quire.interfaces.gateway.batches.line_run import LineRunner

    runner = LineRunner(calls, asyncio.Semaphore(plan.concurrency), _alive(engine))
    done = frozenset(results.tally.done)
    with (
        plan.source.open("rb") as file,
        Progress(num_lines - len(done), plan.has_progress) as progress,
    ):
        lines = (line for line in good_lines(file, calls.paths) if line.custom_id not in done)
        await runner.run(lines, _writer(results, progress))


def _alive(engine: AsyncLLM) -> Callable[[], Awaitable[None]]:
    async def check() -> None:
        if engine.dead_reason is not None:
            raise EngineDeadError(f"The engine died: {engine.dead_reason} What was answered is kept: see --resume.")

    return check


def _writer(results: Results, progress: Progress) -> Callable[[InputLine, Called], Awaitable[None]]:
    from quire.interfaces.engine_calls import outlast
    from quire.interfaces.gateway.batches.results import answered

    writing = asyncio.Lock()

    async def write(line: InputLine, called: Called) -> None:
        tally = results.tally
        async with writing:
            before = tally.num_input_tokens, tally.num_output_tokens
            # to its end: a line is there wholly or not at all
            await outlast(asyncio.to_thread(results.append, answered(line.custom_id, called)))
            progress.finish_one(tally.num_input_tokens - before[0], tally.num_output_tokens - before[1])

    return write


def _summed_up(plan: _Plan, results: Results) -> int:
    tally = results.tally
    print(f"{tally.num_good} answered, {tally.num_bad} failed: {plan.output}", file=sys.stderr)
    if not tally.num_bad:
        return 0
    print(f"errors are in {plan.errors}", file=sys.stderr)
    return SOME_FAILED
