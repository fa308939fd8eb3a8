"""The paper's evaluation: workloads, knees, reports, and one small run of each system."""

from __future__ import annotations

import re
from dataclasses import replace
from statistics import mean, stdev

import pytest

from quire.errors import OptionError
from quire.interfaces.cli.program import main
from quire.simulation.baselines.waste import MemoryUse
from quire.simulation.paper.assumptions import RANGES, Assumptions
from quire.simulation.paper.experiment import Case, Knee, Measured, capacity, find_knee, measure
from quire.simulation.paper.figures import FIGURES
from quire.simulation.paper.figures.derivation import LeastHostTime
from quire.simulation.paper.figures.memory import num_slots
from quire.simulation.paper.figures.real import Comparison, Ran, RunAll
from quire.simulation.paper.figures.sensitivity import Sensitivity, points
from quire.simulation.paper.lab import CapacityOf, KneeOf, Lab, RunAt, Under
from quire.simulation.paper.orderings import Ordering, orderings
from quire.simulation.paper.report import Line, Report
from quire.simulation.paper.systems import (
    FASTER_TRANSFORMER,
    MAX,
    OPT_13B,
    OPT_66B,
    OPT_175B,
    ORACLE,
    ORCAS,
    PAGED,
)
from quire.simulation.paper.workloads import ALPACA, CHAT, SHAREGPT, translation

ASSUMED = Assumptions()


@pytest.mark.parametrize(("setup", "slots"), [(OPT_13B, 15_700), (OPT_66B, 9_700), (OPT_175B, 60_100)])
def test_table_3_1_with_one_share(setup, slots):
    assert num_slots(setup, ASSUMED) == pytest.approx(slots, rel=0.02)


def test_lengths_have_the_means_of_figure_3_11():
    arrivals = list(SHAREGPT.arrivals(2.0, 500, ASSUMED))
    assert mean(one.num_prompt_tokens for one in arrivals) == pytest.approx(161.31, rel=0.02)
    outputs = [one.num_output_tokens for one in arrivals]
    assert mean(outputs) == pytest.approx(337.99, rel=0.02)
    assert stdev(outputs) / mean(outputs) == pytest.approx(ASSUMED.variation, rel=0.05)
    assert arrivals[-1].at == pytest.approx(250, rel=0.2)
    assert list(SHAREGPT.arrivals(2.0, 500, ASSUMED)) == arrivals


def test_chats_and_translations():
    chats = list(CHAT.arrivals(1.0, 300, ASSUMED))
    assert max(one.num_prompt_tokens for one in chats) == 1024
    assert sum(one.num_prompt_tokens == 1024 for one in chats) > 150
    shared = list(translation(5, 341, ASSUMED).arrivals(1.0, 50, ASSUMED))
    assert all(one.pieces == ((1, 341),) and one.num_prompt_tokens > 341 for one in shared)


def measured(rate: float, latency: float = 0.05) -> Measured:
    return Measured(rate, latency, 10 * rate, MemoryUse(1, 1, 1, 1), 0.1, 0.2, 0)


@pytest.mark.parametrize("start", [0.1, 1.0, 3.0, 50.0])
def test_a_knee_is_found_wherever_the_search_begins(start):
    knee = find_knee(lambda rate: measured(rate, 0.05 if rate < 3.3 else 9.0), 0.1, start)
    assert 3.3 / 1.04 <= knee.rate < 3.3
    assert [point.rate for point in knee.points] == sorted(point.rate for point in knee.points)


@pytest.mark.parametrize("system", [PAGED, *ORCAS, FASTER_TRANSFORMER])
def test_what_a_system_does_with_little_to_do(system):
    """Nobody waits: a token takes a step, and in a batch that runs to its end not much more."""
    workload = replace(ALPACA, mean_output=20.0)
    run = measure(Case(system, OPT_13B, workload), 0.1, 20, ASSUMED)
    assert 0.02 < run.normalized_latency < 0.05
    assert sum(
        (run.memory.token_states, run.memory.reserved, run.memory.internal, run.memory.external)
    ) == pytest.approx(1)


def test_orca_max_runs_seven_requests_and_pages_run_more():
    runs = {system: measure(Case(system, OPT_13B, ALPACA), 30.0, 200, ASSUMED) for system in (PAGED, MAX)}
    assert 6 < runs[MAX].num_batched <= 7
    assert runs[PAGED].num_batched > 20
    assert runs[MAX].normalized_latency > 3 * runs[PAGED].normalized_latency
    assert runs[MAX].memory.internal > 0.5


def test_a_run_that_is_lost_is_given_up():
    """However short the time is in which all arrive."""
    for rate in (20.0, 500.0):
        lost = measure(Case(MAX, OPT_13B, SHAREGPT), rate, 120, ASSUMED, give_up_beyond=0.1, drains=True)
        assert lost.was_given_up
        assert lost.normalized_latency > 0.1


