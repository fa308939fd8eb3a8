"""Nothing costs more than the last line of benchmarks/ledger.jsonl says; and how a line is written."""

import itertools
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def ledger(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import ledger

    return ledger


@pytest.fixture
def git():
    """Says the revision that the test has put there."""

    def said(*arguments):
        assert arguments[0] == "rev-parse"
        return said.revision

    said.revision = "aaaa"
    return said


def test_nothing_costs_more_than_the_last_line_says(ledger):
    known = ledger.lines()[-1]["counts"]
    now = ledger.all_counts()
    more = ledger.rises(known, now)
    shown = "; ".join(f"{name}: {before:g}, now {after:g}" for name, (before, after) in more.items())
    assert not more, f'{shown}. If it is worth it: make bench-ledger WHY="what it buys"'
    assert set(known) == set(now), "make bench-ledger counts what the last line does not have"


def test_every_rise_says_why(ledger):
    known = ledger.lines()
    for earlier, later in itertools.pairwise(known):
        assert later.get("why") or not ledger.rises(earlier["counts"], later["counts"]), later["revision"]


def test_a_rise_is_seen(ledger):
    before = {"steps": 100.0, "bytes": 10.0}
    assert ledger.rises(before, {"steps": 104.0, "bytes": 9.0, "calls": 5.0}) == {}
    assert ledger.rises(before, {"steps": 106.0, "bytes": 10.0}) == {"steps": (100.0, 106.0)}
    assert "106" in ledger.table(before, {"steps": 106.0})


def test_calls_are_counted(ledger):
    from quire.messages import sequence_id_of, split_sequence_id

    with ledger.counted_calls() as calls:
        split_sequence_id(sequence_id_of(3, 4))
        json.dumps([1])
    assert calls.count == 2
    split_sequence_id(7)
    assert calls.count == 2


def test_a_line_a_revision(ledger, git, tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger.extend(path, {"steps": 100.0}, "", git)
    # counted again before anything was committed: the line is exchanged, and compared with nothing
    ledger.extend(path, {"steps": 120.0}, "", git)
    assert [line["counts"] for line in ledger.lines(path)] == [{"steps": 120.0}]
    git.revision = "bbbb"
    with pytest.raises(SystemExit, match="steps: 120, now 130"):
        ledger.extend(path, {"steps": 130.0}, "", git)
    ledger.extend(path, {"steps": 130.0}, "it keeps promises", git)
    assert [(line["revision"], line.get("why")) for line in ledger.lines(path)] == [
        ("aaaa", None), ("bbbb", "it keeps promises"),
    ]  # fmt: skip
