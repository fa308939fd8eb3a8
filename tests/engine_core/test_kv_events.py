"""Events of the prefix cache: what a core tells of, and how it is published."""

import contextlib
import socket
import time

import msgspec
import pytest
import zmq

from quire.chain_hashes import ChainHasher, public_name
from quire.config.kv_events import KVEventsConfig, resolve_kv_events
from quire.engine_core.cache_feed import CacheFeed
from quire.engine_core.kv_cache_manager.cache_changes import CacheChangeLog
from quire.engine_core.kv_event_publisher import KVEventPublisher
from quire.errors import OptionError
from quire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, packed
from quire.messages import EngineRequest
from quire.sampling_params import SamplingParams
from quire.testing.core import CoreUnderTest

KEY = b"a key for tests"
STORED = BlockStored(block_hashes=[7], parent_block_hash=None, token_ids=[1, 2], block_size=2, lora_id=None)


def watched_core(num_blocks=32, block_size=4):
    """A core, and the log of its cache."""
    core = CoreUnderTest(num_blocks=num_blocks, block_size=block_size)
    log = CacheChangeLog(0, block_size, ChainHasher(block_size, KEY).digest)
    core.manager.pool.changes = log
    log.attach(core.manager.pool)
    return core, log


def replayed(events, known):
    """What somebody believes who knew this and hears of these."""
    known = set(known)
    for event in events:
        match event:
            case BlockStored():
                assert not known & set(event.block_hashes)
                known |= set(event.block_hashes)
            case BlockRemoved():
                assert known >= set(event.block_hashes)
                known -= set(event.block_hashes)
            case AllBlocksCleared():
                known = set()
    return known


def named_in(core):
    return set(map(public_name, core.manager.pool.names(0)))


def test_a_chain_is_one_event_with_the_names_that_a_router_computes():
    core, log = watched_core()
    prompt = list(range(14))
    core.add(1, prompt, max_tokens=3)
    core.run()
    events = log.take()
    stored = [event for event in events if isinstance(event, BlockStored)]
    names = ChainHasher(4, KEY).names_of(
        EngineRequest(request_id=1, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=3))
    )
    assert stored[0].block_hashes[:3] == [public_name(name) for name in names]
    assert stored[0].token_ids[:12] == prompt[:12]
    assert (stored[0].parent_block_hash, stored[0].block_size, stored[0].lora_id) == (None, 4, None)
    assert log.take() == []


def test_what_is_told_is_what_is_there_also_when_blocks_run_out():
    core, log = watched_core(num_blocks=12)
    known = set()
    for number in range(12):
        core.add(number, [number * 3 + n for n in range(13)], max_tokens=5)
        core.run()
        known = replayed(log.take(), known)
        assert known == named_in(core)
    assert core.manager.pool.num_evictions > 0


def test_clearing_is_one_event():
    core, log = watched_core()
    core.add(1, list(range(13)), max_tokens=2)
    core.run()
    log.take()
    core.scheduler.reset_prefix_cache()
    assert log.take() == [AllBlocksCleared()]
    core.add(2, list(range(13)), max_tokens=2)
    core.run()
    assert replayed(log.take(), set()) == named_in(core)


def test_a_salt_is_told_apart_and_not_told():
    core, log = watched_core()
    for number, salt in enumerate(("", "tenant-7")):
        core.core.add(
            EngineRequest(
                request_id=number,
                prompt_token_ids=list(range(9)),
                sampling=SamplingParams(max_tokens=2),
                cache_salt=salt,
            )
        )
        core.run()
    plain, salted = [event for event in log.take() if isinstance(event, BlockStored)]
    assert plain.extra_keys == [None] * len(plain.block_hashes)
    assert all(keys is not None and "tenant" not in str(keys) for keys in salted.extra_keys)
    assert not set(plain.block_hashes) & set(salted.block_hashes)


