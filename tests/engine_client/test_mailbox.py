"""Columns in, deltas out: splitting, merging for slow readers, and what comes too late."""

from quire.engine_client.mailbox import Mailboxes
from quire.messages import (
    EngineOutputs,
    SequenceEnd,
    SequenceLogprobs,
    SequenceStart,
    TokenLogprobs,
    int_array,
    sequence_id_of,
)


def outputs(*tokens: tuple[int, int, int], **parts) -> EngineOutputs:
    """tokens: (request, index, token)."""
    return EngineOutputs(
        step=1,
        sequence_ids=int_array([sequence_id_of(request, index) for request, index, _ in tokens]),
        token_ids=int_array([token for _, _, token in tokens]),
        **parts,
    )


def logprobs_of(token: int) -> TokenLogprobs:
    return TokenLogprobs([token], [-1.0], [1])


def test_tokens_go_to_their_sequences():
    boxes = Mailboxes()
    one, two = boxes.open(1, 2), boxes.open(2, 1)
    filled = boxes.deliver(outputs((1, 0, 10), (2, 0, 20), (1, 1, 11), (1, 0, 12)))
    assert filled == [one, two]
    assert [(delta.index, delta.token_ids) for delta in one.take()] == [(0, [10, 12]), (1, [11])]
    assert [(delta.index, delta.token_ids) for delta in two.take()] == [(0, [20])]


def test_what_is_not_read_is_merged_and_its_reader_woken_once():
    boxes = Mailboxes()
    box = boxes.open(1, 1)
    woken = [boxes.deliver(outputs((1, 0, token))) for token in range(1000)]
    assert woken == [[box]] + [[]] * 999
    [delta] = box.take()
    assert delta.token_ids == list(range(1000))


def test_everything_of_a_sequence_is_in_its_delta():
    boxes = Mailboxes()
    box = boxes.open(3, 1)
    name = sequence_id_of(3, 0)
    boxes.deliver(
        outputs(
            (3, 0, 7),
            starts=[SequenceStart(name, 16)],
            logprobs=[SequenceLogprobs(name, [logprobs_of(7)])],
            prompt_logprobs=[SequenceLogprobs(name, [logprobs_of(1)])],
        )
    )
    boxes.deliver(
        outputs(
            (3, 0, 8),
            logprobs=[SequenceLogprobs(name, [logprobs_of(8)])],
            prompt_logprobs=[SequenceLogprobs(name, [logprobs_of(2)])],
            ends=[SequenceEnd(name, "stop", stop_reason=8)],
        )
    )
    [delta] = box.take()
    assert (delta.token_ids, delta.num_cached_tokens) == ([7, 8], 16)
    assert (delta.finish_reason, delta.stop_reason, delta.error) == ("stop", 8, None)
    assert delta.logprobs == [logprobs_of(7), logprobs_of(8)]
    assert delta.prompt_logprobs == [logprobs_of(1), logprobs_of(2)]
    assert box.is_done


def test_merging_two_deltas_is_the_same_as_not_reading_the_first():
    boxes = Mailboxes()
    read, unread = boxes.open(1, 1), boxes.open(2, 1)
    parts = []
    for step, token in enumerate((5, 6)):
        for request in (1, 2):
            name = sequence_id_of(request, 0)
            ends = [SequenceEnd(name, "error", error="why")] if step else []
            logprobs = [SequenceLogprobs(name, [logprobs_of(token)])]
            boxes.deliver(outputs((request, 0, token), logprobs=logprobs, ends=ends))
        parts += read.take()
    first, second = parts
    first.merge(second)
    assert [first] == list(unread.take())


