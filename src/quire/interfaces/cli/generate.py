"""`quire generate`: continues one text, which streams to stdout, or several, which are printed in order."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

from quire.beam_search_params import BeamSearchParams, GenerationParams
from quire.errors import OptionError
from quire.interfaces.beams import score_of
from quire.interfaces.cli.beam_flags import add_beam_flags, beams_of
from quire.interfaces.cli.engine_flags import add_engine_flags, engine_options_of
from quire.interfaces.cli.sampling_flags import add_sampling_flags, sampling_of
from quire.interfaces.cli.session import open_engine

if TYPE_CHECKING:
    from quire.interfaces.async_llm import AsyncLLM
    from quire.outputs import CompletionOutput, RequestOutput
    from quire.renderer import RenderedPrompt

_DEFAULT_MAX_TOKENS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [PROMPT ...] [--model MODEL] [options]"
    parser.add_argument(
        "prompts", metavar="PROMPT", nargs="*", help="texts to continue; stdin is one if there are none"
    )
    group = parser.add_argument_group("output")
    group.add_argument("--chat", action="store_true", help="take each prompt as a user's message to the model")
    group.add_argument(
        "-n", dest="sampling_n", default=argparse.SUPPRESS, metavar="N",
        help="answers per prompt (default: 1, or all beams)",
    )  # fmt: skip
    group.add_argument("--json", action="store_true", help="one line of JSON per prompt instead of text")
    group.add_argument("--no-stream", action="store_true", help="print an answer only when it is complete")
    add_sampling_flags(parser)
    add_beam_flags(parser)
    # --seed is the request's own here, which decides the same
    add_engine_flags(parser, leave_out=("seed",))


def run(arguments: argparse.Namespace) -> int:
    if hasattr(arguments, "sampling_n"):
        if not arguments.sampling_n.isdecimal():
            raise OptionError(f"-n {arguments.sampling_n}: must be a whole number.")
        arguments.sampling_n = int(arguments.sampling_n)
    options = engine_options_of(arguments)
    sampling = sampling_of(arguments)
    beams = beams_of(arguments, sampling, max_tokens=_DEFAULT_MAX_TOKENS)
    prompts = arguments.prompts or [_prompt_from_stdin()]
    return asyncio.run(_generate(arguments, options, beams or sampling, prompts))


def _prompt_from_stdin() -> str:
    if sys.stdin.isatty():
        raise OptionError('A prompt is missing: quire generate "Once upon a time", or a text on stdin.')
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise OptionError(f"stdin is not UTF-8 ({error.reason} at byte {error.start}). Give a text in UTF-8.") from None


async def _generate(
    arguments: argparse.Namespace,
    options: dict[str, Any],
    typed: BeamSearchParams | dict[str, Any],
    prompts: list[str],
) -> int:
    """`typed`: beams, or fields of SamplingParams over those that the model's authors recommend."""
    async with open_engine(options) as engine:
        params: GenerationParams
        if isinstance(typed, BeamSearchParams):
            params = typed
        else:
            params = engine.get_default_sampling_params().replace(**{"max_tokens": _DEFAULT_MAX_TOKENS, **typed})
        chats = [_rendered(engine, prompt, arguments.chat) for prompt in prompts]
        is_single = len(prompts) == 1 and params.n == 1
        if is_single and not (arguments.json or arguments.no_stream):
            await _stream(engine, chats[0], params)
            return 0
        # all at once: the engine batches them
        tasks = [asyncio.ensure_future(_complete(engine, chat, params)) for chat in chats]
        for number, (prompt, task) in enumerate(zip(prompts, tasks, strict=True), 1):
            output = await task
            if arguments.json:
                print(_as_json(prompt, output, params), flush=True)
            else:
                _print_answers(output, params, heading="" if is_single else f"[{number}] {_shortened(prompt)}")
    return 0


def _rendered(engine: AsyncLLM, prompt: str, is_chat: bool) -> RenderedPrompt:
    return engine.renderer.render_prompt([{"role": "user", "content": prompt}] if is_chat else prompt)


async def _stream(engine: AsyncLLM, prompt: RenderedPrompt, params: GenerationParams) -> None:
    async for output in engine.generate(prompt, params, delta=True):
        print(output.outputs[0].text, end="", flush=True)
    print(flush=True)


async def _complete(engine: AsyncLLM, prompt: RenderedPrompt, params: GenerationParams) -> RequestOutput:
    last = None
    async for output in engine.generate(prompt, params):
        last = output
    assert last is not None, "a request ends with an output"
    return last


def _print_answers(output: RequestOutput, params: GenerationParams, heading: str) -> None:
    if heading:
        print(heading)
    for answer in output.outputs:
        # a text alone needs no score to stand beside others
        score = f"{score_of(answer, params):8.4f}  " if heading and isinstance(params, BeamSearchParams) else ""
        print(score + answer.text, flush=True)
    if heading:
        print()


def _as_json(prompt: str, output: RequestOutput, params: GenerationParams) -> str:
    answers = [
        {
            "index": answer.index,
            "text": answer.text,
            "num_tokens": len(answer.token_ids),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            **_scores(answer, params),
        }
        for answer in output.outputs
    ]
    entry = {"prompt": prompt, "num_prompt_tokens": len(output.prompt_token_ids), "outputs": answers}
    return json.dumps(entry, ensure_ascii=False)


def _scores(answer: CompletionOutput, params: GenerationParams) -> dict[str, float | None]:
    if not isinstance(params, BeamSearchParams):
        return {}
    return {"cumulative_logprob": answer.cumulative_logprob, "score": score_of(answer, params)}


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."
