"""Who keeps the ranks of another machine: starts them, tells the core what they do, and ends with it.

    core's machine                                       another one
      core, rank 0 <--- decisions, answers (keys) ---> rank 2, rank 3      children of the keeper
        RayPlacement <------- sight, ten a second ------- Keeper           an actor of Ray

Ray starts it and says when it is gone; what the core and the ranks have to say to each other does not go through it. It
ends with the core's connection to Ray, and its children with it.
"""

from __future__ import annotations

import io
import logging
import selectors
import threading

import msgspec
import zmq

from quire.config import WorkerConfig
from quire.engine_core.executor.child_placement import ChildPlacement
from quire.engine_core.executor.keyed_channel import KeyedAddress, connected
from quire.engine_core.executor.placement import Sight
from quire.errors import EngineError
from quire.processes.documents import read_document
from quire.version import __version__

# more often than the core looks, so that it sees what is
_TELL_SECONDS = 0.1
logger = logging.getLogger(__name__)


class KeeperDocument(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a keeper is told when it starts. It holds keys: it goes to Ray and nowhere else."""

    version: str
    config: WorkerConfig
    # of this machine
    ranks: list[int]
    host_ip: str
    # for each of them, to the core
    addresses: dict[int, KeyedAddress]
    # for what is seen of them
    sight: KeyedAddress
    host: int
    log_level: int = logging.WARNING


class HostSight(msgspec.Struct, array_like=True):
    """What a keeper tells."""

    host: int
    sight: Sight


class Keeper:
    def __init__(self, document: bytes) -> None:
        told = read_document(io.BytesIO(document), KeeperDocument)
        if told.version != __version__:
            raise EngineError(
                f"version={told.version}: the machine {told.host_ip} has Quire {__version__}. Install the same on all."
            )
        logging.getLogger("quire").setLevel(told.log_level)
        self._placement = ChildPlacement(told.config, told.ranks, told.addresses, told.host_ip)
        self._ending = threading.Event()
        threading.Thread(target=self._tell, args=(told,), name="quire-keeper", daemon=True).start()

    def pids(self) -> dict[int, int]:
        return {rank.number: rank.process.pid for rank in self._placement.ranks}

    def wait_for_end(self) -> dict[int, str]:
        """Which ranks have ended, and how: as soon as there is one."""
        with selectors.DefaultSelector() as selector:
            for rank in self._placement.ranks:
                selector.register(rank.process.end_descriptor, selectors.EVENT_READ, rank)
            ended = [key.data for key, _ in selector.select()]
        return {rank.number: rank.process.how_it_ended() for rank in ended}

    def end(self) -> None:
        self._ending.set()
        self._placement.close()

    def _tell(self, told: KeeperDocument) -> None:
        socket = connected(zmq.PUSH, told.sight)
        while not self._ending.wait(_TELL_SECONDS):
            socket.send(msgspec.msgpack.encode(HostSight(told.host, self._placement.look())), zmq.NOBLOCK)
