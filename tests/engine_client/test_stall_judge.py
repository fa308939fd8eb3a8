"""Stalled is who has work and gets nothing done. Time is handed in."""

from quire.engine_client.stall_judge import StallJudge
from quire.engine_core.pulse import Pulse

SERVING = Pulse(is_serving=True, is_busy=True)


def verdicts(judge: StallJudge, seconds: float, pulse: Pulse, num_sent: int = 0, begin: float = 0.0) -> list[str]:
    """What it says in looks of a quarter of a second."""
    looks = [judge.look(begin + 0.25 * number, pulse, num_sent) for number in range(int(seconds / 0.25) + 1)]
    return [reason for reason in looks if reason is not None]


def test_work_without_progress():
    judge = StallJudge(10.0)
    assert not verdicts(judge, 9.75, SERVING)
    [reason] = verdicts(judge, 0, SERVING, begin=10.0)
    assert "no progress for 10.0 s" in reason


def test_progress_begins_the_count_again():
    judge = StallJudge(10.0)
    assert not verdicts(judge, 9.75, SERVING)
    assert not verdicts(judge, 9.75, SERVING._replace(num_done=1), begin=10.0)
    assert verdicts(judge, 1.0, SERVING._replace(num_done=1), begin=20.0)


def test_an_idle_engine_is_never_stalled():
    judge = StallJudge(1.0)
    idle = SERVING._replace(is_busy=False, num_received=5)
    assert not verdicts(judge, 100.0, idle, num_sent=5)
    # and what it did not do meanwhile is not held against it when work comes
    assert judge.look(100.25, idle._replace(is_busy=True), 6) is None
    # one that was stopped while it was idle does not take what it is sent
    assert "1 messages wait to be read" in verdicts(judge, 2.0, idle, num_sent=6, begin=101.0)[0]


def test_a_long_step_has_longer():
    judge = StallJudge(10.0, seconds_per_token=0.01)
    long_step = SERVING._replace(num_tokens=1000)
    assert not verdicts(judge, 49.0, long_step)
    assert verdicts(judge, 2.0, long_step, begin=49.25)


def test_who_was_stopped_himself_blames_nobody():
    judge = StallJudge(10.0)
    assert not verdicts(judge, 5.0, SERVING)
    # an hour later: the machine slept, or this process did
    assert judge.look(3600.0, SERVING, 0) is None
    assert not verdicts(judge, 3.0, SERVING, begin=3600.25)


def test_a_clock_that_goes_on_by_an_hour_is_one_look():
    judge = StallJudge(2.0)
    assert judge.look(0.0, SERVING, 0) is None
    assert judge.look(3600.0, SERVING, 0) is None
    assert judge.look(7200.0, SERVING, 0) is not None


def test_loading_is_judged_by_beats():
    judge = StallJudge(10.0)
    loading = Pulse(is_busy=True)
    for second in range(200):
        assert judge.look(float(second), loading._replace(beats=second), 0) is None
    assert not verdicts(judge, 38.0, loading._replace(beats=199), begin=200.0)
    assert "while it loaded" in verdicts(judge, 3.0, loading._replace(beats=199), begin=238.25)[0]


def test_one_that_a_signal_has_stopped_is_stalled_also_without_work():
    judge = StallJudge(30.0)
    looks = [judge.look(0.25 * number, Pulse(is_serving=True), 0, is_stopped=number > 4) for number in range(12)]
    assert next(number for number, reason in enumerate(looks) if reason) == 9
    assert "a signal has stopped its process" in str(looks[-1])


def test_one_that_goes_on_after_a_moment_is_not():
    judge = StallJudge(30.0)
    assert not any(judge.look(0.25 * n, Pulse(is_serving=True), 0, is_stopped=n % 4 > 0) for n in range(40))


def standing(judge: StallJudge, seconds: float, pulse: Pulse, share: float) -> list[bool]:
    """Whether it stands still, in looks of a quarter of a second, where its process has that share of a processor."""
    seen = []
    for number in range(int(seconds / 0.25) + 1):
        assert judge.look(0.25 * number, pulse, 0, processor_seconds=7.0 + share * 0.25 * number) is None
        seen.append(judge.is_standing)
    return seen


def test_who_has_work_and_computes_nothing_stands_still_before_it_is_given_up():
    judge = StallJudge(30.0, seconds_per_token=0.01)
    assert standing(judge, 2.0, SERVING, 0.0) == [False] * 6 + [True] * 3
    # any progress ends it
    judge.look(2.25, SERVING._replace(num_done=1), 0, processor_seconds=7.0)
    assert not judge.is_standing


def test_what_a_process_did_a_while_ago_does_not_hide_that_it_stands_still():
    judge = StallJudge(30.0)
    # a thread beside the steps is busy for the first two seconds
    looks = [
        judge.look(0.25 * n, SERVING, 0, processor_seconds=min(0.25 * n, 2.0)) or judge.is_standing for n in range(17)
    ]
    assert looks == [False] * 14 + [True] * 3


def test_a_slow_step_does_not_stand_still():
    assert not any(standing(StallJudge(30.0), 20.0, SERVING, 0.5))
    # other processes compute its tokens, and it waits for them
    waiting = SERVING._replace(num_tokens=100)
    assert standing(StallJudge(30.0, seconds_per_token=0.01), 8.0, waiting, 0.0).index(True) == 22


def test_nobody_stands_still_who_loads_or_rests_or_whose_processor_time_is_unknown():
    assert not any(standing(StallJudge(30.0), 20.0, Pulse(is_busy=True), 0.0))
    assert not any(standing(StallJudge(30.0), 20.0, SERVING._replace(is_busy=False), 0.0))
    judge = StallJudge(30.0)
    assert not verdicts(judge, 20.0, SERVING)
    assert not judge.is_standing
