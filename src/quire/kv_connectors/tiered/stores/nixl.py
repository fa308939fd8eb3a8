"""Blocks in the memory of other engines, read from there over NIXL (RDMA, shared memory, TCP):
`nixl://0.0.0.0:7701?memory=4&peer=host:7701&peer=another:7701`. An engine keeps what it writes in `memory` GiB of its
own, from which whoever may connect to its port reads, and asks its peers for what it does not have.

A peer says where in its memory a block lies, and the reader fetches it without it. So a block may be overwritten while
it is read: the checksum of what was stored tells. What was written first is given up first.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import numpy as np
import zmq
from nixl_cu13._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

from quire.errors import OptionError
from quire.kv_connectors.tiered.stores.store import StoreState

_DEFAULT_GIB = 1.0
# into which is read, one call after the other
_LANDING_BYTES = 64 << 20
_MILLISECONDS = 1000
_SECONDS = 2.0
# a peer that did not answer is not asked again for so long
_REST_SECONDS = 5.0


class _Question(msgspec.Struct):
    names: list[str]
    is_delete: bool = False


class _Answer(msgspec.Struct):
    agent: str
    metadata: bytes
    # of each, where it lies and how long it is; [] for none
    places: list[list[int]]


def open_store(address: str) -> Peers:
    parts = urlsplit(address)
    try:
        said = parse_qs(parts.query, strict_parsing=bool(parts.query))
        memory = int(float(said.pop("memory", [str(_DEFAULT_GIB)])[-1]) * 2**30)
        peers = said.pop("peer", [])
        if said or parts.port is None or memory < 1:
            raise ValueError(f"{', '.join(said) or 'the port or the memory'} cannot be understood")
        return Peers(f"tcp://{parts.hostname}:{parts.port}", memory, peers)
    except (ValueError, zmq.ZMQError) as error:
        raise OptionError(
            f"kv_store={address}: {error}. Write nixl://HOST:PORT?memory=GIB&peer=HOST:PORT, with the address at which "
            "this engine listens first."
        ) from error


class Arena:
    """Values one behind the other in a ring of bytes: the next one takes the place of those that were written first."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = np.zeros(num_bytes, dtype=np.uint8)
        self.address = int(self.memory.ctypes.data)
        self.lock = threading.Lock()
        # (start, end) by name, in the order of the ring
        self._places: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._head = 0

    def put(self, name: str, value: bytes) -> None:
        size = len(value)
        if size > len(self.memory):
            return
        with self.lock:
            self._places.pop(name, None)
            if self._head + size > len(self.memory):
                self._give_up_to(len(self.memory))
                self._head = 0
            start, self._head = self._head, self._head + size
            self._give_up_to(self._head, start)
            self.memory[start : self._head] = np.frombuffer(value, dtype=np.uint8)
            self._places[name] = start, self._head

    def _give_up_to(self, end: int, start: int | None = None) -> None:
        """Those that lie from the head on, or from `start`, to `end`."""
        first = self._head if start is None else start
        for name in [name for name, (begin, last) in self._places.items() if last > first and begin < end]:
            del self._places[name]

    def get(self, name: str) -> bytes | None:
        with self.lock:
            place = self._places.get(name)
            return None if place is None else self.memory[place[0] : place[1]].tobytes()

    def delete(self, name: str) -> None:
        with self.lock:
            self._places.pop(name, None)

    def place_of(self, name: str) -> list[int]:
        with self.lock:
            place = self._places.get(name)
            return [] if place is None else [self.address + place[0], place[1] - place[0]]

    def state(self) -> StoreState:
        with self.lock:
            return StoreState(len(self._places), sum(end - start for start, end in self._places.values()))


