"""What every store must do, asked of the real ones: folders, and servers that are started here and ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support import kv_servers
from tests.support.kv_servers import SERVERS

from quire.errors import OptionError
from quire.kv_connectors.tiered.stores import open_store
from quire.kv_connectors.tiered.stores.store import Store


class ThroughAPeer:
    """What one keeps is read by another one."""

    def __init__(self) -> None:
        first, second = kv_servers.nixl_peers()
        self._keeps = open_store(first)
        self._reads = open_store(second)
        self.put_many = self._keeps.put_many
        self.exists_many = self._reads.exists_many
        self.get_many = self._reads.get_many
        self.delete = self._reads.delete
        self.stat = self._keeps.stat

    def close(self) -> None:
        self._reads.close()
        self._keeps.close()


@pytest.fixture(scope="module", params=["files", *SERVERS, "nixl"])
def clients(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Store]]:
    """Opens one more client of one store."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "files":
        yield lambda: open_store(f"file://{folder}")
    elif request.param == "nixl":
        yield ThroughAPeer
    else:
        with SERVERS[request.param](folder) as server:
            yield lambda: open_store(server.address)


@pytest.fixture
def store(clients: Callable[[], Store]) -> Iterator[Store]:
    opened = clients()
    yield opened
    opened.close()


NAMES = [f"{'ab' * 16}/{number:02x}/{number:034x}" for number in range(40)]


def test_what_was_put_is_there(store: Store) -> None:
    values = {name: bytes([number]) * (1000 * number + 1) for number, name in enumerate(NAMES[:20])}
    store.put_many(list(values.items()))
    asked = [NAMES[3], NAMES[30], NAMES[0], NAMES[19]]
    assert store.exists_many(asked) == [True, False, True, True]
    assert store.get_many(asked) == [values[NAMES[3]], None, values[NAMES[0]], values[NAMES[19]]]
    assert store.get_many(NAMES[:20]) == list(values.values())


def test_what_is_put_again_is_replaced(store: Store) -> None:
    store.put_many([(NAMES[1], b"one")])
    store.put_many([(NAMES[1], b"another")])
    assert store.get_many([NAMES[1]]) == [b"another"]


def test_what_is_deleted_is_gone(store: Store) -> None:
    store.put_many([(NAMES[1], b"one"), (NAMES[2], b"two")])
    store.delete([NAMES[1], NAMES[39]])
    assert store.exists_many(NAMES[1:3]) == [False, True]
    assert store.get_many(NAMES[1:3]) == [None, b"two"]


def test_nothing_is_asked_for(store: Store) -> None:
    store.put_many([])
    store.delete([])
    assert store.exists_many([]) == store.get_many([]) == []


def test_another_client_finds_it(clients: Callable[[], Store], store: Store) -> None:
    store.put_many([(NAMES[5], b"five")])
    other = store if clients is ThroughAPeer else clients()
    assert other.get_many([NAMES[5]]) == [b"five"]
    if other is not store:
        other.close()


def test_any_bytes_of_any_size(store: Store) -> None:
    large = bytes(range(256)) * 20_000
    store.put_many([(NAMES[7], large), (NAMES[8], b"\r\n\0" * 7)])
    assert store.get_many(NAMES[7:9]) == [large, b"\r\n\0" * 7]


def test_threads_write_and_read_at_once(store: Store) -> None:
    """A reader gets a value whole, or nothing."""
    wrong: list[bytes] = []

    def write(number: int) -> None:
        for _ in range(5):
            store.put_many([(name, bytes([number]) * 50_000) for name in NAMES[20:24]])

    def read() -> None:
        for _ in range(10):
            for value in store.get_many(NAMES[20:24]):
                if value is not None and (len(value) != 50_000 or len(set(value)) != 1):
                    wrong.append(value)

    store.delete(NAMES[20:24])
    threads = [threading.Thread(target=write, args=(number,)) for number in (1, 2)]
    threads += [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert all(store.exists_many(NAMES[20:24]))


def test_what_it_knows_of_itself(store: Store) -> None:
    store.put_many([(NAMES[9], b"nine")])
    state = store.stat()
    assert state.num_values is None or state.num_values >= 1
    assert state.num_bytes is None or state.num_bytes >= 4


# ---- folders


def files_of(folder: Path, max_bytes: int = 1000) -> Store:
    return open_store(f"file://{folder}?size={max_bytes}")


def test_a_folder_is_bounded_and_the_least_recently_read_goes_first(tmp_path: Path) -> None:
    store = files_of(tmp_path)
    for name in NAMES[:4]:
        store.put_many([(name, bytes(250))])
    store.get_many([NAMES[0]])
    store.put_many([(NAMES[4], bytes(250))])
    assert store.exists_many(NAMES[:5]) == [True, False, True, True, True]
    assert store.stat().num_bytes == 1000
    store.put_many([(NAMES[5], bytes(1001))])
    assert store.exists_many(NAMES[:6]) == [True, False, True, True, True, False]


def test_the_bound_holds_for_all_that_share_a_folder_and_after_a_start(tmp_path: Path) -> None:
    first, second = files_of(tmp_path), files_of(tmp_path)
    for number, name in enumerate(NAMES[:20]):
        (first if number % 2 else second).put_many([(name, bytes(250))])
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) <= 5
    third = files_of(tmp_path, 600)
    third.put_many([(NAMES[30], bytes(250))])
    assert third.stat().num_bytes == 500


