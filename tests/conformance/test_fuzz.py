"""The fuzzing goes on where it stopped, and begins anew if anything about it has changed."""

import argparse
import json
import stat

import pytest
from conformance import fuzz

# Says what it was asked, and fails for the operation `bad`.
SCHEMATHESIS = """#!/bin/sh
echo "$@" >> {log}
while [ $# -gt 0 ]; do
  [ "$1" = --report-json-path ] && echo '{{"test_cases": {{"generated": 7}}}}' > "$2"
  [ "$2" = bad ] && status=1
  shift
done
exit ${{status:-0}}
"""


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """runs(operations, **settings): a new one on the same folder."""
    command = tmp_path / "fuzz" / "bin" / "schemathesis"
    command.parent.mkdir(parents=True)
    command.write_text(SCHEMATHESIS.format(log=tmp_path / "log"))
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(fuzz, "BUILD", tmp_path)
    monkeypatch.setattr(fuzz, "_PYTHON", command.with_name("python"))
    monkeypatch.setattr(fuzz, "_STATE", tmp_path / "state.json")

    def make(*operations, **settings):
        document = {"paths": {f"/{name}": {"get": {"operationId": name}} for name in operations}}
        (tmp_path / "openapi.json").write_text(json.dumps(document))
        given = {"cases": 5, "seed": 1, "seconds": 2.0, "operation": None, **settings}
        return fuzz._Runs(tmp_path.as_uri(), "key", argparse.Namespace(**given))

    return make


def asked(tmp_path) -> int:
    log = tmp_path / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_it_goes_on_where_it_was(runs, tmp_path, capsys):
    first = runs("one", "two")
    assert first.operations == ["one", "two", "sequences"]
    first.run("one")
    assert asked(tmp_path) == 1
    again = runs("one", "two")
    for operation in again.operations:
        again.run(operation)
    assert asked(tmp_path) == 3
    assert again.summary()
    assert "3 operations, 21 cases, 0 operations failed" in capsys.readouterr().out


@pytest.mark.parametrize("change", [{"cases": 6}, {"seed": 2}, {"seconds": 1.0}])
def test_other_settings_begin_anew(runs, tmp_path, change):
    runs("one").run("one")
    runs("one", **change).run("one")
    assert asked(tmp_path) == 2


def test_another_interface_begins_anew(runs, tmp_path):
    runs("one").run("one")
    runs("one", "two").run("one")
    assert asked(tmp_path) == 2


def test_a_failure_is_shown_and_counted(runs, capsys):
    both = runs("one", "bad")
    both.run("one")
    both.run("bad")
    assert not both.summary()
    out = capsys.readouterr().out
    assert "FAIL  bad" in out
    assert "1 operations failed" in out