class Peers:
    """This engine's arena, a thread that tells others what is in it, and the way to theirs."""

    def __init__(self, endpoint: str, num_bytes: int, peers: list[str]) -> None:
        self._arena = Arena(num_bytes)
        self._peers = peers
        self._rests_until: dict[str, float] = {}
        self._name = f"quire-{os.getpid()}-{os.urandom(4).hex()}"
        self._agent = nixl_agent(
            self._name, nixl_agent_config(sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT, backends=["UCX"])
        )
        self._landing = np.zeros(_LANDING_BYTES, dtype=np.uint8)
        for memory in (self._arena.memory, self._landing):
            self._agent.register_memory([(int(memory.ctypes.data), memory.nbytes, 0, "")], "DRAM")
        self._metadata = self._agent.get_agent_metadata()
        self._known: set[str] = set()
        self._reading = threading.Lock()
        self._is_closed = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(endpoint)
        self._thread = threading.Thread(target=self._serve, name="quire-kv-nixl-serve", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------ the five calls

    def exists_many(self, names: list[str]) -> list[bool]:
        found = {name for name in names if self._arena.place_of(name)}
        for peer in self._peers if len(found) < len(names) else ():
            missing = [name for name in names if name not in found]
            answer = self._ask(peer, _Question(missing)) if missing else None
            if answer is not None:
                found.update(name for name, place in zip(missing, answer.places, strict=True) if place)
        return [name in found for name in names]

    def get_many(self, names: list[str]) -> list[bytes | None]:
        values = {name: self._arena.get(name) for name in names}
        for peer in self._peers:
            missing = [name for name, value in values.items() if value is None]
            answer = self._ask(peer, _Question(missing)) if missing else None
            if answer is not None:
                there = [(name, place) for name, place in zip(missing, answer.places, strict=True) if place]
                with self._reading:
                    values.update(self._read(answer, there))
        return [values[name] for name in names]

    def put_many(self, values: list[tuple[str, bytes]]) -> None:
        for name, value in values:
            self._arena.put(name, value)

    def delete(self, names: list[str]) -> None:
        """With peers as well: one that was broken would be read again and again."""
        for name in names:
            self._arena.delete(name)
        for peer in self._peers if names else ():
            self._ask(peer, _Question(names, is_delete=True))

    def stat(self) -> StoreState:
        return self._arena.state()

    def close(self) -> None:
        self._is_closed = True
        self._thread.join(2 * _MILLISECONDS / 1000)
        self._socket.close()
        self._context.destroy(linger=0)

    # ------------------------------------------------------------------------------------------ of others

    def _ask(self, peer: str, question: _Question) -> _Answer | None:
        """None: it rests, because it has not answered. That is nobody else's failure, unless it is the only one."""
        if time.monotonic() < self._rests_until.get(peer, 0.0):
            return None
        with self._context.socket(zmq.REQ) as asking:
            asking.linger = 0
            asking.rcvtimeo = asking.sndtimeo = _MILLISECONDS
            asking.connect(f"tcp://{peer}")
            try:
                asking.send(msgspec.msgpack.encode(question))
                return msgspec.msgpack.decode(asking.recv(), type=_Answer)
            except (zmq.Again, msgspec.MsgspecError) as error:
                if len(self._peers) == 1:
                    raise ConnectionError(f"nixl: the peer {peer} does not answer") from error
                self._rests_until[peer] = time.monotonic() + _REST_SECONDS
                return None

    def _read(self, answer: _Answer, there: list[tuple[str, list[int]]]) -> dict[str, bytes]:
        """As many at once as the landing holds."""
        if answer.agent not in self._known:
            self._agent.add_remote_agent(answer.metadata)
            self._known.add(answer.agent)
        values: dict[str, bytes] = {}
        batch: list[tuple[str, list[int]]] = []
        size = 0
        for name, place in there:
            if batch and size + place[1] > _LANDING_BYTES:
                values |= self._read_batch(answer.agent, batch)
                batch, size = [], 0
            if place[1] <= _LANDING_BYTES:
                batch.append((name, place))
                size += place[1]
        return values | (self._read_batch(answer.agent, batch) if batch else {})

    def _read_batch(self, agent: str, batch: list[tuple[str, list[int]]]) -> dict[str, bytes]:
        base = int(self._landing.ctypes.data)
        starts: list[int] = np.cumsum([0, *(size for _, (_, size) in batch)]).tolist()
        local = [(base + start, size, 0) for start, (_, (_, size)) in zip(starts, batch, strict=False)]
        remote = [(address, size, 0) for _, (address, size) in batch]
        handle = self._agent.initialize_xfer(
            "READ", self._agent.get_xfer_descs(local, "DRAM"), self._agent.get_xfer_descs(remote, "DRAM"), agent
        )
        try:
            self._wait(handle, self._agent.transfer(handle))
        finally:
            self._agent.release_xfer_handle(handle)
        return {
            name: self._landing[start : start + size].tobytes()
            for start, (name, (_, size)) in zip(starts, batch, strict=False)
        }

    def _wait(self, handle: Any, state: str) -> None:
        until = time.monotonic() + _SECONDS
        while state == "PROC" and time.monotonic() < until:
            time.sleep(0.0002)
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise ConnectionError(f"nixl: reading from a peer failed ({state})")

    # ------------------------------------------------------------------------------------------ for others

    def _serve(self) -> None:
        while not self._is_closed:
            if not self._socket.poll(100):
                continue
            try:
                question = msgspec.msgpack.decode(self._socket.recv(), type=_Question)
            except msgspec.MsgspecError:
                question = _Question([])
            if question.is_delete:
                for name in question.names:
                    self._arena.delete(name)
            places = [self._arena.place_of(name) for name in question.names]
            self._socket.send(msgspec.msgpack.encode(_Answer(self._name, self._metadata, places)))