def test_one_file_that_cannot_be_read_takes_no_other_with_it(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}?size=1MiB")
    store.put_many([("a/one", b"1"), ("a/three", b"3")])
    (tmp_path / "a" / "two").mkdir()
    assert store.get_many(["a/one", "a/two", "a/one/four", "a/three"]) == [b"1", None, None, b"3"]


def test_what_was_not_finished_is_never_read(tmp_path: Path) -> None:
    store = files_of(tmp_path)
    store.put_many([(NAMES[0], b"whole")])
    path = tmp_path / NAMES[0]
    path.with_name(f"{path.name}-1-1.part").write_bytes(b"ha")
    again = files_of(tmp_path)
    assert again.stat().num_values == 1
    assert again.get_many([NAMES[0]]) == [b"whole"]


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("/var/cache/quire", "must begin with one of file://"),
        ("fiel:///var/cache", 'Did you mean "file"'),
        ("file://folder/below", "from the root on"),
        ("file:///proc/nothing/here", "may write into"),
        ("file:///nowhere?sise=4GiB", r"must be a size .* file:///nowhere\?size=4GiB"),
        ("s4://secret:password@bucket", "s4://bucket"),
        ("redis://:password@127.0.0.1:1/0?size=1GiB", "maxmemory, and leave size out"),
    ],
)
def test_an_address_that_is_none(address: str, reason: str) -> None:
    with pytest.raises(OptionError, match=reason) as caught:
        open_store(address)
    assert "password" not in str(caught.value)


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.delitem(sys.modules, "quire.kv_connectors.tiered.stores.redis_server", raising=False)
    with pytest.raises(OptionError, match=r'kv_store=redis://host.*pip install "quire\[valkey\]"'):
        open_store("redis://user:password@host")


# ---- memory of peers


def test_a_ring_gives_up_what_was_written_first() -> None:
    kv_servers.need("nixl_cu13")
    from quire.kv_connectors.tiered.stores.nixl import Arena

    arena = Arena(100)
    for number in range(3):
        arena.put(f"{number}", bytes([number]) * 30)
    arena.put("3", bytes([3]) * 20)  # behind it 10 bytes are left, too few: it begins anew
    assert [arena.get(f"{number}") for number in range(4)] == [None, b"\x01" * 30, b"\x02" * 30, b"\x03" * 20]
    arena.put("4", bytes([4]) * 50)
    assert [arena.get(f"{number}") is None for number in range(5)] == [True, True, True, False, False]
    assert arena.get("4") == b"\x04" * 50
    arena.put("5", bytes(101))
    assert arena.get("5") is None
    assert arena.state().num_bytes == 70


def test_a_peer_that_is_gone_is_missing_and_the_others_answer() -> None:
    kv_servers.need("nixl_cu13")
    (first, _), (second, _) = kv_servers.nixl_peers(), kv_servers.nixl_peers()
    ports = [address.split(":")[2].split("?")[0] for address in (first, second)]
    (own,) = kv_servers.free_ports(1)
    gone, kept = open_store(first), open_store(second)
    reads = open_store(f"nixl://127.0.0.1:{own}?memory=0.1&peer=127.0.0.1:{ports[0]}&peer=127.0.0.1:{ports[1]}")
    kept.put_many([(NAMES[1], b"one")])
    gone.put_many([(NAMES[2], b"two")])
    assert reads.get_many(NAMES[1:3]) == [b"one", b"two"]
    gone.close()
    assert reads.get_many(NAMES[1:3]) == [b"one", None]
    kept.close()
    reads.close()
