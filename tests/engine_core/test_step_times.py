"""Where a core's time goes and what a step sends; and how much of the way to a first token was others' work."""

from collections import Counter

import pytest

from quire.messages import sequence_id_of
from quire.observability.step_times import CORE_PHASES, OVERHEAD_PHASES, StepTimes
from quire.testing.core import CoreUnderTest


class Ticks:
    """A clock that has gone on by a second whenever it is read."""

    def __init__(self):
        self.num_reads = 0

    def __call__(self):
        self.num_reads += 1
        return float(self.num_reads)


@pytest.mark.parametrize("is_async", [False, True])
def test_every_part_of_a_step_is_counted(is_async):
    under_test = CoreUnderTest(is_async=is_async)
    clock = Ticks()
    times = StepTimes(clock, CORE_PHASES)
    under_test.core.count_times(times)
    under_test.add(1, list(range(1, 10)), max_tokens=4)
    under_test.run()
    statistics = times.statistics()
    num_steps = under_test.core.scheduler.statistics()["num_steps_total"]
    found = {phase: statistics[f"step_seconds_{phase}_total"] for phase in CORE_PHASES}
    assert found["execute"] == found["wait"] == num_steps
    assert found["schedule"] == found["update"] >= num_steps
    # the clock is read once a phase, once where a step begins, and once when it is made
    num_calls = found["schedule"]
    assert clock.num_reads == 1 + num_calls + sum(found.values())
    assert set(OVERHEAD_PHASES) < set(CORE_PHASES)
    assert statistics["step_bytes_decisions_total"] > 0


def test_a_steady_step_sends_what_changed():
    under_test = CoreUnderTest(block_size=16, budget=128)
    times = StepTimes(Ticks(), CORE_PHASES)
    under_test.core.count_times(times)
    decided = []
    under_test.core.watch_steps(lambda decision, work: decided.append(decision))
    for number in range(1, 5):
        under_test.add(number, [number] * 17, max_tokens=12)

    def sent():
        return times.statistics().get("step_bytes_decisions_total", 0)

    under_test.step()
    first = sent()
    # rows and tokens, two blocks each, and the prompts
    assert first == 4 * 8 + 4 * 8 + 8 * 4 * 8 + sum(one.token_ids.nbytes for one in decided[0].admitted)
    under_test.step()
    assert sent() - first == 4 * 8 + 4 * 8


def shares(under_test, max_steps=200):
    found = {}
    for _ in range(max_steps):
        if not under_test.core.has_work:
            return found
        outputs = under_test.step()
        for first in outputs.firsts:
            assert first.sequence_id not in found
            # with the first token, and not before
            assert (
                under_test.tokens[first.sequence_id]
                == outputs.token_ids[outputs.sequence_ids == first.sequence_id].tolist()
            )
            found[first.sequence_id] = first.share_of_others
    raise AssertionError("it does not end")


@pytest.mark.parametrize("is_async", [False, True])
def test_who_is_alone_waits_for_nobody(is_async):
    under_test = CoreUnderTest(budget=8, is_async=is_async)
    under_test.add(1, list(range(1, 21)), max_tokens=3)
    assert shares(under_test) == {sequence_id_of(1, 0): 0.0}


def test_the_share_is_that_of_others_tokens():
    """Two prompts of 12 tokens in steps of 16: the second is computed in two steps, of which 12 tokens were the first
    one's prompt and 1 its output."""
    under_test = CoreUnderTest(budget=16, prefix_caching=False)
    under_test.add(1, [1] * 12, max_tokens=5)
    under_test.add(2, [2] * 12, max_tokens=5)
    found = shares(under_test)
    assert found == {sequence_id_of(1, 0): 4 / 16, sequence_id_of(2, 0): 13 / 25}


def test_what_was_found_in_the_cache_is_nobodys_work():
    under_test = CoreUnderTest(block_size=4)
    prompt = list(range(1, 18))
    under_test.add(1, prompt, max_tokens=2)
    under_test.run()
    under_test.add(2, prompt, max_tokens=2)
    assert shares(under_test) == {sequence_id_of(2, 0): 0.0}
    assert under_test.cached[sequence_id_of(2, 0)] == 16


def test_several_sequences_tell_it_once_and_beams_not_at_all():
    under_test = CoreUnderTest()
    under_test.add(1, [1, 2, 3], n=3, max_tokens=2, temperature=1.0, seed=5)
    assert [split >> 10 for split in shares(under_test)] == [1]
    under_test.beam(2, [1, 2, 3], 2, max_tokens=3)
    assert shares(under_test) == {}


def test_every_request_is_told_of_whatever_happens_to_it():
    """Little memory: requests give way to each other and are computed again."""
    under_test = CoreUnderTest(num_blocks=14, block_size=4, budget=12, max_num_seqs=4)
    for number in range(1, 9):
        under_test.add(number, [number] * (5 + number), max_tokens=10)
    found = shares(under_test, 1000)
    assert Counter(name >> 10 for name in found) == Counter(range(1, 9))
    assert all(0.0 <= share < 1.0 for share in found.values())
    assert under_test.core.statistics()["num_preemptions_total"] > 0
    assert under_test.core.statistics()["num_requests_total"] == 8
