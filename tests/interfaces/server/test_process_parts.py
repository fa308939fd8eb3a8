"""The parts of a server of several processes, each by itself."""

import asyncio
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from starlette.datastructures import State

from quire.errors import EngineDeadError, OptionError, QuireError
from quire.interfaces.gateway import create_app
from quire.interfaces.gateway.access.endpoints import TENANT_COUNTS, reports_of_all
from quire.interfaces.gateway.access.ledger import SharedBound
from quire.interfaces.gateway.access.tenants import Quota, Tenant
from quire.interfaces.gateway.access.waiting_room import WaitingRoom
from quire.interfaces.gateway.processes import fleet
from quire.interfaces.gateway.processes.channel import Channel, ChannelClosedError, ChannelError
from quire.interfaces.gateway.processes.handing_on import _GET, _POST, HandedOn, hander_on, is_for_any
from quire.interfaces.gateway.processes.kept_counts import KeptCounts
from quire.interfaces.gateway.processes.shared_ledger import SharedLedger, make_page
from quire.interfaces.gateway.run import check_possible, with_shared_secret
from quire.interfaces.server.observing.metrics import own_statistics
from quire.interfaces.server.options import ServerOptions
from quire.interfaces.server.page import PATHS as PAGE_PATHS
from quire.interfaces.server.parts import parts_of
from quire.interfaces.server.serving import Readiness
from quire.interfaces.server.wire.errors import ApiError
from quire.observability.latest import Latest
from quire.observability.metrics import ServerMetrics
from quire.testing.fake_llm import fake_config

# ---------------------------------------------------------------------------------------------- questions and answers


