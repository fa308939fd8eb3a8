"""Cost models against what they are made of."""

import json
import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from quire.config.device_sheets import device_sheet
from quire.engine_core.executor.modelled import StepWork, VirtualClock
from quire.errors import OptionError
from quire.interfaces.cli.bench_limits import MachineLimits
from quire.interfaces.cli.program import main
from quire.simulation.costs.aiconfigurator import AiConfiguratorCosts
from quire.simulation.costs.linear import LinearCosts
from quire.simulation.costs.table import TableCosts
from quire.simulation.deployment import deploy
from quire.simulation.measured import MeasuredSteps


def truth(work):
    """A processor for which 16 tokens cost what one does."""
    many = 2e-5 * max(0, work.num_tokens - 16)
    return 2e-3 + many + 1e-5 * work.num_sampled + 3e-8 * work.context_tokens + 1e-9 * work.attention_pairs


def random_works(count, seed):
    pick = random.Random(seed)
    for _ in range(count):
        num_tokens = int(2 ** pick.uniform(0, 11))
        context = float(num_tokens + pick.randrange(50_000))
        rows = min(num_tokens, pick.choice([1, 4, 60]))
        yield StepWork(rows, num_tokens, rows, context, context * 1e4, 24 * num_tokens * context / rows)


def test_what_a_token_takes_longer_for_one_before_it_is_what_the_costs_say():
    deployment = deploy("llama-3-8b", device_sheet("h100"), costs=LinearCosts(0.1, 1e-4, per_pair=1e-9))
    assert deployment.capacity.seconds_per_pair == pytest.approx(32e-9)


def test_an_engine_prices_tokens_by_what_its_workers_measured_and_the_windows_of_their_layers():
    deployment = deploy("llama-3-8b", device_sheet("h100"), costs=LinearCosts(0.0, 1e-4, per_pair=1e-9))
    specs = enumerate(deployment.capacity.layers)
    layers = [msgspec.structs.replace(spec, sliding_window=100 * (number % 2)) for number, spec in specs]
    capacity = msgspec.structs.replace(deployment.capacity, layers=layers)
    core = replace(deployment, capacity=capacity).core(VirtualClock())
    # half of the layers see a hundred at most
    assert core.scheduler.budget.weights(np.array([0, 1000])) == pytest.approx([1, 1 + 32e-9 / 1e-4 * 550])


def test_a_table_finds_what_steps_take_among_accidents():
    pick = random.Random(1)
    works = list(random_works(1500, 2))
    seconds = [truth(work) * (1 + 0.02 * pick.random()) * (pick.choice([1, 1, 1, 8])) for work in works]
    costs = TableCosts.fit(works, seconds)
    others = list(random_works(300, 3))
    errors = [abs(costs.seconds(work) / truth(work) - 1) for work in others]
    assert np.median(errors) < 0.03
    assert np.percentile(errors, 95) < 0.1


def test_a_table_prices_columns_as_single_steps():
    works = list(random_works(300, 4))
    costs = TableCosts.fit(works, list(map(truth, works)))
    context = np.arange(1000.0, 1010.0)
    column = costs.seconds(StepWork(8, 8, 8, context, context, 3 * context))
    assert column.tolist() == [costs.seconds(StepWork(8, 8, 8, one, one, 3 * one)) for one in context.tolist()]


@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b", "gpt-oss-20b"])
def test_a_roofline_prices_columns_as_single_steps(model):
    costs = deploy(model, device_sheet("h200")).costs
    context = np.arange(100_000.0, 900_000.0, 70_001.0)
    column = costs.seconds(StepWork(64, 64, 64, context, context * 1e5, 32 * context))
    assert column.tolist() == [
        costs.seconds(StepWork(64, 64, 64, one, one * 1e5, 32 * one)) for one in context.tolist()
    ]


def test_a_roofline_is_the_weights_below_the_ridge_and_arithmetic_above():
    """2.1.1: 8 billion weights of two bytes are read in 5 ms; 2,048 tokens multiply them."""
    deployment = deploy("llama-3-8b", device_sheet("h100"))

    def seconds(num_tokens):
        return float(deployment.costs.seconds(StepWork(1, num_tokens, 1)))

    # at 80 % of the bandwidth, and the launches
    assert seconds(1) == pytest.approx(15.0e9 / 3.35e12 / 0.8 + 0.6e-3 + 32 * 12e-6, rel=0.05)
    assert seconds(64) < 1.05 * seconds(1)
    assert seconds(2048) == pytest.approx(2 * 7.0e9 * 2048 / 989e12 / 0.65 + 1e-3, rel=0.1)


def test_steps_that_were_measured_are_a_device(tmp_path, capsys):
    path = str(tmp_path / "steps.json")
    options = ["--device", "cpu", "--num-threads", "1", "--max-model-len", "512"]
    assert main(["bench", "steps", "--output", path, "--rounds", "2", *options]) == 0
    document = json.loads((tmp_path / "steps.json").read_text())
    assert len(document["works"]) == len(document["seconds"]) > 3
    argv = ["simulate", "--model", "embedded", "--device", path, "--trace", "alpaca", "--rate", "10"]
    assert main([*argv, "--num-requests", "5", "--max-model-len", "512"]) == 0
    assert "5 in" in capsys.readouterr().out
    (tmp_path / "steps.json").write_text("{}")
    assert main(argv) == 2
    assert "Make some: quire bench steps" in capsys.readouterr().err


