"""The parts of the tiered connector: memory, checksums, breakers, what is worth it, and how much may wait."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.support.shelf import Shelf

from quire.errors import OptionError
from quire.kv_connectors import tiered
from quire.kv_connectors.connector import BlockLoad, BlockSpill, CacheLayout
from quire.kv_connectors.tiered import namespace
from quire.kv_connectors.tiered.breaker import Breaker
from quire.kv_connectors.tiered.guard import GuardedStore
from quire.kv_connectors.tiered.host import HostTier
from quire.kv_connectors.tiered.namespace import namespace_of
from quire.kv_connectors.tiered.payload import Frames, Payload
from quire.kv_connectors.tiered.questions import Questions
from quire.kv_connectors.tiered.scheduler import TieredScheduler
from quire.kv_connectors.tiered.settings import TierSettings
from quire.kv_connectors.tiered.tiers import Tiers, open_tiers
from quire.kv_connectors.tiered.worker import TieredWorker
from quire.messages import LayerSpec

SPEC = LayerSpec(name="layer 0", num_kv_heads=2, key_dim=4, value_dim=4, bytes_per_element=4)
LAYOUT = CacheLayout.of("weights", "float32", 4, [["layer 0"]], [SPEC])
NAMES = [bytes([0] * 17 + [number] * 16) for number in range(20)]


def block(number: int, num_bytes: int = 100) -> Payload:
    return np.full(num_bytes, number, dtype=np.uint8)


# ---- memory


def test_memory_is_bounded_and_the_least_recently_used_leaves() -> None:
    host = HostTier(300)
    assert all(host.put(NAMES[number], block(number)) for number in range(3))
    host.lend(host.near([NAMES[0]]))
    assert host.put(NAMES[3], block(3))
    assert [name in host for name in NAMES[:4]] == [True, False, True, True]
    assert host.num_bytes == 300
    assert len(host.near(NAMES[:4])) == 1


def test_what_is_pinned_stays_and_what_is_lent_can_be_taken() -> None:
    host = HostTier(200)
    host.put(NAMES[0], block(0))
    host.pin(NAMES[:2])
    host.put(NAMES[1], block(1))
    assert not host.put(NAMES[2], block(2)), "there is no room beside what is pinned"
    number = host.lend(host.near(NAMES[:2]))
    host.unpin(NAMES[:2])
    assert host.put(NAMES[2], block(2))
    assert [int(payload[0]) for payload in host.take(number)] == [0, 1]


def test_what_was_found_can_be_lent_although_it_has_left_since() -> None:
    """Threads that read put something in its place at any time, also while a step is decided."""
    host = HostTier(200)
    for number in range(2):
        host.put(NAMES[number], block(number))
    near = host.near(NAMES)
    for number in range(2, 4):
        host.put(NAMES[number], block(number))
    assert not host.near(NAMES)
    assert [int(payload[0]) for payload in host.take(host.lend(near))] == [0, 1]
    assert host.num_bytes == 200


# ---- checksums


def test_a_frame_is_taken_only_as_it_was_made() -> None:
    frames = Frames(b"key")
    frame = frames.wrap(NAMES[0], block(7))
    found = frames.unwrap(NAMES[0], frame)
    assert found is not None
    assert found.tolist() == [7] * 100
    for place in range(len(frame)):
        assert frames.unwrap(NAMES[0], frame[:place] + bytes([frame[place] ^ 4]) + frame[place + 1 :]) is None
    assert frames.unwrap(NAMES[1], frame) is None, "it is another block's"
    assert Frames(b"another key").unwrap(NAMES[0], frame) is None, "it was made without the secret"
    assert frames.unwrap(NAMES[0], frame[:-1]) is None
    assert frames.unwrap(NAMES[0], b"") is None


# ---- breakers


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_a_breaker_opens_lets_one_in_and_closes() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(2):
        breaker.failed()
    assert breaker.lets_in()
    breaker.failed()
    assert not breaker.lets_in()
    clock.seconds = 2.0
    assert breaker.lets_in()
    assert not breaker.lets_in(), "one is enough to see"
    breaker.failed()
    clock.seconds = 5.9
    assert not breaker.lets_in(), "it rests for twice as long"
    clock.seconds = 6.1
    assert breaker.lets_in()
    breaker.succeeded()
    assert breaker.lets_in()
    assert not breaker.is_open
    assert breaker.num_openings == 1


# ---- stores that fail


def guarded(shelf: Shelf, clock: Callable[[], float] | None = None) -> GuardedStore:
    return GuardedStore("file:///shelf", shelf, Frames(b"key"), clock or Clock())


def test_a_store_that_fails_is_left_alone_and_asked_again() -> None:
    shelf, clock = Shelf(), Clock()
    store = guarded(shelf, clock)
    store.put({NAMES[0]: block(0)})

    def fail() -> None:
        raise ConnectionError("away")

    shelf.before_each = fail
    for _ in range(5):
        assert store.get([NAMES[0]]) == {}
    assert shelf.num_calls == 1 + 3
    assert not store.may_be_asked
    assert store.statistics()["kv_store_files_failures_total"] == 3
    assert store.statistics()["kv_store_files_resting"] == 1
    shelf.before_each = lambda: None
    clock.seconds = 2.0
    assert store.may_be_asked
    assert store.get([NAMES[0]])[NAMES[0]].tolist() == [0] * 100
    assert store.statistics()["kv_store_files_resting"] == 0


def test_a_store_that_is_full_says_so_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    """It can be read, so it is not left alone, and without a word nobody would look for the reason."""
    shelf, clock = Shelf(), Clock()

    def put_many(values: list[tuple[str, bytes]]) -> None:
        raise OSError("no space left on device")

    shelf.put_many = put_many  # type: ignore[method-assign]
    store = guarded(shelf, clock)
    for clock.seconds in (0.0, 1.0, 2.0, 59.0, 61.0):
        store.exists([NAMES[0]])
        store.put({NAMES[0]: block(0)})
    assert store.may_be_asked
    assert [record.getMessage() for record in caplog.records] == [
        "kv store files: a call has failed (OSError: no space left on device)"
    ] * 2


def test_a_store_that_answers_too_little_has_failed_and_is_written_to_again() -> None:
    """The thread that writes goes on: nobody would take its place."""
    shelf, clock = Shelf(), Clock()
    exists = shelf.exists_many
    shelf.exists_many = lambda names: exists(names)[1:]  # type: ignore[method-assign]
    shelf.get_many = lambda names: []  # type: ignore[method-assign]
    store = guarded(shelf, clock)
    assert store.get([NAMES[0]]) == {}
    tiers = tiers_of(store, rule="always")
    tiers.enter()
    tiers.put({NAMES[0]: block(0)})
    assert tiers.flush(10.0)
    assert store.statistics()["kv_store_files_failures_total"] == 2
    shelf.exists_many = exists  # type: ignore[method-assign]
    tiers.put({NAMES[1]: block(1)})
    assert tiers.flush(10.0)
    assert len(shelf.values) == 2, "a failed question says that nothing is there"
    tiers.leave()


def test_what_a_store_takes_is_measured() -> None:
    shelf, clock = Shelf(), Clock()
    store = guarded(shelf, clock)

    def take_a_second() -> None:
        clock.seconds += 1.0

    shelf.before_each = take_a_second
    assert store.seconds_for(1000) == 0.0
    store.put({NAMES[0]: block(0, 976)})
    assert store.seconds_for(1000, 0) == pytest.approx(1.0)
    store.exists([NAMES[0]])
    assert store.seconds_for(0, 2) == pytest.approx(2.0)


# ---- what is worth it


def tiers_of(*stores: GuardedStore, rule: str = "cost", max_wait: float = 30.0, host_bytes: int = 1 << 20) -> Tiers:
    return Tiers(TierSettings((), host_bytes, max_wait, rule), list(stores))


@pytest.mark.parametrize(
    ("rule", "seconds_per_block", "is_worth"), [("cost", 0.5, False), ("cost", 5.0, True), ("always", 0.5, True)]
)
def test_only_what_comes_back_sooner_than_it_is_computed_is_written_and_read(
    rule: str, seconds_per_block: float, is_worth: bool
) -> None:
    shelf, clock = Shelf(), Clock()
    store = guarded(shelf, clock)
    shelf.before_each = lambda: setattr(clock, "seconds", clock.seconds + 1.0)
    store.put({NAMES[0]: block(0)})
    store.exists([NAMES[0]])
    tiers = tiers_of(store, rule=rule)
    tiers.seconds_per_block = seconds_per_block
    tiers.bytes_per_block = 100
    tiers.enter()
    tiers.put({NAMES[1]: block(1)})
    assert tiers.flush(10.0)
    assert store.exists([NAMES[1]]) == ({NAMES[1]} if is_worth else set())
    assert Questions(tiers, clock).ask(1, [NAMES[0]]) is is_worth
    tiers.leave()


def test_who_waits_waits_no_longer_than_computing_takes() -> None:
    shelf, clock = Shelf(), Clock()
    gate = threading.Event()
    tiers = tiers_of(guarded(shelf), max_wait=3.0)
    tiers.seconds_per_block = 1.0
    shelf.before_each = gate.wait
    questions = Questions(tiers, clock)
    assert questions.ask(1, NAMES[:2])
    assert questions.ask(2, NAMES[:9])
    clock.seconds = 1.9
    assert questions.arrived() == []
    clock.seconds = 2.1
    assert questions.arrived() == [1]
    clock.seconds = 3.1
    assert questions.arrived() == [2], "max_wait"
    gate.set()


def test_what_never_comes_keeps_nobody_from_what_is_there() -> None:
    """More requests than there are threads wait for blocks that somebody promised."""
    shelf = Shelf()
    guarded(shelf).put({NAMES[0]: block(1)})
    # its time stands still
    questions = Questions(tiers_of(guarded(shelf), rule="always"), Clock())
    for number in range(1, 9):
        assert questions.ask(number, [NAMES[number]], is_expected=True)
    assert questions.ask(9, [NAMES[0]])
    for _ in range(5_000):
        questions.wait()
        if arrived := questions.arrived():
            break
    assert arrived == [9]
    guarded(shelf).put({NAMES[5]: block(1)})
    while not (arrived := questions.arrived()):
        questions.wait()
    assert arrived == [5], "it is looked for on"
    for number in range(1, 9):
        questions.forget(number)


def test_what_waits_to_be_written_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.kv_connectors.tiered.tiers._QUEUE_BYTES", 1000)
    shelf = Shelf()
    gate = threading.Event()
    shelf.before_each = gate.wait
    tiers = tiers_of(guarded(shelf), rule="always")
    tiers.put({name: block(number) for number, name in enumerate(NAMES)})
    assert tiers.statistics()["kv_tiers_waiting_bytes"] == 1000
    assert tiers.statistics()["kv_tiers_not_written_total"] == 10
    gate.set()
    tiers.enter()
    assert tiers.flush(10.0)
    assert len(shelf.values) == 10
    tiers.leave()


def test_who_reads_ends_with_those_who_write() -> None:
    tiers = tiers_of(guarded(Shelf()), rule="always")
    tiers.enter()
    others = set(threading.enumerate())
    questions = Questions(tiers)
    assert questions.ask(1, NAMES)
    readers = [one for one in set(threading.enumerate()) - others if one.name.startswith("quire-kv-reader")]
    assert readers
    tiers.leave()
    for reader in readers:
        reader.join(10)
        assert not reader.is_alive()


def test_what_comes_from_far_is_written_near() -> None:
    near, far = Shelf(), Shelf()
    first = tiers_of(guarded(far), rule="always")
    first.enter()
    first.put({name: block(1) for name in NAMES})
    assert first.flush(10.0)
    tiers = tiers_of(guarded(near), guarded(far), rule="always")
    tiers.enter()
    questions = Questions(tiers)
    assert questions.ask(1, NAMES)
    while not questions.arrived():
        questions.wait()
    assert len(tiers.host.near(NAMES)) == len(NAMES)
    assert tiers.flush(10.0)
    assert near.values == far.values
    tiers.leave()


def test_what_is_new_costs_few_questions() -> None:
    """A question may cost a message for each block."""
    names = [bytes(17) + number.to_bytes(16) for number in range(1000)]
    shelf = Shelf()
    guarded(shelf).put({name: block(1) for name in names[:100]})
    asked: list[int] = []
    exists = shelf.exists_many
    shelf.exists_many = lambda wanted: asked.append(len(wanted)) or exists(wanted)  # type: ignore[method-assign]
    questions = Questions(tiers_of(guarded(shelf), rule="always"))
    for number, wanted in enumerate((names, names[500:])):
        assert questions.ask(number, wanted)
        while not questions.arrived():
            questions.wait()
    assert asked == [8, 64, 64, 8]


def test_more_than_memory_holds_is_brought_as_far_as_it_goes() -> None:
    shelf = Shelf()
    first = tiers_of(guarded(shelf), rule="always")
    first.enter()
    first.put({name: block(1) for name in NAMES})
    assert first.flush(10.0)
    tiers = tiers_of(guarded(shelf), rule="always", host_bytes=500)
    questions = Questions(tiers)
    assert questions.ask(1, NAMES)
    while not questions.arrived():
        questions.wait()
    assert len(tiers.host.near(NAMES)) == 5
    assert tiers.host.num_bytes <= 500


# ---- names


def test_a_name_says_layout_format_and_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    other = CacheLayout.of("other weights", "float32", 4, [["layer 0"]], [SPEC])
    names = {namespace_of(LAYOUT), namespace_of(other)}
    monkeypatch.setenv("QUIRE_KV_STORE_SECRET", "a secret")
    names.add(namespace_of(LAYOUT))
    monkeypatch.setattr(namespace, "FORMAT", namespace.FORMAT + 1)
    names.add(namespace_of(LAYOUT))
    assert len(names) == 4


def test_a_state_is_kept_where_everything_is_moved() -> None:
    state = LayerSpec(name="layer 0", num_kv_heads=0, key_dim=0, value_dim=0, bytes_per_element=4, state_bytes=64)
    layout = CacheLayout.of("weights", "float32", 4, [["layer 0"]], [state])
    with pytest.raises(OptionError, match="recurrent layers"):
        TieredScheduler(layout, tiers_of())
    TieredScheduler(layout, tiers_of(rule="always"))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"host_bytes": 0}, "host_bytes=0"),
        ({"host_bytes": 1.5}, "host_bytes=1.5"),
        ({"max_wait": -1}, "max_wait=-1"),
        ({"rule": "never"}, "rule='never'"),
        ({"stores": (1,)}, "addresses"),
    ],
)
def test_a_setting_that_is_none(values: dict[str, object], reason: str) -> None:
    settings = {"stores": (), "host_bytes": 1, "max_wait": 1.0, "rule": "cost"}
    with pytest.raises(OptionError, match=reason):
        TierSettings.of(**(settings | values))  # type: ignore[arg-type]


def test_one_address_is_no_list_of_letters() -> None:
    with pytest.raises(OptionError, match=r"stores='file:///kv': must be a list .* such as \['file:///kv'\]"):
        tiered.worker_half(stores="file:///kv")


# ---- blocks of a cache


def test_blocks_go_out_and_come_back() -> None:
    settings = TierSettings((), 1 << 20, 1.0, "always")
    tiers = open_tiers(settings)
    assert open_tiers(settings) is tiers
    worker = TieredWorker(tiers)
    tensors = [torch.arange(40, dtype=torch.uint8).view(5, 8), 100 + torch.arange(15, dtype=torch.uint8).view(5, 3)]
    before = [tensor.clone() for tensor in tensors]
    worker.open(LAYOUT, tensors)
    worker.spill([BlockSpill(name=NAMES[1], block=1), BlockSpill(name=NAMES[3], block=3)])
    for tensor in tensors:
        tensor.zero_()
    source = tiers.host.lend(tiers.host.near([NAMES[3], NAMES[1]]))
    worker.load([BlockLoad(row=0, source=source, first_block=0, blocks=[[4, 0]])])
    for tensor, expected in zip(tensors, before, strict=True):
        assert torch.equal(tensor[[4, 0]], expected[[3, 1]])
        assert not tensor[1:4].any()
    tiers.host.put(NAMES[5], block(5, 7))
    source = tiers.host.lend(tiers.host.near([NAMES[5]]))
    with pytest.raises(ValueError, match="cannot be loaded"):
        worker.load([BlockLoad(row=0, source=source, first_block=0, blocks=[[1]])])
    worker.close()
    assert open_tiers(settings) is not tiers, "it was closed"


def test_a_block_of_other_bytes_is_computed_and_written_anew() -> None:
    """As another version of this program may have kept it. Loading it would end the request, and the next ones."""
    shelf = Shelf()
    names = [namespace_of(LAYOUT) + bytes([number] * 17) for number in range(3)]
    guarded(shelf).put({name: block(1, num_bytes) for name, num_bytes in zip(names, (8, 7, 8), strict=True)})
    tiers = tiers_of(guarded(shelf), rule="always")
    worker = TieredWorker(tiers)
    worker.open(LAYOUT, [torch.zeros(5, 8, dtype=torch.uint8)])
    questions = Questions(tiers)
    assert questions.ask(1, names)
    while not questions.arrived():
        questions.wait()
    assert len(tiers.host.near(names)) == 1
    assert len(shelf.values) == 2, "the one that nobody can use is removed"
    worker.close()
