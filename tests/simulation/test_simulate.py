"""The core on a virtual clock: times that can be worked out by hand, and decisions that are the core's own."""

import json
import math

import pytest

from quire.config.device_sheets import device_sheet
from quire.engine_core.executor.modelled import DraftQuality, ModelledExecutor, StepWork, VirtualClock
from quire.errors import CapacityError, ModelError, OptionError
from quire.interfaces.cli.program import main
from quire.simulation.arrivals import Arrival, prompt_of, request_of
from quire.simulation.costs.linear import LinearCosts
from quire.simulation.deployment import deploy
from quire.simulation.run import simulate
from quire.simulation.shapes import shape_names
from quire.simulation.slo import Slo
from quire.simulation.traces.formats import open_trace
from quire.simulation.traces.table import TraceError

LINEAR = LinearCosts(per_step=0.1, per_token=0.001)


def engine(**options):
    return deploy("opt-13b", device_sheet("a100-80gb"), {"scheduling_policy": "fifo", **options}, costs=LINEAR)


def run(arrivals, deployment=None, **options):
    records = []
    outcome = simulate(deployment or engine(**options), arrivals, on_record=records.append)
    return outcome, {record.number: record for record in records}


def test_a_request_alone_takes_what_its_steps_take():
    _, records = run([Arrival(2.0, 50, 3)])
    # the prompt and a token of output, then two steps of a token each
    assert records[0].ttft == pytest.approx(0.1 + 0.05)
    assert records[0].latency == pytest.approx(0.1 + 0.05 + 2 * 0.101)
    assert records[0].tpot == pytest.approx(0.101)
    assert records[0].normalized_latency == pytest.approx(records[0].latency / 3)


def test_who_comes_while_a_step_runs_joins_the_next_one():
    _, records = run([Arrival(0.0, 50, 2), Arrival(0.01, 40, 1)])
    # the second step computes a token of the first and the prompt of the second
    assert records[1].ended_at == records[0].ended_at == pytest.approx(0.15 + 0.1 + 0.041)


def test_prompts_that_begin_alike_are_computed_once():
    pieces = ((7, 64),)
    outcome, records = run([Arrival(0.0, 100, 1, pieces), Arrival(1.0, 100, 1, pieces), Arrival(2.0, 100, 1)])
    assert [records[number].num_cached_tokens for number in range(3)] == [0, 64, 0]
    assert records[1].ttft == pytest.approx(0.1 + 0.036)
    assert outcome.summary["cache_hit_rate"] == pytest.approx(64 / 300)


def test_parallel_samples_share_their_prompt_and_beams_run():
    _, records = run([Arrival(0.0, 64, 5, num_sequences=4), Arrival(10.0, 64, 5, num_sequences=3, is_beam_search=True)])
    assert records[0].num_output_tokens == 20
    # the prompt, a step in which the first token is shared out, then four rows a step
    assert records[0].latency == pytest.approx(0.164 + 0.1 * 4 + 0.004 * 4, abs=0.2)
    assert records[1].num_output_tokens == 15
    assert not records[1].error


def test_memory_that_is_short_makes_somebody_give_way():
    arrivals = [Arrival(0.0, 100, 60), Arrival(0.0, 100, 60)]
    options = {"num_gpu_blocks_override": 16, "max_model_len": 200}
    outcome, records = run(arrivals, preemption_mode="recompute", **options)
    assert outcome.summary["preemptions"]["recomputed"] == 1
    assert len(records) == 2
    swapping, _ = run(arrivals, preemption_mode="swap", **options)
    assert swapping.summary["preemptions"]["swapped"] == 1


