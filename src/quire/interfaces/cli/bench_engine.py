"""`quire bench stream|batch|shared-prefix|parallel|prompt|long-context|agents|images|speech`: in rounds."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from quire.errors import ContextLengthError
from quire.interfaces.cli import bench_workloads as workloads
from quire.interfaces.cli.bench_flags import (
    Size,
    add_measure_flags,
    add_sizes,
    finish,
    limits_of,
    sizes_of,
    too_long,
    whole_number,
)
from quire.interfaces.cli.bench_numbers import Result
from quire.interfaces.cli.bench_perform import Outcome, perform, perform_chains, perform_pictures, perform_sounds
from quire.interfaces.cli.bench_sheet import Ruler, Sheet
from quire.interfaces.cli.bench_workloads import Chains, Pictures, Sounds, TokenSource, Work
from quire.interfaces.cli.engine_flags import add_engine_flags, add_model_argument, engine_options_of
from quire.interfaces.cli.session import open_engine

if TYPE_CHECKING:
    from quire.interfaces.async_llm import AsyncLLM

Sizes = Mapping[str, int]
_WARM_UP_TOKENS = 4
# Rounds draw their tokens from the seed and their number; the warm-up has a number that no round has.
_WARM_UP_ROUND = -1


class Task(Protocol):
    """What is asked of an engine."""

    def shortened(self, num_tokens: int) -> Self:
        """The first of it, for the warm-up."""


T = TypeVar("T", bound=Task)


@dataclass(frozen=True)
class EngineWorkload(Generic[T]):
    """One workload as a command: what a round asks, how, and what is noted of it."""

    number: str
    title: str
    rounds: int
    sizes: tuple[Size, ...]
    works: Callable[[TokenSource, Sizes], list[T]]
    note: Callable[[Sheet, Ruler, list[T], list[Outcome]], None]
    perform: Callable[[AsyncLLM, T, int], Awaitable[Outcome]]

    @property
    def description(self) -> str:
        shares = "and, where there is a limit, how much of it they are"
        return f"{self.number}, {self.title}: medians and quartiles over rounds, {shares}"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.usage = "%(prog)s [MODEL] [options]"
        add_model_argument(parser)
        add_sizes(parser.add_argument_group("load"), self.sizes)
        add_measure_flags(parser, self.rounds)
        add_engine_flags(parser, leave_out=("seed",))

    def run(self, arguments: argparse.Namespace) -> int:
        sizes = sizes_of(arguments, self.sizes)
        seed = whole_number("--seed", arguments.seed, 0)
        rounds = whole_number("--rounds", arguments.rounds, 1)
        options = {**engine_options_of(arguments), "seed": seed}
        # before the engine is there, whose threads would be in the way
        limits = limits_of(arguments, options.get("num_threads"))
        try:
            result = asyncio.run(self._bench(options, sizes, rounds, seed, limits))
        except ContextLengthError as error:
            raise too_long(self.sizes, error) from error
        return finish(result, arguments)

    async def _bench(self, options: dict[str, Any], sizes: Sizes, rounds: int, seed: int, limits: Any) -> Result:
        async with open_engine(options) as engine:
            config = engine.config
            sheet = Sheet()
            ruler = Ruler.of(config, limits)
            await self._warm_up(engine, sizes, seed)
            for number in range(rounds):
                works = self.works(TokenSource(config.facts.vocab_size, seed, number), sizes)
                outcomes = [await self.perform(engine, work, seed) for work in works]
                self.note(sheet, ruler, works, outcomes)
        settings = {**sizes, "precision": config.worker.quantization or config.worker.dtype, "seed": seed}
        return Result(self.number, self.title, config.served_model_name, settings, sheet.measures, limits)

    async def _warm_up(self, engine: AsyncLLM, sizes: Sizes, seed: int) -> None:
        """The first request of each kind, cut short."""
        for work in self.works(TokenSource(engine.config.facts.vocab_size, seed, _WARM_UP_ROUND), sizes):
            await self.perform(engine, work.shortened(_WARM_UP_TOKENS), seed)


def _note_stream(sheet: Sheet, ruler: Ruler, works: list[Work], outcomes: list[Outcome]) -> None:
    [outcome] = outcomes
    sheet.note("tokens after the first", outcome.decode_rate, "tokens/s", ruler.decode_rate())
    sheet.note("time to first token", outcome.times_to_first_token[0] * 1e3, "ms")
    if gaps := outcome.gaps:
        sheet.note("time between tokens", median(gaps) * 1e3, "ms")
    sheet.note("whole request", outcome.seconds, "s", ruler.seconds(works[0]))


def _note_batch(sheet: Sheet, ruler: Ruler, works: list[Work], outcomes: list[Outcome]) -> None:
    [work], [outcome] = works, outcomes
    least = ruler.seconds(work)
    rate = outcome.num_output_tokens / outcome.seconds
    sheet.note("output tokens", rate, "tokens/s", work.num_output_tokens / least if least else None)
    sheet.note("all requests", outcome.seconds, "s")
    sheet.note("time to first token", median(outcome.times_to_first_token), "s")
    if gaps := outcome.gaps:
        sheet.note("time between tokens", median(gaps) * 1e3, "ms")


def _note_shared(sheet: Sheet, ruler: Ruler, works: list[Work], outcomes: list[Outcome]) -> None:
    for name, work, outcome in zip(("prefix is new", "prefix was seen before"), works, outcomes, strict=True):
        sheet.note(name, outcome.seconds, "s", ruler.seconds(work))


def _note_parallel(sheet: Sheet, ruler: Ruler, works: list[Work], outcomes: list[Outcome]) -> None:
    for work, outcome in zip(works, outcomes, strict=True):
        name = f"beam search of {work.beam_width}" if work.beam_width else f"{work.num_answers} answers"
        sheet.note(name, outcome.seconds, "s", ruler.seconds(work))


def _note_prompt(sheet: Sheet, ruler: Ruler, works: list[Work], outcomes: list[Outcome]) -> None:
    [work], [outcome] = works, outcomes
    length = work.num_prompt_tokens
    seconds = outcome.times_to_first_token[0]
    sheet.note("prompt tokens", length / seconds, "tokens/s", ruler.prompt_rate(length))
    sheet.note("time to first token", seconds, "s")
    if ruler.cost:
        sheet.note("arithmetic", ruler.cost.prompt_operations(length) / seconds / 1e9, "GOP/s", ruler.peak / 1e9)


def _note_long_context(sheet: Sheet, ruler: Ruler, works: list[Work], outcomes: list[Outcome]) -> None:
    length = works[0].num_prompt_tokens
    first, again = outcomes
    seconds = first.times_to_first_token[0]
    sheet.note("prompt tokens", length / seconds, "tokens/s", ruler.prompt_rate(length))
    sheet.note("time to first token", seconds, "s")
    sheet.note("time to first token, again", again.times_to_first_token[0], "s")
    sheet.note("tokens after the first", first.decode_rate, "tokens/s", ruler.decode_rate(length))


def _note_agents(sheet: Sheet, ruler: Ruler, works: list[Chains], outcomes: list[Outcome]) -> None:
    [outcome] = outcomes
    calls = outcome.timelines
    first = [call.time_to_first_token for call in calls if call.is_first]
    later = [call.time_to_first_token for call in calls if not call.is_first]
    sheet.note("all calls", outcome.seconds, "s")
    sheet.note("calls", len(calls) / outcome.seconds, "1/s")
    sheet.note("first call's first token", median(first) * 1e3, "ms")
    if later:
        sheet.note("later calls' first token", median(later) * 1e3, "ms")
    num_prompt = sum(call.num_prompt_tokens for call in calls)
    sheet.note("prompt tokens found", 100 * sum(call.num_cached_tokens for call in calls) / num_prompt, "%")


def _note_pictures(sheet: Sheet, ruler: Ruler, works: list[Pictures], outcomes: list[Outcome]) -> None:
    """The second time the images were seen before."""
    for name, outcome in zip(("images are new", "images were seen before"), outcomes, strict=True):
        sheet.note(name, outcome.seconds, "s")
        sheet.note(f"{name}, first token", median(outcome.times_to_first_token), "s")
    sheet.note("prompt", median(call.num_prompt_tokens for call in outcomes[0].timelines), "tokens")


def _note_sounds(sheet: Sheet, ruler: Ruler, works: list[Sounds], outcomes: list[Outcome]) -> None:
    """The second time the sounds were heard before, and what the encoder made of them is at hand."""
    for name, work, outcome in zip(("sounds are new", "sounds were heard before"), works, outcomes, strict=True):
        sheet.note(f"{name}, real-time factor", outcome.seconds / work.seconds, "s/s")
        sheet.note(f"{name}, first token", median(outcome.times_to_first_token), "s")
        sheet.note(f"{name}, output tokens", outcome.num_output_tokens / outcome.seconds, "tokens/s")


def _shared_works(source: TokenSource, sizes: Sizes) -> list[Work]:
    work = workloads.shared_prefix(source, **sizes)
    return [work, workloads.with_known_prefix(work, source)]


def _parallel_works(source: TokenSource, sizes: Sizes) -> list[Work]:
    lengths = {"input_length": sizes["input_length"], "output_length": sizes["output_length"]}
    return [
        workloads.answers(source, num_answers=sizes["num_answers"], **lengths),
        workloads.beams(source, beam_width=sizes["beam_width"], **lengths),
    ]


_INPUT = "tokens of each prompt"
_OUTPUT = "tokens of each answer"
STREAM = EngineWorkload(
    "W1", "one stream", 5,
    (Size("--input-length", 128, 1, _INPUT), Size("--output-length", 128, 2, _OUTPUT)),
    lambda source, sizes: [workloads.stream(source, **sizes)], _note_stream, perform,
)  # fmt: skip
BATCH = EngineWorkload(
    "W2", "many requests of log-normal lengths at once", 1,
    (
        Size("--num-requests", workloads.BATCH_REQUESTS, 1, "requests in all"),
        Size("--input-length", 0, 0, "mean tokens of a prompt; 0: as the workload has it, 161.5"),
        Size("--output-length", 0, 0, "mean tokens of an answer; 0: as the workload has it, 128.9"),
    ),
    lambda source, sizes: [workloads.batch(source, **sizes)], _note_batch, perform,
)  # fmt: skip
SHARED_PREFIX = EngineWorkload(
    "W3", "requests that begin alike", 3,
    (
        Size("--num-requests", 32, 1, "requests in all"),
        Size("--shared-prefix", 512, 1, "tokens at the beginning that all prompts have in common"),
        Size("--input-length", 32, 1, "tokens of each prompt that are its own"),
        Size("--output-length", 32, 1, _OUTPUT),
    ),
    _shared_works, _note_shared, perform,
)  # fmt: skip
PARALLEL = EngineWorkload(
    "W4", "several answers to one prompt, and beam search", 3,
    (
        Size("--input-length", 256, 1, "tokens of the prompt"),
        Size("--output-length", 64, 1, _OUTPUT),
        Size("--num-answers", 8, 2, "answers that are drawn"),
        Size("--beam-width", 4, 2, "beams"),
    ),
    _parallel_works, _note_parallel, perform,
)  # fmt: skip
PROMPT = EngineWorkload(
    "W5", "one long prompt", 5,
    (Size("--input-length", 2048, 1, _INPUT),),
    lambda source, sizes: [workloads.prompt(source, **sizes)], _note_prompt, perform,
)  # fmt: skip
LONG_CONTEXT = EngineWorkload(
    "W10", "a very long prompt, and a question behind it", 1,
    (
        Size("--input-length", 32_768, 1, "tokens of the prompt, fewer than the model takes"),
        Size("--output-length", 64, 2, _OUTPUT),
    ),
    lambda source, sizes: workloads.long_context(source, **sizes), _note_long_context, perform,
)  # fmt: skip
AGENTS = EngineWorkload(
    "W11", "agents, each a chain of calls", 1,
    (
        Size("--num-agents", 8, 1, "agents at once"),
        Size("--num-calls", 6, 2, "calls of each, one after the other"),
        Size("--shared-prefix", 1024, 1, "tokens of the instructions that all begin with"),
        Size("--input-length", 256, 1, "tokens of each agent's task"),
        Size("--result-length", 256, 1, "tokens that a tool puts behind an answer"),
        Size("--output-length", 64, 1, _OUTPUT),
    ),
    lambda source, sizes: [workloads.agents(source, **sizes)], _note_agents, perform_chains,
)  # fmt: skip
IMAGES = EngineWorkload(
    "W12", "chats with images, which need a model that takes some", 3,
    (
        Size("--num-requests", 4, 1, "requests at once"),
        Size("--num-images", 1, 1, "images of each"),
        Size("--size", 1024, 28, "pixels a side"),
        Size("--output-length", 32, 1, _OUTPUT),
    ),
    lambda source, sizes: [workloads.pictures(source, **sizes)] * 2, _note_pictures, perform_pictures,
)  # fmt: skip
SPEECH = EngineWorkload(
    "W13", "sounds that are written down, which need a model that listens", 3,
    (
        Size("--num-requests", 4, 1, "sounds at once"),
        Size("--seconds", 30, 1, "of each sound, no more than the model hears at once"),
        Size("--output-length", 100, 1, "tokens of each text"),
    ),
    lambda source, sizes: [workloads.sounds(source, **sizes)] * 2, _note_sounds, perform_sounds,
)  # fmt: skip
