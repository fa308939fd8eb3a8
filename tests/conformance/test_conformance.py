"""The checks of `conformance/`, each a test, on a real server with the embedded model."""

import pytest
from conformance.own_server import own_server
from conformance.registry import Check, Skip, all_checks
from conformance.run import FAILED, PASSED, SKIPPED, run_checks, score, table
from conformance.target import Target

KEY = "key-of-the-tests"
# longer ones, of what other tests look at more closely
LONG = {"forms", "stops"}


@pytest.fixture(scope="module")
def target():
    with own_server(KEY) as (server, _):
        target = Target(server.wait_ready(300), api_key=KEY)
        yield target
        target.close()
        server.signal()
        assert server.wait() == 0
        assert "Traceback" not in server.output, server.output


def rows():
    for check in all_checks():
        marks = [pytest.mark.nightly] if check.group in LONG else []
        yield pytest.param(check, id=f"{check.group}.{check.name}", marks=marks)


@pytest.mark.parametrize("check", list(rows()))
def test_a_check(target, check):
    check.run(target)


def test_there_are_enough_and_no_two_are_one():
    checks = all_checks()
    assert len(checks) >= 200
    assert len({(check.group, check.name) for check in checks}) == len(checks)
    assert all(check.text for check in checks)


def passes(target):
    """It passes."""


def fails(target):
    """It fails."""
    raise AssertionError("this is\nwrong")


def is_skipped(target):
    raise Skip("no key")


def test_how_checks_end_and_are_counted():
    checks = [Check("group", function.__name__, function) for function in (passes, fails, is_skipped)]
    results = list(run_checks(None, checks))
    assert [result.outcome for result in results] == [PASSED, FAILED, SKIPPED]
    assert score(results) == (1, 2)
    shown = table(results).splitlines()
    assert shown[0].split() == ["ok", "group", "It", "passes"]
    assert shown[1].startswith("FAIL")
    assert "AssertionError: this is wrong" in shown[2]
    assert shown[-1].split() == ["group", "1/2"]
