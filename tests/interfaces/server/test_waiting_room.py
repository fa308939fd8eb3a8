"""The bounded queue: exact counts, parts of tenants, quotas, and what a refused client is told."""

import random

import pytest

from quire.errors import RequestError
from quire.interfaces.gateway.access.ledger import SharedBound, Throughput, TokenBucket
from quire.interfaces.gateway.access.tenants import NOBODY, Quota, Tenant
from quire.interfaces.gateway.access.waiting_room import WaitingRoom
from quire.interfaces.server.wire.errors import ApiError
from quire.observability.instruments import Counter


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def room_of(clock, *tenants, **limits):
    rejections = Counter("rejected", "", ["why"])
    room = WaitingRoom(tenants, rejections=rejections, clock=clock, **limits)
    room.rejections = rejections
    return room


def refused(room, tenant=NOBODY, sizes=((1, 1),)):
    with pytest.raises(ApiError) as caught:
        room.admit(tenant, sizes)
    assert (caught.value.status, caught.value.type, caught.value.code) == (429, "requests", "rate_limit_exceeded")
    return int(caught.value.headers["retry-after"])


# ---------------------------------------------------------------------------------------------- I19: exact


@pytest.mark.parametrize("most", [1, 2, 1024])
def test_so_many_requests_wait_and_not_one_more(clock, most):
    room = room_of(clock, max_requests=most)
    reservations = [room.admit(NOBODY, [(1, 3)]) for _ in range(most)]
    refused(room)
    assert (room.num_requests, room.num_tokens) == (most, 3 * most)
    reservations[0].begin(0)
    reservations.append(room.admit(NOBODY, [(1, 3)]))
    refused(room)
    for reservation in reservations:
        reservation.close()
        reservation.close()
    assert (room.num_requests, room.num_tokens, room.use_of(NOBODY).num_in_flight) == (0, 0, 0)


def test_so_many_tokens_wait_and_not_one_more(clock):
    room = room_of(clock, max_tokens=100)
    first = room.admit(NOBODY, [(1, 60)])
    refused(room, sizes=[(1, 41)])
    second = room.admit(NOBODY, [(4, 40)])  # tokens of a prompt count once, whatever n is
    assert (room.num_requests, room.num_tokens) == (5, 100)
    refused(room, sizes=[(1, 1)])
    first.begin(0)
    assert room.num_tokens == 40
    second.close()


def test_a_request_counts_for_what_it_is_and_is_taken_whole_or_not_at_all(clock):
    room = room_of(clock, max_requests=10)
    room_before = room.admit(NOBODY, [(3, 1), (3, 1)])
    refused(room, sizes=[(2, 1), (3, 1)])
    assert room.num_requests == 6
    reservation = room.admit(NOBODY, [(2, 1), (2, 1)])
    reservation.begin(1)
    reservation.begin(1)
    assert room.num_requests == 8
    assert reservation.has_begun
    assert not room_before.has_begun


def test_what_could_never_wait_is_a_mistake_and_no_matter_of_time(clock):
    room = room_of(clock, max_requests=10, max_tokens=100)
    for sizes, name in (([(11, 1)], "n"), ([(1, 1)] * 11, "prompt"), ([(1, 101)], "prompt"), ([(2, 51)] * 2, "prompt")):
        with pytest.raises(RequestError, match=r"max_num_queued_(requests=10|tokens=100)") as caught:
            room.admit(NOBODY, sizes)
        assert caught.value.param == name
    assert room.num_requests == 0


@pytest.mark.parametrize("seed", range(5))
def test_accepted_and_rejected_are_what_was_offered(clock, seed):
    chance = random.Random(seed)
    tenants = [Tenant("a"), Tenant("b", Quota(weight=2, max_queued=9)), Tenant("c", Quota(max_requests=12))]
    room = room_of(clock, *tenants, max_requests=40, max_tokens=400)
    reservations, num_offered, num_impossible = [], 0, 0
    for _ in range(3_000):
        clock.now += chance.random() / 10
        if reservations and chance.random() < 0.5:
            reservation = reservations.pop(chance.randrange(len(reservations)))
            if chance.random() < 0.7:
                reservation.begin(0)
            if chance.random() < 0.3:
                reservations.append(reservation)
            else:
                reservation.close()
            continue
        num_offered += 1
        sizes = [(chance.randint(1, 3), chance.randint(1, 60)) for _ in range(chance.randint(1, 2))]
        before = room.num_requests, room.num_tokens
        try:
            reservations.append(room.admit(chance.choice(tenants), sizes))
        except RequestError:
            num_impossible += 1
        except ApiError:
            assert (room.num_requests, room.num_tokens) == before, "who is refused leaves nothing behind"
        assert room.num_requests <= 40
        assert room.num_tokens <= 400
    reports = room.report()
    num_rejected = sum(one.num_rejected for one in reports)
    assert sum(one.num_accepted for one in reports) + num_rejected + num_impossible == num_offered
    assert num_rejected > 100
    assert sum(value for _, value in room.rejections._values.items()) == num_rejected
    for reservation in reservations:
        reservation.close()
    assert [(one.num_requests, one.num_queued_requests, one.num_queued_tokens) for one in room.report()] == [
        (0,) * 3
    ] * 3


def test_a_stay_that_nobody_holds_any_more_ends(clock):
    room = room_of(clock, max_requests=1)
    reservation = room.admit(NOBODY, [(1, 1)])
    refused(room)
    del reservation
    room.admit(NOBODY, [(1, 1)]).close()