def test_the_modelled_worker_counts_context_row_by_row():
    deployment = deploy("gpt-oss-20b", device_sheet("h100"))
    seen: list[StepWork] = []

    class Costs:
        def seconds(self, work):
            seen.append(work)
            return 1.0

    core = deployment.core(VirtualClock())
    assert isinstance(core.executor, ModelledExecutor)
    core.executor.costs = Costs()
    core.add(request_of(Arrival(0.0, 1000, 2), 0, 1000))
    while core.has_work:
        core.step()
    assert [work.num_tokens for work in seen] == [1000, 1]
    per_token = 2 * 8 * 64 * 2
    # half of the layers see 128 tokens
    assert seen[1].context_bytes == 12 * per_token * 1001 + 12 * per_token * 128
    assert seen[1].attention_pairs == 12 * 1001 + 12 * 128
    assert seen[0].attention_pairs == 12 * 1000 * 1001 / 2 + 12 * sum(min(place, 128) for place in range(1, 1001))


def test_prompts_differ_in_every_block_where_contents_do():
    first = prompt_of(Arrival(0.0, 64, 1, ((1, 32),)), 5, 1000)
    second = prompt_of(Arrival(0.0, 64, 1, ((1, 32),)), 6, 1000)
    third = prompt_of(Arrival(0.0, 64, 1, ((1001, 32),)), 5, 1000)
    assert (first[:32] == second[:32]).all()
    assert not any((first[i : i + 16] == second[i : i + 16]).all() for i in (32, 48))
    assert not any((first[i : i + 16] == third[i : i + 16]).all() for i in (0, 16))


@pytest.mark.parametrize("name", shape_names())
def test_every_shape_runs_where_it_fits(name):
    options = {"tensor_parallel_size": {"opt-175b": 8, "deepseek-v3": 16, "opt-66b": 4}.get(name, 2)}
    outcome, _ = run([Arrival(0.0, 300, 5)], deploy(name, device_sheet("h200"), options))
    assert outcome.tally.num_completed == 1
    assert 0 < outcome.summary["seconds"] < 1


def test_a_device_that_is_twice_as_fast_is_faster_and_more_ranks_are_too():
    def seconds(device, **options):
        deployment = deploy("llama-3.3-70b", device_sheet(device), options)
        return simulate(deployment, [Arrival(0.0, 500, 50)]).summary["seconds"]

    two, four = seconds("h200", tensor_parallel_size=2), seconds("h200", tensor_parallel_size=4)
    assert two / 2 < four < two
    assert seconds("b200", tensor_parallel_size=2) < two
    # stages help nobody who is alone
    assert seconds("h200", tensor_parallel_size=2, pipeline_parallel_size=2) == pytest.approx(two, rel=0.05)


def test_goodput_and_verdicts():
    slo = Slo.parse("ttft_p90<500ms, latency<100s, tpot_mean<1ms, ttft_p0<90s")
    outcome = simulate(engine(), [Arrival(0.0, 50, 3), Arrival(5.0, 50, 3)], slo=slo)
    found = outcome.summary["slo"]
    assert list(found["terms"].values()) == [True, True, False, True]
    assert not found["is_met"]
    assert found["good_requests"] == 0


@pytest.mark.parametrize("text", ["ttft", "tftt<1s", "ttft<0s", "ttft<1 parsec", "ttft<1..2s"])
def test_objectives_that_mean_nothing_are_refused(text):
    with pytest.raises(OptionError, match="slo="):
        Slo.parse(text)


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,9\n"
)


def test_azure_traces_are_read(tmp_path):
    (tmp_path / "trace.csv").write_text(AZURE)
    trace = open_trace(str(tmp_path / "trace.csv"))
    second = trace.table[1]
    assert (second.num_prompt_tokens, second.num_output_tokens) == (396, 9)
    assert second.at == pytest.approx(4.314579)
    assert not trace.has_contents


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "first line must be"),
        ("a,b\n1,2\n", "first line must be"),
        (AZURE.split("\n")[0], "no request"),
        (AZURE + "2023-11-16 18:15:51,12\n", "line 4: 2 columns"),
        (AZURE + "2023-11-16 18:15:51,-3,4\n", "line 4: ContextTokens='-3'"),
        (AZURE + "yesterday,3,4\n", "line 4: TIMESTAMP='yesterday'"),
    ],
)
def test_what_is_wrong_with_a_trace_is_one_line(tmp_path, text, message):
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(TraceError, match=message) as caught:
        open_trace(str(tmp_path / "trace.csv"))
    assert "\n" not in str(caught.value)