def test_a_batch_is_told_at_its_end():
    together = measure(Case(FASTER_TRANSFORMER, OPT_13B, ALPACA), 4.0, 60, ASSUMED, drains=True)
    one_by_one = measure(Case(MAX, OPT_13B, ALPACA), 4.0, 60, ASSUMED, drains=True)
    assert together.normalized_latency > 1.5 * one_by_one.normalized_latency


def results_of(task):
    """As if systems differed by a factor."""
    if isinstance(task, LeastHostTime):
        return 0.3e-3
    if isinstance(task, RunAll):
        ran = {system: Ran(5.0, 2.0 if system == PAGED else 1.0) for system in (*ORCAS, PAGED)}
        return Comparison(ran, ran, 9, 10)
    if isinstance(task, Under):
        return results_of(task.task)
    rate = 4.0 if task.case.system == PAGED else 2.0
    if isinstance(task, CapacityOf):
        return rate
    return Knee(rate, (measured(rate / 2), measured(rate))) if isinstance(task, KneeOf) else measured(rate)


# what has a column of the paper's
FIGURES_OF_THE_PAPER = [name for name in FIGURES if name != "sensitivity"]


@pytest.mark.parametrize("name", FIGURES_OF_THE_PAPER)
def test_every_figure_says_paper_ours_and_their_ratio(name):
    figure = FIGURES[name]
    tasks = figure.tasks(ASSUMED)
    report = figure.report({task: results_of(task) for task in tasks}, ASSUMED)
    assert any(line.paper is not None for line in report.lines)
    text = report.text()
    assert text.splitlines()[0].startswith(name)
    assert len(text.splitlines()) == 2 + len(report.lines)
    assert report.markdown().count("\n") == len(report.lines) - 1
    assert all(chart.startswith("<svg") for chart in report.charts.values())
    factors = [line.ours for line in report.lines if line.name.endswith("vLLM / Orca (Oracle)")]
    assert all(factor == 2.0 for factor in factors) or name == "fig3.13"


def test_no_two_figures_have_different_parameters():
    """One search for a system and workload, whatever figure asks; all tasks take what is assumed from one place."""
    tasks = [task for figure in FIGURES.values() for task in figure.tasks(ASSUMED)]
    knees = {task for task in tasks if isinstance(task, KneeOf)}
    assert len({task.case for task in knees}) == len(knees)


def test_equal_runs_are_made_once():
    lab = Lab(ASSUMED, scale=0.01)
    task = RunAt(Case(ORACLE, OPT_13B, ALPACA), 5.0, 1000)
    first = lab.results([task, task])[task]
    assert lab.results([RunAt(Case(ORACLE, OPT_13B, ALPACA), 5.0, 1000)])[task] is first


@pytest.mark.parametrize("system", [PAGED, FASTER_TRANSFORMER])
def test_a_run_of_the_smallest_scale_finds_something(system):
    """Twenty-four requests at a hundredth are none; and those of one batch end together."""
    case = Case(system, OPT_13B, SHAREGPT)
    assert 0 < CapacityOf(case, 24).run(ASSUMED, 0.01) < 1e3
    assert RunAt(case, 1.0, 24).run(ASSUMED, 0.01).normalized_latency > 0


@pytest.mark.parametrize(
    ("ours", "paper", "ratio"), [(3.0, 2.0, 1.5), (2.0, (1.7, 2.7), 1.0), (3.0, (1.0, 2.0), 1.5), (1.0, None, None)]
)
def test_a_ratio(ours, paper, ratio):
    assert Line("x", ours, paper).ratio == ratio


def test_a_report_in_words():
    report = Report("fig0", "nothing", [Line("first", 1234.5, 1000, ""), Line("second one", 12.3, (1.0, 2.0), " %")])
    assert report.text().splitlines() == [
        "fig0: nothing",
        "                     paper        ours  ratio",
        "first                1,000       1,234  1.23",
        "second one   1.00 - 2.00 %     12.30 %  6.15",
    ]


def test_assumptions_can_be_changed():
    assert Assumptions().assume(["variation=1", "most_rounds=3"]) == Assumptions(variation=1.0, most_rounds=3)
    for text, words in [("x=1", "must be one of"), ("variation=a", "must be a number"), ("variation=0", "above 0")]:
        with pytest.raises(OptionError, match=words):
            Assumptions().assume([text])


def test_a_system_serves_as_much_as_waits_long_enough():
    """Twice as many requests change nothing, and the rate lies beside the knee."""
    case = Case(ORACLE, OPT_13B, ALPACA)
    rate = capacity(case, 400, ASSUMED)
    assert capacity(case, 800, ASSUMED) == pytest.approx(rate, rel=0.1)
    late, soon = (measure(case, factor * rate, 300, ASSUMED, drains=True).normalized_latency for factor in (1.6, 0.5))
    assert late > 1.5 * soon


