"""The garbage of F14, frame by frame, without a server: nothing of it gets past those who read it."""

import pytest
from tests.support.faults import noise

from quire.engine_client.mailbox import Mailboxes
from quire.engine_core.driver import CoreDriver
from quire.engine_core.unread_frames import answer_to_no_message
from quire.message_encoding import decode_to_client, decode_to_core
from quire.messages import AbortRequests, EngineOutputs, EngineRequest, ExtendRequest
from quire.testing.core import CoreUnderTest

SEEDS = range(1000)


def decoded(decode, frame):
    try:
        return decode(frame)
    except Exception as error:  # as the two ends of the socket do
        return error


def test_frames_follow_from_their_number():
    assert [noise.to_core(seed) for seed in SEEDS] == [noise.to_core(seed) for seed in SEEDS]
    kinds = {type(decoded(decode_to_core, noise.to_core(seed))).__name__ for seed in SEEDS}
    assert {"DecodeError", "ValidationError", "AbortRequests", "EngineRequest", "ExtendRequest"} <= kinds


def test_a_core_lives_through_all_of_them():
    tested = CoreUnderTest()
    driver = CoreDriver(tested.core)
    for seed in SEEDS:
        frame = noise.to_core(seed)
        message = decoded(decode_to_core, frame)
        if isinstance(message, Exception):
            answer_to_no_message(frame, message)
        else:
            driver.handle(message)
        driver.step()
        assert not driver.is_dead, f"frame {seed}"
    for _ in range(50):
        driver.step()
    tested.core.control("check_invariants", {})
    tested.add(1, [1, 2, 3], max_tokens=4)
    tested.run()
    assert len(tested.tokens[next(iter(tested.tokens))]) == 4


def test_no_frame_names_a_request_that_may_run():
    for seed in SEEDS:
        message = decoded(decode_to_core, noise.to_core(seed))
        match message:
            case EngineRequest() | ExtendRequest():
                assert message.request_id > 2**20
            case AbortRequests():
                assert all(number > 2**20 for number in message.request_ids)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_mailbox_lives_through_all_of_them(is_open: bool):
    boxes = Mailboxes()
    box = boxes.open(3, 2) if is_open else None
    num_outputs = 0
    for seed in SEEDS:
        message = decoded(decode_to_client, noise.to_client(seed))
        if isinstance(message, EngineOutputs):
            num_outputs += 1
            assert boxes.deliver(message) == []
    assert num_outputs > 50
    assert boxes.num_late_outputs > num_outputs
    assert box is None or not box.pending
