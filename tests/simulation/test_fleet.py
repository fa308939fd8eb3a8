"""Several engines behind the engine's own router."""

import json

import pytest

from quire.config.device_sheets import device_sheet
from quire.interfaces.cli.program import main
from quire.simulation.arrivals import Arrival
from quire.simulation.costs.linear import LinearCosts
from quire.simulation.deployment import deploy
from quire.simulation.run import simulate


def run(arrivals, num_replicas, **fleet):
    deployment = deploy("opt-13b", device_sheet("a100-80gb"), costs=LinearCosts(0.1, 0.001))
    records = {}
    outcome = simulate(
        deployment,
        arrivals,
        on_record=lambda record: records.update({record.number: record}),
        num_replicas=num_replicas,
        **fleet,
    )
    return outcome, records


def test_the_least_loaded_of_two_gets_the_next():
    _, records = run([Arrival(0.0, 50, 10), Arrival(0.01, 50, 10)], 2, router="least_loaded")
    assert {record.replica for record in records.values()} == {0, 1}
    assert records[0].ttft == records[1].ttft == pytest.approx(0.15)


def test_turns_of_a_conversation_go_where_their_beginning_is():
    places = [(turn, chat) for turn in range(3) for chat in range(4)]
    arrivals = [Arrival(100.0 * turn + chat, 500 + 100 * turn, 5, ((chat, 480),)) for turn, chat in places]
    by_prefix, records = run(arrivals, 4, router="least_time")
    by_turns, _ = run(arrivals[:-1], 3, router="round_robin")
    assert by_prefix.summary["cache_hit_rate"] > 0.5
    assert by_turns.summary["cache_hit_rate"] < 0.3
    for chat in range(4):
        assert len({records[number].replica for number in range(chat, 12, 4)}) == 1


def test_a_router_that_knows_of_the_past_alone_takes_the_wrong_one():
    # two have ended on the first when the last comes, and a long one runs on the second
    arrivals = [Arrival(0.0, 50, 1), Arrival(0.01, 50, 100), Arrival(0.02, 50, 1), Arrival(5.0, 50, 1)]
    _, now = run(arrivals, 2, router="least_loaded")
    _, late = run(arrivals, 2, router="least_loaded", age=6.0)
    assert [now[number].replica for number in range(4)] == [0, 1, 0, 0]
    assert [late[number].replica for number in range(4)] == [0, 1, 0, 1]


def test_records_come_in_the_order_of_their_times():
    deployment = deploy("opt-13b", device_sheet("a100-80gb"), costs=LinearCosts(0.1, 0.001))
    ended = []
    arrivals = [Arrival(0.3 * number, 50, 3 + 7 * (number % 5)) for number in range(40)]
    simulate(deployment, arrivals, num_replicas=5, on_record=lambda record: ended.append(record.ended_at))
    assert len(ended) == 40
    assert ended == sorted(ended)


def test_the_command_sums_up_replicas(capsys):
    argv = ["simulate", "--model", "opt-13b", "--device", "a100-80gb", "--trace", "sharegpt", "--rate", "8"]
    argv += ["--num-requests", "30", "--replicas", "3", "--router", "round_robin", "--router-age", "0.1"]
    assert main([*argv, "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["devices"], document["replicas"], len(document["engines"])) == (3, 3, 3)
    assert main(argv) == 0
    assert "mean of engines" in capsys.readouterr().out
    assert main([*argv, "--replicas", "9999"]) == 2
    assert "at most 4096" in capsys.readouterr().err


def test_the_page_has_all_numbers_and_plots_and_is_the_same_each_time(tmp_path, capsys):
    argv = ["simulate", "--model", "opt-13b", "--device", "a100-80gb", "--trace", "sharegpt", "--rate", "8"]
    pages = []
    for name in ("first.html", "second.html"):
        path = tmp_path / name
        assert main([*argv, "--num-requests", "20", "--slo", "ttft<1s", "--report", str(path)]) == 0
        pages.append(path.read_text())
    assert pages[0] == pages[1]
    assert pages[0].count("<svg") == 2
    assert "ttft&lt;1s: " in pages[0]
    assert "src=" not in pages[0]
    assert main([*argv, "--report", str(tmp_path / "nowhere" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
