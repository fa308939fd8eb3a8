"""What clients expect of a server holds where several processes answer, and each question may meet another one."""

import pytest
from conformance.own_server import own_server
from conformance.registry import all_checks
from conformance.run import FAILED, run_checks
from conformance.target import Target

KEY = "key-of-the-tests"


@pytest.mark.nightly
@pytest.mark.parametrize("num_copies", ["1", "2"])
def test_two_processes_pass_every_check(num_copies):
    with own_server(KEY, "--api-server-count", "2", "--data-parallel-size", num_copies) as (server, _):
        target = Target(server.wait_ready(300), api_key=KEY)
        results = list(run_checks(target, all_checks()))
        target.close()
        server.signal()
        assert server.wait() == 0
        assert "Traceback" not in server.output, server.output
    assert [result for result in results if result.outcome == FAILED] == []
    # both have had their part
    assert "access [process 1]: POST" in server.output
