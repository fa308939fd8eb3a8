"""Who only waits for input stands in nobody's way: not with blocks, and not with a row (4.4.4)."""

from __future__ import annotations

import pytest

from quire.messages import ExtendRequest
from quire.testing.core import CoreUnderTest


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("policy", ["fifo", "priority", "srtf", "two_level"])
def test_rows_of_open_prompts_are_lent(policy: str, is_async: bool) -> None:
    core = CoreUnderTest(max_num_seqs=2, policy=policy, is_async=is_async)
    plain = CoreUnderTest()
    for number in range(4):
        core.add(number, [10 + number, 2, 3, 4, 5], max_tokens=4, is_final=False)
        plain.add(number, [10 + number, 2, 3, 4, 5, 6], max_tokens=4)
    for _ in range(6):
        core.step()
    core.add(9, [1, 2, 3], max_tokens=6)
    plain.add(9, [1, 2, 3], max_tokens=6)
    core.run()
    assert core.ends[9 << 10].finish_reason == "length", "it did not wait for those who wait"
    for number in range(4):
        core.core.extend(ExtendRequest(request_id=number, token_ids=[6], is_final=True))
    core.run()
    plain.run()
    assert core.tokens == plain.tokens
    core.assert_empty()
