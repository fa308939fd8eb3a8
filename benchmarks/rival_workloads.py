"""What every engine is asked, and what is read off its answers: the workloads of `quire bench` as messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.interfaces.cli import bench_workloads as workloads
from quire.interfaces.cli.bench_workloads import TokenSource, Work


@dataclass(frozen=True)
class Part:
    """One figure of a workload: its column in the tables."""

    key: str
    title: str
    unit: str

    @property
    def is_time(self) -> bool:
        return self.unit in ("s", "ms")


@dataclass(frozen=True)
class Sizes:
    """Lengths of all workloads; small ones are for trying the machinery out."""

    vocab_size: int
    num_requests: int = 24
    stream_input: int = 128
    stream_output: int = 128
    prompt: int = 2048
    shared_requests: int = 32
    shared_prefix: int = 512
    shared_own: int = 32
    shared_output: int = 32
    parallel_input: int = 256
    parallel_output: int = 64
    batch_input: float = workloads.BATCH_PROMPT_TOKENS / workloads.BATCH_REQUESTS
    batch_output: float = workloads.BATCH_OUTPUT_TOKENS / workloads.BATCH_REQUESTS

    @classmethod
    def small(cls, vocab_size: int) -> Sizes:
        return cls(vocab_size, 3, 16, 8, 64, 3, 32, 8, 4, 16, 6, 12, 6)


@dataclass(frozen=True)
class Job:
    """One command to a driver, and the figures that its answer gives."""

    work: Work
    read: Callable[[dict[str, Any]], dict[str, float]]

    def command(self) -> dict[str, Any]:
        work = self.work
        return {
            "do": "generate",
            "prompts": [list(prompt) for prompt in work.prompts],
            "output_lengths": list(work.output_lengths),
            "num_answers": work.num_answers,
            "beam_width": work.beam_width,
        }


PARTS = {
    part.key: part
    for part in (
        Part("W1", "W1 one stream", "tokens/s"),
        Part("W1 first", "W1 first token", "s"),
        Part("W5", "W5 prompt", "tokens/s"),
        Part("W2", "W2 batch", "tokens/s"),
        Part("W3", "W3 shared prefix", "s"),
        Part("W3w", "W3w prefix seen before", "s"),
        Part("W4 n", "W4 eight answers", "s"),
        Part("W4 beam", "W4 four beams", "s"),
    )
}
# In the order in which a round asks: what takes long comes last, where a budget may cut it off.
WORKLOADS = ("W1", "W5", "W4", "W3", "W2")


def jobs(workload: str, sizes: Sizes, number: int) -> list[Job]:
    """The commands of round `number`: tokens that no round has had before."""
    source = TokenSource(sizes.vocab_size, 0, number, workload)
    if workload == "W1":
        work = workloads.stream(source, input_length=sizes.stream_input, output_length=sizes.stream_output)
        return [Job(work, _read_stream)]
    if workload == "W5":
        work = workloads.prompt(source, input_length=sizes.prompt)
        return [Job(work, lambda answer: {"W5": sizes.prompt / _first(answer)})]
    if workload == "W4":
        lengths = {"input_length": sizes.parallel_input, "output_length": sizes.parallel_output}
        return [
            Job(workloads.answers(source, **lengths), lambda answer: {"W4 n": answer["seconds"]}),
            Job(workloads.beams(source, **lengths), lambda answer: {"W4 beam": answer["seconds"]}),
        ]
    if workload == "W3":
        work = workloads.shared_prefix(
            source,
            num_requests=sizes.shared_requests,
            shared_prefix=sizes.shared_prefix,
            input_length=sizes.shared_own,
            output_length=sizes.shared_output,
        )
        known = workloads.with_known_prefix(work, source)
        return [
            Job(work, lambda answer: {"W3": answer["seconds"]}),
            Job(known, lambda answer: {"W3w": answer["seconds"]}),
        ]
    work = workloads.batch(
        source, num_requests=sizes.num_requests, input_length=sizes.batch_input, output_length=sizes.batch_output
    )
    return [Job(work, _read_batch)]


def warm_up(sizes: Sizes) -> list[Job]:
    """A short request, and a prompt as long as any, so that nothing is made for the first time in a round."""
    source = TokenSource(sizes.vocab_size, 0, -1)
    short = workloads.stream(source, input_length=sizes.stream_input, output_length=4)
    return [Job(work, lambda _: {}) for work in (short, workloads.prompt(source, input_length=sizes.prompt))]


def _first(answer: dict[str, Any]) -> float:
    return float(answer["arrivals"][0][0][0])


def _read_stream(answer: dict[str, Any]) -> dict[str, float]:
    """Tokens that came together with the first are not counted as decoded after it."""
    arrivals = answer["arrivals"][0]
    after = sum(count for _, count in arrivals[1:])
    return {"W1": after / (arrivals[-1][0] - arrivals[0][0]), "W1 first": _first(answer)}


def _read_batch(answer: dict[str, Any]) -> dict[str, float]:
    tokens = sum(count for arrivals in answer["arrivals"] for _, count in arrivals)
    return {"W2": tokens / answer["seconds"]}


def num_tokens(answer: dict[str, Any]) -> int:
    return sum(count for arrivals in answer["arrivals"] for _, count in arrivals)