def run_channels(body, answers, others=None) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        one, other = await Channel.over(ours, others or {}), await Channel.over(theirs, answers)
        tasks = [asyncio.ensure_future(channel.run()) for channel in (one, other)]
        async with asyncio.timeout(30):
            await body(one, other)
        one.close()
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_each_side_asks_the_other():
    async def double(number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    async def body(one: Channel, other: Channel) -> None:
        assert await asyncio.gather(*(one.ask("double", number=n) for n in range(50))) == [2 * n for n in range(50)]
        assert await other.ask("name") == "one"

    run_channels(body, {"double": double}, {"name": lambda: "one"})


def test_what_is_told_comes_in_order_and_is_not_answered():
    heard: list[int] = []

    async def body(one: Channel, other: Channel) -> None:
        for number in range(20):
            one.tell("hear", number=number)
        await one.ask("nothing")
        assert heard == list(range(20))

    run_channels(body, {"hear": heard.append, "nothing": lambda: None} | {"hear": lambda number: heard.append(number)})


def test_a_question_that_fails_fails_for_its_asker(caplog):
    def refuse() -> None:
        raise QuireError("not today")

    async def body(one: Channel, other: Channel) -> None:
        for name, text in (("refuse", "not today"), ("broken", "ZeroDivisionError"), ("unknown", "KeyError")):
            with pytest.raises(ChannelError, match=text):
                await one.ask(name)
        assert await one.ask("fine") == 1

    run_channels(body, {"refuse": refuse, "broken": lambda: 1 / 0, "fine": lambda: 1})


def test_the_end_of_the_other_side_ends_every_question():
    async def body(one: Channel, other: Channel) -> None:
        asked = asyncio.ensure_future(one.ask("wait"))
        await one.ask("is_there")
        other.close()
        with pytest.raises(ChannelClosedError):
            await asked
        with pytest.raises(ChannelClosedError):
            await one.ask("wait")
        one.tell("wait")

    run_channels(body, {"wait": lambda: asyncio.Event().wait(), "is_there": lambda: True})


# ---------------------------------------------------------------------------------------------- bounds for all


def two_ledgers(tenants: list[str]) -> tuple[SharedLedger, SharedLedger]:
    page = make_page(2, tenants)
    return SharedLedger(page, 0, 2, tenants), SharedLedger(page, 1, 2, tenants)


_IS_FREE = "import fcntl, sys; fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
_STANDS_STILL = """
import os, signal, sys
from quire.interfaces.gateway.processes.shared_ledger import SharedLedger
with SharedLedger(int(sys.argv[1]), 1, 2, []).locked():
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_process_that_stands_still_with_the_lock_stops_nobody_else():
    page = make_page(2, [])
    ledger = SharedLedger(page, 0, 2, [])
    other = subprocess.Popen([sys.executable, "-c", _STANDS_STILL, str(page)], pass_fds=[page])
    try:
        os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WNOWAIT)
        for _ in range(3):
            with ledger.locked(), ledger.locked():
                ledger.add(0, "", 1)
        assert ledger.total(0) == 3
    finally:
        other.kill()
        other.wait()
    with ledger.locked():
        # it is taken again as soon as it is free
        assert subprocess.call([sys.executable, "-c", _IS_FREE, str(page)], pass_fds=[page]) == 1
    assert subprocess.call([sys.executable, "-c", _IS_FREE, str(page)], pass_fds=[page]) == 0
    os.close(page)


def test_the_queue_is_one_for_all():
    rooms = [WaitingRoom(max_requests=3, max_tokens=100, ledger=ledger) for ledger in two_ledgers([""])]
    nobody = Tenant()
    first = rooms[0].admit(nobody, [(2, 10)])
    second = rooms[1].admit(nobody, [(1, 20)])
    assert [(room.num_requests, room.num_tokens) for room in rooms] == [(3, 30)] * 2
    for room in rooms:
        with pytest.raises(ApiError, match="3 requests wait"):
            room.admit(nobody, [(1, 1)])
    second.begin(0)
    rooms[0].admit(nobody, [(1, 1)]).close()
    for reservation in (first, second):
        reservation.close()
    assert [(room.num_requests, room.num_tokens) for room in rooms] == [(0, 0)] * 2
    for room in rooms:
        room.set_capacity(1000)
        assert room.max_tokens == 100


def test_a_tenants_quota_is_one_for_all():
    tenant = Tenant("a", Quota(max_requests=2, tokens_per_minute=600))
    now = 100.0
    rooms = [WaitingRoom([tenant], ledger=ledger, clock=lambda: now) for ledger in two_ledgers(["a"])]
    reservations = [room.admit(tenant, [(1, 290)]) for room in rooms]
    with pytest.raises(ApiError, match="2 requests in flight"):
        rooms[1].admit(tenant, [(1, 1)])
    reservations[0].close()
    assert rooms[0].use_of(tenant).bucket is not None
    assert [room.report()[0].tokens_left for room in rooms] == [20, 20]
    reservations[1].add_generated(20)
    with pytest.raises(ApiError, match="600 tokens per minute"):
        rooms[0].admit(tenant, [(1, 1)])
    now += 1.0  # ten tokens are back
    rooms[0].admit(tenant, [(1, 1)]).close()
    reservations[1].close()


def test_what_a_dead_process_had_in_use_is_free():
    tenant = Tenant("a", Quota(max_requests=1, tokens_per_minute=1000))
    ledgers = two_ledgers(["a"])
    rooms = [WaitingRoom([tenant], max_requests=5, ledger=ledger, clock=lambda: 5.0) for ledger in ledgers]
    lost = rooms[1].admit(tenant, [(1, 290)])
    with pytest.raises(ApiError):
        rooms[0].check(tenant, 1)
    ledgers[0].wipe(1)
    assert (rooms[0].num_requests, rooms[0].num_tokens) == (0, 0)
    # of the tokens per minute it has used what it has used
    assert rooms[0].report()[0].tokens_left == 710
    rooms[0].admit(tenant, [(1, 1)])
    del lost


def test_a_bound_of_all_is_a_shared_bound():
    weights = {"a": 1.0, "b": 3.0}
    for most in (7, 8, 100):
        alone = SharedBound(most, weights)
        bounds = [ledger.bound("tokens", most, weights) for ledger in two_ledgers(["a", "b"])]
        for number, (tenant, amount) in enumerate([("a", 2), ("b", 1), ("a", 1), ("c", 1), ("b", -1), ("a", -2)]):
            bounds[number % 2].take(tenant, amount)
            alone.take(tenant, amount)
            for bound in bounds:
                assert bound.num_used == alone.num_used
                for name in ("a", "b", "c"):
                    rooms = [bound.has_room(name, more) for more in range(most + 2)]
                    assert rooms == [alone.has_room(name, more) for more in range(most + 2)]
                    assert bound.most_for(name) == alone.most_for(name)
        assert alone.resized(most + 1).num_used == bounds[0].resized(most + 1).num_used == alone.num_used


def test_two_processes_lose_none_of_each_others_changes():
    count = 3000
    mine, theirs = two_ledgers(["a"])
    bucket = mine.bucket("a", 60_000, 5.0)
    child = os.fork()
    if child == 0:
        other = theirs.bucket("a", 60_000, 5.0)
        for _ in range(count):
            other.take(1, 5.0)
        os._exit(0)
    for _ in range(count):
        bucket.take(1, 5.0)
    assert os.waitpid(child, 0)[1] == 0
    assert bucket.level(5.0) == 60_000 - 2 * count


# ---------------------------------------------------------------------------------------------- counts of all


def test_counts_are_summed_also_those_of_the_dead():
    first, second, third = (ServerMetrics() for _ in range(3))
    for number, metrics in enumerate((first, second, third)):
        metrics.generation_tokens.add(10)
        metrics.http_responses.add(1, f"/{number % 2}", "200")
        metrics.inter_token_latency.observe(0.01)
        metrics.queued_requests.read = lambda number=number: float(number)
    kept = KeptCounts()
    kept.saw(7, "metrics", {"instruments": second.snapshot(), "statistics": {"a_total": 2.0, "requests_open": 1.0}})
    kept.buried(7)
    kept.buried(7)
    kept.saw(8, "metrics", {"instruments": second.snapshot(), "statistics": {"a_total": 3.0}})
    kept.buried(8)
    [buried] = kept.answers("metrics", (), None)
    assert buried["statistics"] == {"a_total": 5.0}
    text = first.exposition({}, [third.snapshot(), buried["instruments"]]).decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("quire:"))
    assert values['quire:generation_tokens_total{model_name=""}'] == "40.0"
    assert values['quire:http_responses_total{model_name="",route="/0",status="200"}'] == "2.0"
    assert values['quire:http_responses_total{model_name="",route="/1",status="200"}'] == "2.0"
    assert values['quire:inter_token_latency_seconds_count{model_name=""}'] == "4.0"
    assert values['quire:inter_token_latency_seconds_bucket{le="0.01",model_name=""}'] == "4.0"
    # the greatest, and what died with its process counts no more
    assert values['quire:queued_requests{model_name=""}'] == "2.0"
    throughput = Latest(first, lambda: 0.0).numbers([third.snapshot(), buried["instruments"]])
    assert throughput["throughput"]["generated_tokens_total"] == 40
    assert throughput["latency"]["between_tokens"]["count"] == 3
    # nothing was added to the process itself
    assert first.generation_tokens.value() == 10
    assert 'generation_tokens_total{model_name=""} 10.0' in first.exposition({}).decode()


def test_reports_of_tenants_are_put_together():
    tenants = [Tenant("a"), Tenant("b")]
    rooms = [WaitingRoom(tenants, ledger=ledger) for ledger in two_ledgers(["a", "b"])]
    reservations = [rooms[0].admit(tenants[0], [(2, 5)]), rooms[1].admit(tenants[0], [(1, 7)])]
    [a, b] = reports_of_all(rooms[0].report(), [[asdict(one) for one in rooms[1].report()]])
    assert (a.name, a.num_requests, a.num_accepted, a.num_prompt_tokens) == ("a", 3, 2, 12)
    assert (a.num_queued_requests, a.num_queued_tokens) == (3, 12)
    assert (b.name, b.num_requests) == ("b", 0)
    # two that are gone: what they had in use is not counted, what they had counted is
    kept = KeptCounts()
    for number in (1, 2):
        kept.saw(number, "tenants", [asdict(one) for one in rooms[1].report()])
        kept.buried(number)
    [a, b] = reports_of_all(rooms[0].report(), kept.answers("tenants", (), None))
    assert (a.num_requests, a.num_accepted, a.num_prompt_tokens) == (2, 3, 19)
    for reservation in reservations:
        reservation.close()


class Counting:
    """A further process that has accepted so many requests, of which one is in flight."""

    seat, is_loaded = 1, True

    def __init__(self, number: int, count: int = 0) -> None:
        self.number, self.count, self.is_silent = number, count, False
        self.channel = self
        self.num_looks = 0
        self.child = SimpleNamespace(pid=4711)

    async def ask(self, name: str):
        self.num_looks += name == "is_alive"
        if self.is_silent or self.num_looks > 1:
            raise ChannelClosedError
        counts = dict.fromkeys(TENANT_COUNTS, self.count)
        return {"is_alive": True, "metrics": {"instruments": {}, "statistics": {"a_total": self.count}}}.get(
            name, [{"name": "", "num_requests": 1, **counts}]
        )


def a_fleet_of(*processes: Counting) -> fleet.Fleet:
    those = fleet.Fleet(lambda seat: None, None, SimpleNamespace(num_processes=2))
    those._processes = {process.number: process for process in processes}
    return those


def seen(reports: list) -> tuple[int, int]:
    """Accepted, in flight."""
    reports = [report for [report] in reports]
    return sum(one["num_accepted"] for one in reports), sum(one["num_requests"] for one in reports)


def test_one_that_does_not_answer_keeps_its_counts():
    async def main():
        one, other = Counting(1, 5), Counting(2, 7)
        those = a_fleet_of(one, other)
        assert seen(await those.ask("tenants")) == (12, 2)
        one.is_silent = True
        assert seen(await those.ask("tenants")) == (12, 1)
        one.is_silent, one.count = False, 6
        assert seen(await those.ask("tenants")) == (13, 2)

    asyncio.run(main())


def test_what_a_process_showed_itself_is_kept():
    async def main():
        asker, other = Counting(1, 5), Counting(2, 7)
        those = a_fleet_of(asker, other)
        assert seen(await those._ask_all_but(asker, "tenants", {})) == (7, 1)
        del those._processes[1]
        those._counts.buried(1)
        assert seen(await those.ask("tenants")) == (12, 1)

    asyncio.run(main())


def test_one_that_dies_while_all_are_asked_is_counted_once():
    async def main():
        one, slow = Counting(1, 5), Counting(2, 7)
        those = a_fleet_of(one, slow)

        async def die_meanwhile(name: str):
            while not those._counts.answers(name, (), None):
                await asyncio.sleep(0)
            del those._processes[1]
            those._counts.buried(1)
            return await Counting(2, 7).ask(name)

        slow.ask = die_meanwhile
        assert seen(await those.ask("tenants")) == (12, 1)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("readiness", "is_shown"),
    [(Readiness.READY, True), (Readiness.STOPPING, True), (Readiness.RESTARTING, False), (Readiness.DEAD, False)],
)
def test_one_that_drains_still_shows_what_its_client_counts(readiness: Readiness, is_shown: bool):
    state = State(parts_of(ServerOptions()))
    serving = state.serving
    serving.readiness = readiness
    assert own_statistics(state) == {}  # it has had no engine
    serving.has_started, serving._engine = True, SimpleNamespace(client_statistics=lambda: {"a_total": 1.0})
    assert own_statistics(state) == ({"a_total": 1.0} if is_shown else {})

    def gone() -> None:
        raise EngineDeadError("gone")

    serving._engine = SimpleNamespace(client_statistics=gone)
    assert own_statistics(state) == {}


def test_what_is_counted_is_looked_at(monkeypatch):
    monkeypatch.setattr(fleet, "_LOOK_SECONDS", 0.001)

    async def main():
        process = Counting(1, 5)
        those = a_fleet_of(process)
        # until it is gone
        await asyncio.wait_for(those._kill_if_it_stands_still(process), 30)
        those._counts.buried(1)
        del those._processes[1]
        assert seen(await those.ask("tenants")) == (5, 0)
        [metrics] = await those.ask("metrics")
        assert metrics["statistics"] == {"a_total": 5}

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------- who answers what


def test_what_every_process_answers_exists():
    paths = {route.path for route in create_app().routes}
    named = {path.decode() for path in _GET | _POST} - PAGE_PATHS
    assert "/" in PAGE_PATHS
    assert named <= paths
    kept = ("/v1/sessions", "/v1/responses", "/v1/files", "/v1/batches", "/v1/observe", "/v1/admin")
    assert not any(path.startswith(kept) for path in named)


@pytest.mark.parametrize(
    ("method", "target", "is_for_all"),
    [
        ("POST", "/v1/chat/completions", True),
        ("POST", "/v1/chat/completions?x=/v1/sessions", True),
        ("GET", "/v1/chat/completions", False),
        ("HEAD", "/health", True),
        ("GET", "/", True),
        ("GET", "/v1/models/a/b", True),
        ("OPTIONS", "/v1/sessions", True),
        ("GET", "/v1/sessions/s", False),
        ("POST", "/v1/responses", False),
        ("POST", "/v1%2Fchat/completions", False),
        ("GET", "http://host/health", False),
        ("BREW", "/health", False),
        ("POST", "/invocations", True),
        ("GET", "/ping", True),
        ("POST", "/llm/v1/completions?x=1", False),
    ],
)
def test_who_answers(method: str, target: str, is_for_all: bool):
    assert is_for_any(method.encode(), target.encode()) == is_for_all


@pytest.mark.parametrize(
    ("target", "is_for_all"),
    [("/llm/v1/completions?x=1", True), ("/v1/completions", True), ("/llm/v1/responses", False),
     ("/llmx/v1/completions", False), ("/llm/llm/v1/completions", False)],
)  # fmt: skip
def test_who_answers_behind_a_prefix(target: str, is_for_all: bool):
    assert is_for_any(b"POST", target.encode(), b"/llm") == is_for_all


def test_a_connection_goes_on_with_what_was_read_of_it():
    async def main() -> None:
        to_first, from_other = socket.socketpair()
        came: asyncio.Queue[tuple[socket.socket, bytes]] = asyncio.Queue()

        async def adopt(connection: socket.socket, data: bytes) -> None:
            await came.put((connection, data))

        handed = HandedOn(from_other, adopt)
        hand_on = hander_on(to_first)
        for data in (b"GET / HTTP/1.1\r\n", b"", b"x" * 1_000_000):
            client, ours = socket.socketpair()
            assert hand_on(ours.fileno(), data)
            ours.close()
            async with asyncio.timeout(30):
                connection, read = await came.get()
            assert read == data
            connection.sendall(b"hello")
            assert client.recv(10) == b"hello"
            connection.close()
            assert client.recv(10) == b""
        handed.close()
        assert not hand_on(0, b"")
        handed.close()

    asyncio.run(main())


def test_what_several_processes_need():
    several = ServerOptions(api_server_count=2)
    with pytest.raises(OptionError, match="api_server_count=2: several processes need"):
        check_possible(several, fake_config(engine_process=False))
    check_possible(several, fake_config())
    check_possible(ServerOptions(), fake_config(engine_process=False))
    secrets = {with_shared_secret(several).tenant_secret for _ in range(2)}
    assert len(secrets) == 2
    assert with_shared_secret(ServerOptions()).tenant_secret is None


def test_halves_of_requests_need_one_secret_of_tenants():
    with pytest.raises(OptionError, match="role=decode: each tenant's blocks have names of their own"):
        check_possible(ServerOptions(api_keys=("a", "b")), fake_config(role="decode", kv_store="host"))
    check_possible(ServerOptions(api_keys=("a", "b")), fake_config())
    check_possible(ServerOptions(api_keys=("a",)), fake_config(role="decode", kv_store="host"))
    check_possible(ServerOptions(api_keys=("a", "b"), tenant_secret="c"), fake_config(role="decode", kv_store="host"))
    check_possible(ServerOptions(), fake_config(role="prefill", kv_store="host"))
    assert with_shared_secret(ServerOptions(api_server_count=2, tenant_secret="mine")).tenant_secret == "mine"


@pytest.mark.parametrize("is_loaded", [False, True])
def test_one_that_does_not_load_or_does_not_answer_is_killed(monkeypatch, caplog, is_loaded):
    monkeypatch.setattr(fleet, "_LOOK_SECONDS", 0.001)
    killed = asyncio.Event()

    async def never(name):
        await asyncio.Event().wait()

    async def main():
        process = SimpleNamespace(
            seat=1,
            is_loaded=is_loaded,
            child=SimpleNamespace(pid=4711),
            channel=SimpleNamespace(ask=never),
            kill=killed.set,
        )
        ledger = SimpleNamespace(num_processes=2)
        await fleet.Fleet(lambda seat: None, None, ledger)._kill_if_it_stands_still(process)

    asyncio.run(asyncio.wait_for(main(), 30))
    assert killed.is_set()
    assert ("stands still" if is_loaded else "has not loaded for") in caplog.text
