"""burst_time: whom it holds for, and who gets a token a step in any case."""

import pytest

from quire.config import BurstTimes, EngineOptions, resolve

NONE = BurstTimes()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, BurstTimes(0.02, 0.2)),
        ({"burst_time": 0}, NONE),
        ({"burst_time": 0.5}, BurstTimes(0.5, 0.5)),
        # nobody who streams waits longer than they were promised; whole answers are nobody's stream
        ({"target_inter_token_latency": 0.005}, BurstTimes(0.005, 0.2)),
        ({"speculative_config": {"method": "ngram"}}, NONE),
        ({"tensor_parallel_size": 2, "num_threads": 1}, NONE),
    ],
)
def test_times(options: dict[str, object], expected: BurstTimes) -> None:
    config, _ = resolve(EngineOptions(**options))
    assert config.worker.burst_times == expected
