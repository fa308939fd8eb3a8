"""quire bench, and its arithmetic."""

import asyncio
import itertools
import json

from quire.interfaces.cli import main
from quire.interfaces.cli.bench import Load, measure
from quire.interfaces.cli.bench_report import Report, Timeline


def load(**values) -> Load:
    small = {"num_requests": 4, "concurrency": 0, "input_length": 6, "output_length": 2, "shared_prefix": 2}
    return Load(**{**small, "num_warmups": 1, "seed": 7, **values})


def test_prompts_are_repeatable_and_share_their_beginning():
    prompts = load().prompts(100)
    assert prompts == load().prompts(100)
    assert prompts != load(seed=8).prompts(100)
    assert len(prompts) == 5
    assert {len(prompt) for prompt in prompts} == {6}
    assert len({tuple(prompt[:2]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 5


def test_what_is_measured(engine):
    ticks = itertools.count()
    report = asyncio.run(measure(engine, load(num_warmups=0, concurrency=1), 0.0, clock=lambda: float(next(ticks))))
    # start of all, then three readings a request, then the end
    assert report.seconds == 13.0
    assert report.timelines[0].arrivals == [(2.0, 1), (3.0, 1)]
    assert report.timelines[0].start == 1.0
    assert engine.max_open == 1
    sampling = engine.sampling[0]
    assert (sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos) == (2, 2, True)


def test_the_warm_up_does_not_count(engine):
    report = asyncio.run(measure(engine, load(num_warmups=3), 0.0))
    assert len(engine.prompts) == 7
    assert len(report.timelines) == 4


def test_the_arithmetic():
    first = Timeline(num_prompt_tokens=10, start=1.0, arrivals=[(2.0, 1), (2.5, 2), (4.0, 1)])
    second = Timeline(num_prompt_tokens=10, start=1.0, arrivals=[(5.0, 4)])
    numbers = Report("m", {}, [first, second], seconds=4.0).as_dict()
    assert numbers["requests_per_second"] == 0.5
    assert (numbers["prompt_tokens"], numbers["output_tokens"]) == (20, 8)
    assert (numbers["output_tokens_per_second"], numbers["total_tokens_per_second"]) == (2.0, 7.0)
    assert numbers["time_to_first_token_ms"] == {"mean": 2500, "p50": 1000, "p90": 4000, "p99": 4000, "max": 4000}
    assert numbers["inter_token_latency_ms"]["mean"] == 1000
    # three tokens after the first piece in two seconds; the second request has no second piece
    assert numbers["time_per_output_token_ms"]["p50"] == 666.667
    assert numbers["request_latency_ms"]["max"] == 4000
    # waiting counts: four tokens in three seconds, and four in four
    assert numbers["normalized_latency_ms"]["mean"] == 875


def test_a_run_without_gaps_is_no_mistake():
    numbers = Report("m", {}, [Timeline(1, 0.0, [(1.0, 1)])], seconds=1.0).as_dict()
    assert numbers["inter_token_latency_ms"]["mean"] == 0.0


def test_the_command(engine, capsys):
    argv = ["bench", "folder", "--num-requests", "3", "--seed", "5", "--concurrency", "2", "--temperature", "1"]
    assert main([*argv, "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["load"]["num_requests"] == 3
    assert numbers["output_tokens"] == 6
    assert engine.options == {"model": "folder", "seed": 5}
    assert main(argv) == 0
    table = capsys.readouterr().out
    assert "time to first token" in table
    assert "output tokens" in table
