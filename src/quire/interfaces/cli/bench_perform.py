"""Performs a workload on an engine and notes when the tokens came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.beam_search_params import BeamSearchParams, GenerationParams
from quire.config.speech_tokens import TRANSCRIBE, SpeechTokens
from quire.errors import OptionError
from quire.interfaces.cli.bench_report import Timeline
from quire.interfaces.cli.bench_workloads import Chains, Pictures, Sounds, Work
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.interfaces.async_llm import AnyPrompt, AsyncLLM
    from quire.renderer import RenderedPrompt

Clock = Callable[[], float]


@dataclass
class Outcome:
    """One performance of a workload."""

    seconds: float
    timelines: list[Timeline]

    @property
    def num_output_tokens(self) -> int:
        return sum(timeline.num_tokens for timeline in self.timelines)

    @property
    def times_to_first_token(self) -> list[float]:
        return [timeline.time_to_first_token for timeline in self.timelines if timeline.arrivals]

    @property
    def gaps(self) -> list[float]:
        return [gap for timeline in self.timelines for gap in timeline.gaps]

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second after the first one, of a request alone."""
        per_token = self.timelines[0].time_per_token
        return 1.0 / per_token if per_token else None


async def perform(
    engine: AsyncLLM, work: Work, seed: int = 0, clock: Clock = time.perf_counter, *, in_bursts: bool = False
) -> Outcome:
    """All requests at once; the clock stops with the last token. `in_bursts`: as of AsyncLLM.generate."""
    jobs = [
        (list(prompt), _params_of(work, length, seed + number))
        for number, (prompt, length) in enumerate(zip(work.prompts, work.output_lengths, strict=True))
    ]
    start = clock()
    timelines = await asyncio.gather(
        *(timeline_of(engine, prompt, params, clock, in_bursts=in_bursts) for prompt, params in jobs)
    )
    return Outcome(clock() - start, list(timelines))


def _params_of(work: Work, output_length: int, seed: int) -> GenerationParams:
    if work.beam_width:
        return BeamSearchParams(beam_width=work.beam_width, max_tokens=output_length, ignore_eos=True)
    is_drawn = work.num_answers > 1
    return SamplingParams(
        n=work.num_answers,
        temperature=1.0 if is_drawn else 0.0,
        seed=seed if is_drawn else None,
        max_tokens=output_length,
        ignore_eos=True,
        detokenize=False,
    )


async def timeline_of(
    engine: AsyncLLM, prompt: list[int], params: GenerationParams, clock: Clock, *, in_bursts: bool = False
) -> Timeline:
    """One request, noted while it runs; tokens of all its answers count."""
    timeline = Timeline(num_prompt_tokens=len(prompt), start=clock())
    async for output in engine.generate({"prompt_token_ids": prompt}, params, delta=True, in_bursts=in_bursts):
        timeline.add(clock(), sum(len(answer.token_ids) for answer in output.outputs))
    return timeline


async def perform_chains(engine: AsyncLLM, chains: Chains, seed: int = 0, clock: Clock = time.perf_counter) -> Outcome:
    """All agents at once, the calls of each one after the other."""
    params = _greedy(chains.output_length)

    async def agent(tokens: list[int], results: Sequence[Sequence[int]]) -> list[Timeline]:
        calls: list[Timeline] = []
        for result in [[], *results]:
            tokens = [*tokens, *result]
            call = Timeline(num_prompt_tokens=len(tokens), start=clock(), is_first=not calls)
            tokens = tokens + await _follow(engine, {"prompt_token_ids": tokens}, params, call, clock)
            calls.append(call)
        return calls

    start = clock()
    pairs = zip(chains.beginnings, chains.results, strict=True)
    found = await asyncio.gather(*(agent(list(beginning), results) for beginning, results in pairs))
    return Outcome(clock() - start, [call for calls in found for call in calls])


async def perform_pictures(
    engine: AsyncLLM, pictures: Pictures, seed: int = 0, clock: Clock = time.perf_counter
) -> Outcome:
    """The images are cut into patches before the clock starts: that is the front end's work."""
    from PIL import Image

    size = (pictures.size, pictures.size)
    prompts = []
    for images in pictures.images:
        parts: list[Any] = [{"type": "image", "image": Image.frombytes("RGB", size, image)} for image in images]
        parts.append({"type": "text", "text": "What is this?"})
        prompts.append(engine.renderer.render_prompt([{"role": "user", "content": parts}]))
    params = _greedy(pictures.output_length)

    async def request(prompt: RenderedPrompt) -> Timeline:
        timeline = Timeline(num_prompt_tokens=len(prompt.token_ids), start=clock())
        await _follow(engine, prompt, params, timeline, clock)
        return timeline

    start = clock()
    timelines = await asyncio.gather(*(request(prompt) for prompt in prompts))
    return Outcome(clock() - start, list(timelines))


async def perform_sounds(engine: AsyncLLM, sounds: Sounds, seed: int = 0, clock: Clock = time.perf_counter) -> Outcome:
    """From samples to text: what the encoder is given is made while the clock runs."""
    tokens = SpeechTokens.read(engine.config.facts)
    if tokens is None:
        raise OptionError(f"model={engine.config.served_model_name}: does not listen. Take one that does, as Whisper.")
    language = next(iter(tokens.languages.values()), None)
    opening = tokens.opening(language, TRANSCRIBE, has_times=False)
    params = _greedy(sounds.output_length)

    async def request(levels: bytes) -> Timeline:
        samples = np.frombuffer(levels, dtype=np.int8).astype(np.float32) / 128
        prompt = {"prompt_token_ids": opening, "multi_modal_data": {"audio": samples}}
        timeline = Timeline(num_prompt_tokens=len(opening), start=clock())
        await _follow(engine, prompt, params, timeline, clock)
        return timeline

    start = clock()
    timelines = await asyncio.gather(*map(request, sounds.sounds))
    return Outcome(clock() - start, list(timelines))


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


async def _follow(
    engine: AsyncLLM, prompt: AnyPrompt, params: SamplingParams, timeline: Timeline, clock: Clock
) -> list[int]:
    """The tokens of the answer."""
    token_ids: list[int] = []
    async for output in engine.generate(prompt, params, delta=True):
        new = output.outputs[0].token_ids
        timeline.add(clock(), len(new))
        timeline.num_cached_tokens = output.num_cached_tokens or 0
        token_ids += new
    return token_ids