def test_what_copies_and_prompts_come_to():
    """Samples share their prompt, so it counts once; beams of contiguous memory copy all that there is."""
    beams = replace(ALPACA, num_sequences=4, is_beam_search=True)
    paged, contiguous = (measure(Case(system, OPT_13B, beams), 1.0, 30, ASSUMED) for system in (PAGED, ORACLE))
    assert 0 < paged.num_copied_blocks < contiguous.num_copied_blocks / 2
    shares = [
        measure(Case(PAGED, OPT_13B, replace(ALPACA, num_sequences=n)), 1.0, 40, ASSUMED).prompt_share
        for n in (1, 2, 6)
    ]
    assert shares == sorted(shares, reverse=True)


def test_every_assumption_lies_in_its_range_and_ends_are_looked_at():
    for name, between in RANGES.items():
        assert between.low <= getattr(ASSUMED, name) <= between.high
        assert set(between.figures) <= set(FIGURES)
    changes = [point.changes for point in points()]
    assert changes[0] == {}
    for name, between in RANGES.items():
        assert {name: between.low} in changes
        assert {name: between.high} in changes
    drawn = [one for one in changes if len(one) == len(RANGES)]
    for name, between in RANGES.items():
        # each of equally wide parts of the range once
        values = sorted(one[name] for one in drawn)
        width = (between.high / between.low) ** (1 / len(drawn))
        edges = [between.low * width**number for number in range(len(drawn) + 1)]
        assert all(low <= value <= high for low, value, high in zip(edges, values, edges[1:], strict=False))
    assert points() == points()


def test_an_ordering_holds_where_its_numbers_rise():
    run = RunAt(Case(PAGED, OPT_13B, ALPACA), 1.0, 10)
    numbers = tuple((name, lambda results, name=name: results[name]) for name in "abc")
    ordering = Ordering("fig0", "a before b before c", numbers, (run,))
    assert ordering.lead({"a": 1.0, "b": 2.0, "c": 3.0}) == 1.5
    assert ordering.lead({"a": 1.0, "b": 2.0, "c": 1.0}) == 0.5


def test_sensitivity_says_where_orderings_flip():
    """As if Oracle were ahead with slow kernels."""
    figure = Sensitivity()
    results = {}
    for task in figure.tasks(ASSUMED):
        changed = dict(task.changes)
        results[task] = results_of(task)
        if changed == {"compute_share": RANGES["compute_share"].low} and isinstance(task.task, CapacityOf):
            results[task] = 2.0 if task.task.case.system == PAGED else 4.0
    report = figure.report(results, ASSUMED)
    by_text = {(one.ordering.figure, one.ordering.text): one for one in report.findings}
    prefixes = by_text["fig3.16", "vLLM / Oracle"]
    assert prefixes.flips == list(prefixes.leads)  # level at 2 everywhere
    panel = by_text["fig3.12a", "opt-13b, ShareGPT"]
    assert panel.fixed["vLLM"] == 4.0
    assert panel.closest == ("compute_share=0.45", 0.5)
    assert "compute_share=0.45" in report.text()
    assert report.markdown().count("\n") == len(report.findings) - 1


def test_orderings_of_every_figure():
    figures = {one.figure.rstrip("abcdef") for one in orderings(ASSUMED)}
    assert figures == {name for name in FIGURES if name.startswith("fig")}


def test_a_small_run_on_this_processor_beside_a_simulated_one():
    """Figure 3.13 in small: as many at once, and the same tokens in every system."""
    found = RunAll(160).run(ASSUMED, 0.3)
    assert found.num_equal == found.num_requests == 48
    assert found.real[MAX].num_batched == 7
    assert found.real[PAGED].num_batched > 1.5 * found.real[ORACLE].num_batched > 1.5 * found.real[MAX].num_batched
    for system in ORCAS:
        assert found.simulated[system].num_batched == found.real[system].num_batched


def test_the_command(tmp_path, capsys):
    assert main(["repro", "table3.1", "--write", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"opt-66b +9,700 +9,\d\d\d +\d\.\d\d", text)
    assert main(["repro", "fig3.15", "--scale", "0.02", "--jobs", "1", "--write", str(tmp_path)]) == 0
    assert (tmp_path / "fig3.15.svg").read_text().startswith("<svg")
    assert main(["repro", "fig9"]) == 2
    assert main(["repro", "table3.1", "--scale", "0"]) == 2


@pytest.mark.nightly
def test_all_figures_run(capsys):
    assert main(["repro", "all", "--scale", "0.05"]) == 0