def test_the_command_prints_numbers_and_the_same_bytes_each_time(tmp_path, capsys):
    (tmp_path / "trace.csv").write_text(AZURE)
    argv = ["simulate", "--model", "llama-3-8b", "--device", "h100", "--trace", str(tmp_path / "trace.csv")]
    assert main([*argv, "--slo", "ttft<1s"]) == 0
    assert "goodput" in capsys.readouterr().out
    printed = []
    for _ in range(2):
        assert main([*argv, "--json", "-"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    document = json.loads(printed[0])
    assert document["requests"]["completed"] == 2
    assert math.isfinite(document["ttft_s"]["p99"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--device": "h1000"}, "device=h1000: must be one of"),
        ({"--device": "tpu"}, "or a file of quire bench steps (.json)."),
        ({"--model": "llama-3-9b"}, "model=llama-3-9b: must be one of"),
        ({"--model": "opt-175b"}, "Raise tensor_parallel_size"),
        ({"--trace": "nowhere.csv"}, "there is no such file"),
        ({"--trace": "nowhere.txt"}, "there is no such file"),
        ({"--slo": "speed<1s"}, "slo=speed<1s"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_line(tmp_path, capsys, change, message):
    (tmp_path / "trace.csv").write_text(AZURE)
    flags = {"--model": "llama-3-8b", "--device": "h100", "--trace": str(tmp_path / "trace.csv"), **change}
    assert main(["simulate", *(word for pair in flags.items() for word in pair)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_misspelt_key_of_the_model_is_refused_as_by_an_engine(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("quire.config.overrides.cache_folder", lambda: tmp_path / "cache")
    flags = ["--model", "llama-3-8b", "--device", "h100", "--trace", "alpaca", "--rate", "1", "--num-requests", "1"]
    assert main(["simulate", *flags, "--hf-overrides", '{"hiden_size": 5}']) == 2
    assert "hf_overrides: hiden_size: neither the configuration of model_type=llama nor Quire" in (
        capsys.readouterr().err
    )


def test_errors_of_a_deployment():
    with pytest.raises(CapacityError, match="weights take"):
        deploy("llama-3.3-70b", device_sheet("a100-40gb"))
    with pytest.raises(ModelError, match="must be one of"):
        deploy("no-such-model", device_sheet("a100-40gb"))


def test_drafts_that_are_right_save_steps_and_wrong_ones_are_given_up():
    def steps(acceptance):
        options = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
        deployment = deploy("llama-3-8b", device_sheet("h100"), options, drafts=DraftQuality(acceptance))
        outcome = simulate(deployment, [Arrival(0.0, 100, 400)])
        assert outcome.tally.num_output_tokens == 400
        return outcome.summary["engines"][0]["steps"]

    assert steps(1.0) < 110
    assert 130 < steps(0.7) < 280
    assert 350 < steps(0.0) <= 401


def test_requests_that_can_never_run_fail_alone_and_all_of_them_are_one_line(tmp_path, capsys):
    outcome, records = run([Arrival(0.0, 3000, 5), Arrival(0.0, 30, 5)])
    assert "maximum context length" in records[0].error
    assert (outcome.tally.num_completed, outcome.summary["requests"]["failed"]) == (1, 1)
    (tmp_path / "trace.csv").write_text(AZURE.replace(",374,", ",9374,").replace(",396,", ",9396,"))
    argv = ["simulate", "--model", "llama-3-8b", "--device", "h100", "--trace", str(tmp_path / "trace.csv")]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert "no request of trace.csv could run: This model's maximum context length" in error
    assert error.count("\n") == 1
