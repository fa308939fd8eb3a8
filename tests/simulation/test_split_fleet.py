"""Replicas that compute prompts and replicas that go on from them, on one clock."""

import json
from dataclasses import replace

import pytest

from quire.config.device_sheets import device_sheet
from quire.errors import OptionError
from quire.interfaces.cli.program import main
from quire.simulation.arrivals import Arrival
from quire.simulation.costs.linear import LinearCosts
from quire.simulation.deployment import deploy
from quire.simulation.run import simulate
from quire.simulation.split_fleet import Split

STEP, TOKEN = 0.1, 0.001
SHEET = device_sheet("a100-80gb")


def run(arrivals, split=None, *, model="opt-13b", seconds_per_block=0.01, **options):
    deployment = deploy(model, SHEET, costs=LinearCosts(STEP, TOKEN))
    deployment = replace(deployment, move_seconds_per_block=seconds_per_block)
    records = {}
    outcome = simulate(
        deployment, arrivals, on_record=lambda one: records.update({one.number: one}), split=split, **options
    )
    return outcome, records


def test_a_request_alone_takes_as_long_as_the_move_longer():
    arrivals = [Arrival(0.0, 50, 10)]
    _, alone = run(arrivals)
    outcome, records = run(arrivals, Split(1, 1))
    whole, split = alone[0], records[0]
    assert split.first_token_at == whole.first_token_at == pytest.approx(STEP + 50 * TOKEN)
    moved = outcome.summary["moved"]
    assert (moved["prompts"], moved["blocks"]) == (1, 4)
    assert split.ended_at == pytest.approx(whole.ended_at + moved["seconds_mean"])
    assert moved["seconds_mean"] == pytest.approx(4 * 0.01, abs=2e-3)
    assert (split.num_prompt_tokens, split.num_output_tokens) == (50, 10)


def test_no_token_is_computed_twice():
    arrivals = [Arrival(0.05 * number, 20 + 31 * number % 300, 1 + 17 * number % 40) for number in range(60)]
    outcome, records = run(arrivals, Split(2, 3), router="least_loaded")
    assert outcome.tally.num_completed == 60
    assert {number: record.num_output_tokens for number, record in records.items()} == {
        number: arrival.num_output_tokens for number, arrival in enumerate(arrivals)
    }
    engines = outcome.summary["engines"]
    num_tokens = [round(engine["steps"] * engine["tokens_per_step"]) for engine in engines]
    assert sum(num_tokens[:2]) == sum(arrival.num_prompt_tokens for arrival in arrivals)
    # the first token of each comes with its prompt
    assert sum(num_tokens[2:]) == sum(arrival.num_output_tokens - 1 for arrival in arrivals)
    assert outcome.summary["moved"]["prompts"] == sum(arrival.num_output_tokens > 1 for arrival in arrivals)


def test_leaps_change_nothing():
    arrivals = [Arrival(0.3 * number, 40 + number, 5 + 7 * (number % 5)) for number in range(30)]
    leaping, _ = run(arrivals, Split(2, 2))
    walking, _ = run(arrivals, Split(2, 2), may_leap=False)
    assert leaping.summary == walking.summary


def test_prompts_wait_for_their_link():
    arrivals = [Arrival(0.0, 160, 3), Arrival(0.0, 160, 3)]
    slow, records = run(arrivals, Split(1, 2), seconds_per_block=1.0)
    first, second = sorted(record.first_token_at + record.tpot for record in records.values())
    assert slow.summary["moved"]["seconds_mean"] > 14
    assert second - first > 4
    # with a link of its own nobody waits
    fast, _ = run(arrivals, Split(2, 2), seconds_per_block=1.0)
    assert fast.summary["moved"]["seconds_mean"] == pytest.approx(10, abs=0.01)
    # twice as fast a link, half the time
    rate = 2 * SHEET.link_bytes_per_second
    twice, _ = run(arrivals, Split(2, 2, rate), seconds_per_block=1.0)
    assert twice.summary["moved"]["seconds_mean"] == pytest.approx(5, abs=0.01)


def test_what_is_there_is_not_moved():
    arrivals = [Arrival(100.0 * turn, 512, 5, ((7, 480),)) for turn in range(3)]
    outcome, _ = run(arrivals, Split(1, 1))
    # 32 blocks, of which 30 are there from the second one on
    assert outcome.summary["moved"]["blocks"] == 32 + 2 + 2
    assert outcome.summary["cache_hit_rate"] == pytest.approx(2 * 480 / (3 * 512))


def test_several_sequences_begin_where_they_go_on():
    outcome, records = run([Arrival(0.0, 50, 4, num_sequences=3)], Split(1, 1))
    assert outcome.tally.num_completed == 1
    assert records[0].num_output_tokens == 12
    assert records[0].first_token_at > STEP + 50 * TOKEN


def test_windows_are_refused():
    with pytest.raises(OptionError, match="sliding windows or recurrent layers"):
        run([Arrival(0.0, 50, 4)], Split(1, 1), model="gpt-oss-20b")


ASK = ["simulate", "--model", "llama-3-8b", "--device", "h100", "--trace", "azure-conv", "--rate", "20"]


def test_the_command(capsys):
    assert main([*ASK, "--num-requests", "30", "--prefill", "1", "--decode", "2", "--kv-link", "25"]) == 0
    table = capsys.readouterr().out
    assert "on 3 x h100" in table
    assert "moved               30 prompts" in table
    assert main([*ASK, "--num-requests", "30", "--prefill", "1", "--decode", "2", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["prefill"], document["decode"], document["devices"]) == (1, 2, 3)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--prefill", "1"], "Give both"),
        (["--decode", "1"], "Give both"),
        (["--prefill", "1", "--decode", "1", "--replicas", "2"], "no --replicas"),
        (["--prefill", "0", "--decode", "1"], "--prefill"),
        (["--kv-link", "5"], "nothing goes from one engine to another"),
        (["--prefill", "4000", "--decode", "4000"], "a router has at most"),
    ],
)
def test_a_mistake_is_one_line(capsys, flags, says):
    assert main([*ASK, *flags]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said