STEPS = {
    "model": "embedded",
    "capacity": {
        "layers": [{"name": "0", "num_kv_heads": 1, "key_dim": 64, "value_dim": 64, "bytes_per_element": 2}],
        "available_bytes": 1 << 30,
        "explanation": "the test says so",
    },
    "swap_seconds_per_block": 1e-3,
    "works": [{"num_rows": 1, "num_tokens": tokens, "num_sampled": 1} for tokens in (1, 64)],
    "seconds": [0.01, 0.02],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": [0.0, 0.02]}, "a step must take more than 0"),
        ({"seconds": [-1, 0.02]}, "a step must take more than 0"),
        ({"seconds": [1e300, 0.02]}, "a step must take more than 0"),
        ({"works": [{"num_tokens": 1e308}, {"num_tokens": 1}]}, "num_tokens=1e+308 is no amount"),
        ({"works": [{"num_tokens": -1}, {"num_tokens": 1}]}, "num_tokens=-1.0 is no amount"),
        ({"swap_seconds_per_block": -1}, "swap_seconds_per_block=-1"),
        ({"capacity": {**STEPS["capacity"], "available_bytes": 10**18}}, "available_bytes=1000000000000000000 is"),
        ({"capacity": {**STEPS["capacity"], "seconds_per_token": 1e300}}, "seconds_per_token=1e+300 is no amount"),
    ],
)
def test_steps_that_nobody_can_have_measured_are_one_line(tmp_path, changes, message):
    path = tmp_path / "steps.json"
    path.write_text(json.dumps(STEPS))
    assert MeasuredSteps.read(path).seconds == STEPS["seconds"]
    path.write_text(json.dumps({**STEPS, **changes}))
    with pytest.raises(OptionError) as caught:
        MeasuredSteps.read(path)
    assert message in str(caught.value)


def test_steps_that_are_nested_too_deep_are_one_line(tmp_path):
    path = tmp_path / "steps.json"
    path.write_text(json.dumps(STEPS).replace("[0.01", "[" * 100_000))
    with pytest.raises(OptionError, match="no measured steps"):
        MeasuredSteps.read(path)


def test_this_processor_is_a_device_by_its_measured_rates(monkeypatch, capsys):
    argv = ["simulate", "--model", "qwen3-8b", "--device", "cpu", "--trace", "alpaca", "--rate", "0.01"]
    argv += ["--num-requests", "1", "--json", "-", "--max-model-len", "1024"]

    def tpot(gigabytes, peaks):
        limits = MachineLimits(1, gigabytes * 1e9, peaks)
        monkeypatch.setattr("quire.interfaces.cli.simulate.measure_limits", lambda threads: limits)
        monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**24}.get)
        assert main(argv) == 0
        return json.loads(capsys.readouterr().out)["tpot_s"]["mean"]

    # 15.1 GB of weights are read for each token
    assert tpot(50, {"bfloat16": 1e12}) == pytest.approx(15.1 / 50, rel=0.05)
    assert tpot(100, {"float32": 1e12}) == pytest.approx(15.1 / 100, rel=0.05)
    monkeypatch.setattr("quire.interfaces.cli.simulate.measure_limits", lambda threads: MachineLimits(1, 1e9, {}))
    assert main(argv) == 2
    assert "needs a C++ compiler" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ tables of operators


@pytest.fixture(scope="module")
def operators():
    pytest.importorskip("aiconfigurator_core")
    return deploy("llama-3-8b", device_sheet("h100"), costs=AiConfiguratorCosts).costs


def test_operators_price_columns_as_single_steps(operators):
    context = np.arange(64.0, 900_000.0, 7_001.0)
    column = operators.seconds(StepWork(64, 64, 64, context, context * 1e5, 32 * context))
    assert column.tolist() == [
        operators.seconds(StepWork(64, 64, 64, one, one * 1e5, 32 * one)) for one in context.tolist()
    ]
    assert (np.diff(column) >= 0).all()


def test_operators_tell_a_prompt_from_the_rows_that_decode(operators):
    """7 rows decode beside a prompt of 1,000 tokens behind 200: more of their context costs what it costs alone."""
    prompt_pairs = 1000 * (2 * 1200 - 1000 + 1) // 2

    def beside(context):
        return operators.seconds(StepWork(8, 1007, 8, context + 1200, 0.0, 32.0 * (context + prompt_pairs)))

    def alone(context):
        return operators.seconds(StepWork(7, 7, 7, context, 0.0, 32.0 * context))

    assert beside(70_000.0) - beside(3_500.0) == pytest.approx(alone(70_000.0) - alone(3_500.0))
    assert beside(3_500.0) > alone(3_500.0)


def test_operators_and_roofline_agree_within_a_factor_of_two(operators):
    roofline = deploy("llama-3-8b", device_sheet("h100")).costs
    for rows, context in ((1, 1000.0), (16, 16_000.0), (128, 128_000.0)):
        work = StepWork(rows, rows, rows, context, context * 131_072, 32 * context)
        assert 0.5 < operators.seconds(work) / roofline.seconds(work) < 2


def test_what_the_tables_do_not_have_is_refused(capsys):
    arguments = ["simulate", "--trace", "alpaca", "--rate", "1", "--costs", "aiconfigurator"]
    for model, device, reason in (
        ("llama-3-8b", "mi300x", "no tables of mi300x"),
        ("gpt-oss-20b", "h100", "do not attend to all tokens"),
    ):
        assert main([*arguments, "--model", model, "--device", device]) != 0
        assert reason in capsys.readouterr().err