def test_what_beams_share_belongs_to_none_of_their_deltas():
    boxes = Mailboxes()
    box = boxes.open(1, 2)
    names = [sequence_id_of(1, index) for index in (0, 1)]
    # the core may give one list to all outputs, and several tokens at once
    settled = [logprobs_of(5), logprobs_of(6)]
    boxes.deliver(
        outputs(
            *((1, index, token) for index in (0, 1) for token in (5, 6)),
            logprobs=[SequenceLogprobs(name, settled) for name in names],
        )
    )
    boxes.deliver(
        outputs(
            (1, 0, 7),
            (1, 1, 8),
            logprobs=[SequenceLogprobs(name, [logprobs_of(7 + index)]) for index, name in enumerate(names)],
            ends=[SequenceEnd(name, "length") for name in names],
        )
    )
    assert settled == [logprobs_of(5), logprobs_of(6)]
    best, second = box.take()
    assert (best.token_ids, second.token_ids) == ([5, 6, 7], [5, 6, 8])
    assert best.logprobs == [*settled, logprobs_of(7)]
    assert second.logprobs == [*settled, logprobs_of(8)]
    assert box.is_done


def test_a_request_is_done_when_all_its_sequences_are_read_to_the_end():
    boxes = Mailboxes()
    box = boxes.open(1, 2)
    boxes.deliver(outputs((1, 0, 5), ends=[SequenceEnd(sequence_id_of(1, 0), "length")]))
    box.take()
    assert not box.is_done
    boxes.deliver(outputs(ends=[SequenceEnd(sequence_id_of(1, 1), "abort")]))
    assert not box.is_done  # its end was not read yet
    box.take()
    assert box.is_done


def test_late_outputs_are_counted_and_dropped():
    boxes = Mailboxes()
    box = boxes.open(1, 2)
    boxes.close_sequence(1, 1)
    late = sequence_id_of(9, 0)
    boxes.deliver(
        outputs(
            (9, 0, 1),  # nobody's
            (1, 1, 2),  # of a sequence that its reader has ended
            (1, 0, 3),
            starts=[SequenceStart(late, 0)],
            logprobs=[SequenceLogprobs(late, [logprobs_of(1)])],
            # the answer to an abort is no surprise
            ends=[SequenceEnd(late, "abort"), SequenceEnd(sequence_id_of(1, 7), "stop")],
        )
    )
    assert [(delta.index, delta.token_ids) for delta in box.take()] == [(0, [3])]
    assert boxes.num_late_outputs == 5


def test_a_closed_request_leaves_nothing_behind():
    boxes = Mailboxes()
    boxes.open(1, 1)
    boxes.close(1)
    boxes.close(1)
    assert len(boxes) == 0
    assert boxes.deliver(outputs((1, 0, 1))) == []


def test_tokens_that_nobody_reads_are_counted():
    boxes = Mailboxes()
    read, left = boxes.open(1, 1), boxes.open(2, 2)
    boxes.deliver(outputs((1, 0, 5), (2, 0, 6), (2, 0, 7), (2, 1, 8)))
    read.take()
    boxes.close(1)
    assert boxes.num_wasted_tokens == 0
    boxes.close_sequence(2, 1)  # one was there and was not read
    assert boxes.num_wasted_tokens == 1
    boxes.close(2)  # two more
    assert left.pending == {}
    boxes.deliver(outputs((2, 0, 9), (2, 1, 9)))  # on their way when the client left
    counts = {"late_outputs_dropped": 2, "num_wasted_tokens_total": 5}
    assert boxes.statistics() == {"requests_open": 0, "image_bytes_open": 0, **counts}


def test_tokens_that_wait_for_a_slow_reader_take_four_bytes_each():
    """As numbers of Python they take nine times as much."""
    boxes = Mailboxes()
    box, closed = boxes.open(1, 1), boxes.open(2, 1)
    for token in range(1000):
        boxes.deliver(outputs((1, 0, 100_000 + token), (2, 0, token)))
    [delta] = box.pending.values()
    assert (delta.num_tokens, len(delta.token_ids) < 64, delta.packed.itemsize) == (1000, True, 4)
    closed.close()
    assert boxes.statistics()["num_wasted_tokens_total"] == 1000
    [delta] = box.take()
    assert delta.token_ids == list(range(100_000, 101_000))
    assert delta.packed is None
