"""What to buy: the fewest replicas that keep a promise, what binds, and what is no answer."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from quire.config.device_sheets import device_sheet
from quire.interfaces.cli.program import main
from quire.simulation.arrivals import Arrival
from quire.simulation.planner import PRICES, Question, plan
from quire.simulation.slo import Slo

# a prompt takes some 0.2 s of an H100, so 20 a second are four times what one can take
BURST = [Arrival(0.05 * number, 8000, 4) for number in range(48)]


def question(slo: str, **changes) -> Question:
    values = {"model": "llama-3-8b", "arrivals": BURST, "slo": Slo.parse(slo), "options": {"max_model_len": 8192}}
    return Question(**{**values, **changes})


def test_the_fewest_replicas_that_keep_a_promise():
    found = plan(question("ttft_p90<1s"), [device_sheet("h100")], [1], PRICES)
    (one,) = found.found
    assert one.trial.engines.num_replicas > 2
    assert one.trial.values["ttft_p90<1s"] < 1
    # one replica fewer does not
    assert one.fewer is not None
    assert one.fewer.engines.num_replicas == one.trial.engines.num_replicas - 1
    assert one.fewer.values["ttft_p90<1s"] >= 1
    assert "ttft_p90<1s" in one.binds
    assert one.trial.engines.price == PRICES["h100"] * one.trial.engines.num_devices


def test_cheaper_devices_and_larger_engines_are_compared():
    found = plan(question("ttft_p90<2s"), [device_sheet("h100"), device_sheet("a100-80gb")], [1, 2], PRICES)
    prices = [one.trial.engines.price for one in found.found]
    assert prices == sorted(prices)
    assert len(found.found) == 4
    assert found.found[0] in found.pareto
    for one in found.found:
        if one not in found.pareto:
            assert any(
                other.trial.engines.price <= one.trial.engines.price
                and other.trial.values["ttft_p90<2s"] <= one.trial.values["ttft_p90<2s"]
                for other in found.pareto
            )


def test_no_number_of_replicas_makes_a_step_shorter():
    found = plan(question("tpot_p50<1ms", most_devices=4), [device_sheet("h100")], [1, 2], PRICES)
    assert found.found == []
    assert {trial.engines.devices_per_engine for trial in found.hopeless} == {1, 2}


def test_models_that_do_not_fit():
    found = plan(
        question("ttft_p90<1s", model="llama-3.3-70b", arrivals=BURST[:2]), [device_sheet("h100")], [1, 4], PRICES
    )
    assert list(found.too_small) == ["1 h100"]
    assert len(found.found) == 1


def run_command(capsys, *flags: str) -> tuple[int, str]:
    argv = ["plan", "llama-3-8b", "--trace", "sharegpt", "--rate", "4", "--num-requests", "30", "--sizes", "1", *flags]
    status = main(argv)
    shown = capsys.readouterr()
    return status, shown.out + shown.err


def test_the_command(tmp_path, capsys):
    files = ["--json", str(tmp_path / "plan.json"), "--write", str(tmp_path / "plan.svg")]
    status, text = run_command(capsys, "--slo", "ttft_p90<1s,tpot_p90<50ms", "--devices", "h100,h200", *files)
    assert status == 0
    assert re.search(r"cheapest +1 h100, \$2.50 an hour", text)
    assert "what binds" in text
    written = json.loads((tmp_path / "plan.json").read_text())
    assert [one["engines"]["device"] for one in written["found"]] == ["h100", "h200"]
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")


def test_prices_decide_what_is_cheapest(capsys):
    flags = ("--slo", "ttft_p90<1s", "--devices", "h100,h200", "--prices", "h100=9,h200=2")
    status, text = run_command(capsys, *flags)
    assert status == 0
    assert re.search(r"cheapest +1 h200, \$2.00 an hour", text)


def test_a_promise_that_nothing_keeps(capsys):
    status, text = run_command(capsys, "--slo", "tpot_p90<1us", "--most-devices", "2")
    assert status == 1
    assert text.startswith("nothing keeps it    ")
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--slo", "ttft<soon"], "a term looks like"),
        (["--slo", ""], "nothing is promised"),
        (["--slo", "ttft<1s", "--devices", "h101"], "must be one of"),
        (["--slo", "ttft<1s", "--prices", "h100=cheap"], "must be a device and dollars an hour"),
        (["--slo", "ttft<1s", "--sizes", "0"], "--sizes"),
    ],
)
def test_mistakes_are_one_line(capsys, flags, words):
    status, text = run_command(capsys, *flags)
    assert status == 2
    assert words in text
    assert text.count("\n") == 1


def test_a_promise_needs_requests(capsys):
    assert main(["plan", "llama-3-8b", "--slo", "ttft<1s"]) == 2
    assert "Give --trace" in capsys.readouterr().err
    assert main(["plan", "llama-3-8b", "--trace", "alpaca"]) == 2
    assert "Give --slo" in capsys.readouterr().err


def test_a_plan_of_a_shape_by_its_name(capsys):
    argv = ["plan", "opt-13b", "--dtype", "float16", "--device", "a100-40gb", "--gpu-memory-utilization", "0.94"]
    assert main(argv) == 0
    assert "15,616 tokens" in capsys.readouterr().out


PLANNING = Path(__file__).parents[2] / "docs" / "planning.md"
SHOWN = re.findall(r"^    (quire plan .+)\n    (.+)$", PLANNING.read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.mark.parametrize(("command", "answer"), SHOWN)
def test_the_page_says_what_its_commands_say(command, answer, capsys, monkeypatch):
    """Each command of docs/planning.md, and the line of its output that stands below it."""
    monkeypatch.chdir(PLANNING.parents[1])
    assert main(shlex.split(command)[1:]) == 0
    assert answer in capsys.readouterr().out.splitlines()


def test_the_page_answers_five_questions():
    assert len(SHOWN) >= 5