def test_the_client_hears_of_a_step_as_one_message():
    core, log = watched_core()
    heard = []
    feed = CacheFeed(log, None, tells_client=True)
    feed.watch(heard.append)
    core.add(1, list(range(13)), max_tokens=2)
    core.run()
    feed.settled()
    feed.settled()
    [message] = heard
    assert set(message.stored) == named_in(core)
    assert (message.removed, message.is_cleared) == ([], False)
    # who comes later hears what is still there
    assert set(feed.held().stored) == set(message.stored)
    core.scheduler.reset_prefix_cache()
    feed.settled()
    assert feed.held() is None


# ------------------------------------------------------------------------------------------ as it is published


def test_a_batch_is_packed_as_vllm_does():
    batch = msgspec.msgpack.decode(packed([STORED, BlockRemoved(block_hashes=[7]), AllBlocksCleared()], 2.5, 3))
    fields = {"block_hashes": [7], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2, "lora_id": None}
    assert batch == [
        2.5,
        [
            {"type": "BlockStored", **fields, "medium": "GPU", "lora_name": None},
            {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"},
            {"type": "AllBlocksCleared"},
        ],
        3,
    ]
    before = msgspec.msgpack.decode(packed([STORED, AllBlocksCleared()], 2.5, 0, as_maps=False))
    assert before[1] == [["BlockStored", [7], None, [1, 2], 2, None, "GPU", None, []], ["AllBlocksCleared"]]


@contextlib.contextmanager
def publishing(tmp_path, **options):
    config = KVEventsConfig(
        endpoint=f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replay", topic="kv", **options
    )
    publisher = KVEventPublisher(config, replica=1)
    context = zmq.Context()
    try:
        yield publisher, context, config
    finally:
        publisher.close()
        publisher.close()
        context.destroy(0)


def asked_again(context, config, start, num):
    """(number, batch) of the answer to a question, when there are so many."""
    asker = context.socket(zmq.DEALER)
    asker.connect(config.replay_endpoint)
    deadline = time.monotonic() + 20
    while True:
        asker.send_multipart([b"", start.to_bytes(8, "big")])
        answer = []
        while True:
            assert asker.poll(20_000)
            _, number, batch = asker.recv_multipart()
            if not batch:
                assert int.from_bytes(number, "big", signed=True) == -1
                break
            answer.append((int.from_bytes(number, "big"), batch))
        if len(answer) == num:
            return answer
        assert time.monotonic() < deadline, answer


def test_batches_are_numbered_and_can_be_asked_for_again(tmp_path):
    with publishing(tmp_path, buffer_steps=3) as (publisher, context, config):
        for _ in range(5):
            publisher.publish([STORED])
        assert [number for number, _ in asked_again(context, config, 2, 3)] == [2, 3, 4]
        [(number, batch)] = asked_again(context, config, 4, 1)
        assert (number, msgspec.msgpack.decode(batch)[2]) == (4, 1)


def test_who_subscribes_hears_topic_number_and_batch(tmp_path):
    with publishing(tmp_path) as (publisher, context, config):
        subscriber = context.socket(zmq.SUB)
        subscriber.subscribe(b"kv")
        subscriber.connect(config.endpoint)
        deadline = time.monotonic() + 20
        num_sent = 0
        # a subscription takes its time
        while not subscriber.poll(10):
            publisher.publish([STORED])
            num_sent += 1
            assert time.monotonic() < deadline
        topic, number, batch = subscriber.recv_multipart()
        assert topic == b"kv"
        assert len(number) == 8
        assert int.from_bytes(number, "big") < num_sent
        assert msgspec.msgpack.decode(batch)[1][0]["type"] == "BlockStored"


def test_what_does_not_fit_is_lost_and_leaves_a_gap(tmp_path):
    with publishing(tmp_path, max_queue_size=2) as (publisher, context, config):
        # nobody sends: the thread waits for what is not there
        publisher._ring = lambda: None
        for _ in range(4):
            publisher.publish([STORED])
        assert publisher.num_lost == 2
        del publisher._ring
        publisher._ring()
        asked_again(context, config, 0, 2)
        publisher.publish([STORED])
        assert [number for number, _ in asked_again(context, config, 0, 3)] == [0, 1, 4]


def test_a_question_that_is_none_hurts_nobody(tmp_path):
    with publishing(tmp_path) as (publisher, context, config):
        asker = context.socket(zmq.DEALER)
        asker.connect(config.replay_endpoint)
        asker.send_multipart([b"nonsense"])
        publisher.publish([STORED])
        assert len(asked_again(context, config, 0, 1)) == 1


def test_a_stranger_that_sends_much_is_cut_off(tmp_path):
    """A long subscription would be a deep tree in libzmq, which goes through it by recursion when its owner leaves."""

    def ready(kind):
        fields = b"\x05READY" + b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
        return b"\x04" + bytes([len(fields)]) + fields

    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\x00") + bytes(32)
    much = b"\x01" + b"x" * (4 << 20)
    with publishing(tmp_path) as (publisher, context, config):
        publisher.publish([STORED])
        for endpoint, kind in ((config.replay_endpoint, b"DEALER"), (config.endpoint, b"SUB")):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.settimeout(20)
                stranger.connect(endpoint.removeprefix("ipc://"))
                stranger.sendall(greeting + ready(kind))
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(b"\x02" + len(much).to_bytes(8, "big") + much)
                    while stranger.recv(4096):
                        pass
        assert len(asked_again(context, config, 0, 1)) == 1


def test_an_address_that_is_taken_is_an_error():
    context = zmq.Context()
    other = context.socket(zmq.PUB)  # held: it gives its port back when nobody has it any more
    port = other.bind_to_random_port("tcp://127.0.0.1")
    try:
        with pytest.raises(OptionError, match="cannot be listened on"):
            KVEventPublisher(KVEventsConfig(endpoint=f"tcp://127.0.0.1:{port}"))
    finally:
        context.destroy(0)


# ------------------------------------------------------------------------------------------ as it is asked for


def resolved(given):
    return resolve_kv_events(given, enable_prefix_caching=True)


def test_vllms_json_is_understood():
    given = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://127.0.0.1:6000", "topic": "kv",
             "replay_endpoint": "tcp://127.0.0.1:6100", "buffer_steps": 10}  # fmt: skip
    config = resolved(given)
    assert (config.endpoint, config.topic, config.buffer_steps) == ("tcp://127.0.0.1:6000", "kv", 10)
    moved = config.of_replica(2)
    assert (moved.endpoint, moved.replay_endpoint) == ("tcp://127.0.0.1:6002", "tcp://127.0.0.1:6102")
    assert resolved({"enable_kv_cache_events": True}).endpoint == "tcp://127.0.0.1:5557"
    assert resolved({"enable_kv_cache_events": True, "publisher": "null"}) is None
    assert resolved({"endpoint": "tcp://127.0.0.1:6000"}) is None
    assert resolved(None) is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"endpoint": "tcp://*:5557"}, "on every network"),
        ({"endpoint": "tcp://0.0.0.0:5557"}, "on every network"),
        ({"replay_endpoint": "tcp://[::]:5557"}, "on every network"),
        # what the system takes for the same
        ({"endpoint": "tcp://0:5557"}, "on every network"),
        ({"endpoint": "tcp://0x0:5557"}, "on every network"),
        ({"endpoint": "tcp://0.0.0.0%lo:5557"}, "on every network"),
        ({"endpoint": "tcp://[::ffff:0.0.0.0]:5557"}, "on every network"),
        ({"endpoint": "127.0.0.1:5557"}, "must be tcp://ADDRESS:PORT"),
        ({"endpoint": "tcp://127.0.0.1:x"}, "must be tcp://ADDRESS:PORT"),
        ({"publisher": "kafka"}, "must be zmq or null"),
        ({"buffer_steps": -1}, "whole number"),
        ({"hwm": True}, "whole number"),
        ({"endpoints": "x"}, 'Did you mean "endpoint"'),
        ({"event_format": "xml"}, "must be map"),
        ({"topic": 1}, "must be a text"),
        ({"enable_kv_cache_events": "yes"}, "true or false"),
    ],
)
def test_what_cannot_be_is_refused(given, why):
    with pytest.raises(OptionError, match=why):
        resolved({"enable_kv_cache_events": True, **given})


def test_it_needs_the_prefix_cache():
    with pytest.raises(OptionError, match="needs the prefix cache"):
        resolve_kv_events({"enable_kv_cache_events": True}, enable_prefix_caching=False)