# ---------------------------------------------------------------------------------------------- when to come again


def test_retry_after_follows_from_the_pace(clock):
    room = room_of(clock, max_requests=20, queue_seconds=60)
    reservations = [room.admit(NOBODY, [(1, 1)]) for _ in range(20)]
    assert refused(room) == 1, "nothing is known yet"
    for _ in range(10):  # two a second
        clock.now += 0.5
        reservations.pop(0).begin(0)
        reservations.append(room.admit(NOBODY, [(1, 1)]))
    assert 9 <= refused(room) <= 10
    clock.now += 300
    assert refused(room) == 60, "nothing begins any more: the longest time that anybody waits here"


def test_the_oldest_is_seen(clock):
    room = room_of(clock)
    assert room.oldest_seconds == 0
    reservations = []
    for _ in range(3):
        reservations.append(room.admit(NOBODY, [(1, 1)]))
        clock.now += 1
    arriving = room.admit(NOBODY, [(1, 0)], is_arriving=True)
    assert room.oldest_seconds == 3
    reservations[0].begin(0)
    assert room.oldest_seconds == 2
    reservations[2].close()
    reservations[1].close()
    assert room.oldest_seconds == 0, "one that waits for its own client does not count"
    arriving.close()


def test_throughput():
    pace = Throughput()
    assert pace.rate(5.0) == 0
    for second in range(10):
        pace.add(3, 100.0 + second)
    assert pace.rate(110.0) == pytest.approx(3.0)
    assert pace.rate(125.0) == pytest.approx(30 / 25)
    assert pace.rate(141.0) == 0
    pace.add(8, 200.0)
    assert pace.rate(200.5) == 8


# ---------------------------------------------------------------------------------------------- tenants


def test_nobody_can_fill_the_room_alone(clock):
    one, two, three = Tenant("one"), Tenant("two"), Tenant("three", Quota(weight=2))
    room = room_of(clock, one, two, three, max_requests=80)
    reservations = []
    for _ in range(50):  # 10 of its own part and the 40 of everybody
        reservations.append(room.admit(one, [(1, 1)]))
    refused(room, one)
    reservations += [room.admit(two, [(1, 1)]) for _ in range(10)]
    refused(room, two)
    reservations += [room.admit(three, [(1, 1)]) for _ in range(20)]
    refused(room, three)
    assert room.num_requests == 80


def test_a_refusal_names_the_bound_that_was_met(clock):
    one, two = Tenant("one"), Tenant("two")
    room = room_of(clock, one, two, max_requests=8)

    def said(tenant, count):
        with pytest.raises((ApiError, RequestError)) as caught:
            room.admit(tenant, [(count, 1)])
        return str(caught.value)

    places = "max_num_queued_requests=8, of which 2 are kept for other keys"
    assert f"7 requests at once, more than one key may have on this server even when nobody else has any ({places}" in (
        said(one, 7)
    )
    reservations = [room.admit(one, [(1, 1)]) for _ in range(6)]
    # there are places, but none for it
    assert said(one, 1).startswith(f"This key has 6 requests in the queue, 1 more would be too many ({places})")
    assert said(two, 3).startswith("The queue is full: 6 requests wait, 3 more would be too many (max_num_queued")
    reservations.append(room.admit(two, [(2, 1)]))
    assert said(two, 1).startswith("The queue is full: 8 requests wait")
    assert "(max_requests=2)" in said(Tenant("two", Quota(max_requests=2)), 3)
    assert "(max_queued=2)" in said(Tenant("two", Quota(max_queued=2)), 3)


def test_a_bound_of_one_tenant_is_whole():
    bound = SharedBound(10, {"one": 5.0})
    bound.take("one", 10)
    assert not bound.has_room("one", 1)
    bound.give_back("one", 10)
    assert bound.has_room("one", 10)


def test_quotas(clock):
    tenant = Tenant("t", Quota(max_requests=4, max_queued=2))
    room = room_of(clock, tenant)
    first, second = room.admit(tenant, [(1, 1)]), room.admit(tenant, [(1, 1)])
    refused(room, tenant)
    first.begin(0)
    second.begin(0)
    third = room.admit(tenant, [(2, 1)])
    third.begin(0)
    refused(room, tenant)
    with pytest.raises(RequestError, match="max_requests"):
        room.admit(tenant, [(5, 1)])
    first.close()
    room.admit(tenant, [(1, 1)])
    assert room.rejections.value("tenant_queued") == 1
    assert room.rejections.value("tenant_requests") == 1


def test_tokens_per_minute(clock):
    tenant = Tenant("t", Quota(tokens_per_minute=600))
    room = room_of(clock, tenant)
    reservation = room.admit(tenant, [(1, 500)])
    reservation.add_generated(300)
    assert refused(room, tenant) == 21, "200 too many, 10 a second, and one more"
    clock.now += 20.2
    room.admit(tenant, [(1, 500)])
    assert room.rejections.value("tenant_tokens") == 1
    [report] = room.report()
    assert (report.num_prompt_tokens, report.num_generated_tokens) == (1000, 300)


def test_a_bucket_does_not_overflow():
    bucket = TokenBucket(60, now=0.0)
    bucket.take(90, 0.0)
    assert bucket.level(10.0) == -20
    assert bucket.seconds_until(1, 10.0) == 21
    assert bucket.level(10_000.0) == 60
