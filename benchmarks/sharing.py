"""How much memory does sharing save (3.6.3, figure 3.15)? Parallel sampling and beam search, 2, 4 and 6 sequences.

    python benchmarks/sharing.py [--requests 200] [--perplexity 1.5] [--plot FILE.svg] [--embedded]

Requests have lengths like Alpaca's and ShareGPT's (figure 3.11: the same means, log-normal, at most 2,048 tokens) and
run through the real scheduler, KV cache manager and decoding methods. The executor has no model, but it checks every
slot that is read, and what it answers to a beam looks like a language model's: nearly certain after most prefixes, open
after some. --perplexity says how open on average, as exp(mean entropy). The default of 1.5 is an assumption about text
that a model itself finds likely, which is what beam search writes; human text is far more open.
--embedded measures beams of the embedded model too, with its own probabilities, on pieces of docs/.

Saved is, over all steps: 1 - blocks held / blocks that the sequences would hold if each had its own. Ends in one line
of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from language_like import VOCAB, LanguageLike, LanguageLikeExecutor
from tokenizers import Tokenizer
from traces import ALPACA, SHAREGPT, Trace, lengths

import quire
from quire.config import EMBEDDED
from quire.engine_core.engine_core import EngineCore
from quire.messages import DecodingSpec, EngineRequest, SchedulerOutput, StepOutput, split_sequence_id
from quire.sampling_params import SamplingParams
from quire.simulation.charts.bar_chart import Panel, bar_charts
from quire.testing.core import CoreUnderTest
from quire.testing.greedy import real_core

BLOCK_SIZE = 16
MAX_LENGTH = 2048
WIDTHS = (2, 4, 6)
# Requests in flight. What is saved hardly depends on it: blocks are counted over the whole life of each request.
IN_FLIGHT = 16
EMBEDDED_LENGTH = 1000
PARALLEL, BEAMS, BEAMS_OF_EMBEDDED = "parallel sampling", "beam search", "embedded model"
# Figure 3.15 and 3.6.3, in percent, by width. Of ShareGPT the text gives the first and the last.
PAPER: dict[tuple[str, str], tuple[float | None, ...]] = {
    (ALPACA.name, PARALLEL): (6.09, 8.53, 9.79),
    (ALPACA.name, BEAMS): (37.56, 53.13, 55.16),
    (SHAREGPT.name, PARALLEL): (16.2, None, 30.5),
    (SHAREGPT.name, BEAMS): (44.3, None, 66.3),
}
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="requests a figure (200)")
    parser.add_argument("--perplexity", type=float, default=1.5, help="of the distributions behind beams (1.5)")
    parser.add_argument("--plot", type=Path, help="write the figure to this file, as SVG")
    parser.add_argument("--embedded", action="store_true", help="beams of the embedded model too, up to 1,000 tokens")
    arguments = parser.parse_args()
    if not 1.01 <= arguments.perplexity <= 200:
        parser.error(
            f"--perplexity={arguments.perplexity}: must be between 1.01 and 200, below the vocabulary of {VOCAB}."
        )
    print(f"{'':<10} {'':<18} width    saved    paper   difference")
    rows = list(simulated_rows(arguments.requests, arguments.perplexity))
    if arguments.plot:
        arguments.plot.write_text(_plot(rows), encoding="utf-8")
    if arguments.embedded:
        rows += embedded_rows(arguments.requests)
    print(json.dumps({"requests": arguments.requests, "perplexity": arguments.perplexity, "rows": rows}))


# ---------------------------------------------------------------------------------------------- a run


class SharingCounter:
    """An executor in front of another: counts blocks when a step has been decided, its copies included."""

    def __init__(self, core: EngineCore) -> None:
        self.num_held = self.num_unshared = 0
        self._running = core.scheduler.running
        self._inner = core.executor
        core.executor = self  # type: ignore[assignment]

    def execute(self, output: SchedulerOutput) -> Future[StepOutput]:
        sequences = [sequence for request in self._running.requests for sequence in request.sequences.values()]
        blocks = np.concatenate([table.held() for sequence in sequences for table in sequence.block_tables])
        self.num_unshared += len(blocks)
        self.num_held += len(np.unique(blocks))
        return self._inner.execute(output)

    def shutdown(self) -> None:
        self._inner.shutdown()

    @property
    def saved_percent(self) -> float:
        return 100 * (1 - self.num_held / self.num_unshared)


def run(core: EngineCore, requests: Iterable[EngineRequest]) -> float:
    """All requests, so many at a time; the percentage of blocks that was saved."""
    counter = SharingCounter(core)
    in_flight: dict[int, int] = {}
    for request in requests:
        while len(in_flight) >= IN_FLIGHT:
            _step(core, in_flight)
        in_flight[request.request_id] = request.sampling.n
        core.add(request)
    while in_flight:
        _step(core, in_flight)
    assert core.statistics()["num_preemptions_total"] == 0, "what is computed again shares less: give it more blocks"
    core.shutdown()
    return counter.saved_percent


def _step(core: EngineCore, in_flight: dict[int, int]) -> None:
    for end in core.step().ends:
        assert end.error is None, end.error
        number, _ = split_sequence_id(end.sequence_id)
        in_flight[number] -= 1
        if not in_flight[number]:
            del in_flight[number]


def request_of(number: int, method: str, width: int, prompt: list[int], num_tokens: int) -> EngineRequest:
    """Of a given length: the end token is ignored."""
    is_beam = method == BEAMS
    return EngineRequest(
        request_id=number,
        prompt_token_ids=prompt,
        sampling=SamplingParams(n=width, max_tokens=num_tokens, ignore_eos=True, temperature=0.0 if is_beam else 1.0),
        seed=number,
        decoding=DecodingSpec(method="beam_search", args={"width": width}) if is_beam else None,
    )


# ---------------------------------------------------------------------------------------------- which runs


def simulated_rows(num_requests: int, perplexity: float) -> Iterator[Row]:
    model = LanguageLike(perplexity)
    for trace in (ALPACA, SHAREGPT):
        pairs = lengths(trace, num_requests, MAX_LENGTH)
        chance = random.Random(3)
        prompts = [[chance.randrange(VOCAB) for _ in range(prompt)] for prompt, _ in pairs]
        for method in (PARALLEL, BEAMS):
            for width in WIDTHS:
                start = time.perf_counter()
                requests = _requests(method, width, prompts, pairs)
                yield _row(trace, method, width, run(_simulated_core(width, model), requests), start)


def _requests(method: str, width: int, prompts: list[list[int]], pairs: list[tuple[int, int]]) -> list[EngineRequest]:
    return [
        request_of(number, method, width, prompt, output)
        for number, (prompt, (_, output)) in enumerate(zip(prompts, pairs, strict=True))
    ]


def _simulated_core(width: int, model: LanguageLike) -> EngineCore:
    num_blocks = IN_FLIGHT * width * MAX_LENGTH // BLOCK_SIZE
    core = CoreUnderTest(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        budget=2048,
        max_num_seqs=IN_FLIGHT * width,
        max_model_len=MAX_LENGTH,
        prefix_caching=False,
        vocab_size=VOCAB,
    ).core
    core._check_invariants = False
    core.executor = LanguageLikeExecutor(num_blocks, BLOCK_SIZE, model)
    return core


def embedded_rows(num_requests: int) -> Iterator[Row]:
    """A real model's beams, of lengths that it can hold."""
    model = Path(quire.__file__).parent / EMBEDDED
    texts = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    token_ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode("".join(map(Path.read_text, texts))).ids
    for trace in (ALPACA, SHAREGPT):
        pairs = lengths(trace, num_requests, EMBEDDED_LENGTH)
        chance = random.Random(3)
        starts = [chance.randrange(len(token_ids) - prompt) for prompt, _ in pairs]
        prompts = [token_ids[start : start + prompt] for start, (prompt, _) in zip(starts, pairs, strict=True)]
        for width in WIDTHS:
            start = time.perf_counter()
            core = real_core(
                model,
                block_size=BLOCK_SIZE,
                max_model_len=EMBEDDED_LENGTH,
                max_num_seqs=IN_FLIGHT * width,
                num_gpu_blocks_override=IN_FLIGHT * width * EMBEDDED_LENGTH // BLOCK_SIZE,
                enable_prefix_caching=False,
                check_invariants=False,
            )
            yield _row(trace, BEAMS_OF_EMBEDDED, width, run(core, _requests(BEAMS, width, prompts, pairs)), start)


def _row(trace: Trace, method: str, width: int, saved: float, start: float) -> Row:
    paper = PAPER[trace.name, BEAMS if method == BEAMS_OF_EMBEDDED else method][WIDTHS.index(width)]
    told = f"{paper:6.2f} %   {saved - paper:+7.1f}" if paper is not None else "     -            "
    print(f"{trace.name:<10} {method:<18} {width:>5} {saved:6.2f} % {told}", flush=True)
    return {
        "trace": trace.name,
        "method": method,
        "width": width,
        "saved_percent": round(saved, 2),
        "paper_percent": paper,
        "seconds": round(time.perf_counter() - start, 1),
    }


def _plot(rows: list[Row]) -> str:
    panels = []
    for (trace, method), paper in PAPER.items():
        ours: list[float | None] = [
            row["saved_percent"] for row in rows if (row["trace"], row["method"]) == (trace, method)
        ]
        panels.append(
            Panel(f"{trace}, {method}", [str(width) for width in WIDTHS], {"Quire": ours, "paper": list(paper)})
        )
    return bar_charts("Blocks saved by sharing in %, by number of sequences (figure 3.15)", panels)


if __name__ == "__main__":
    main()
