"""Ranks on several machines, which Ray finds, reserves and watches. Nothing of a step goes through Ray.

    bundle of Ray's placement group    the layers of a stage on one machine if it has the cores, else a rank each
    host                               the ranks of one machine: children of the core, or of a keeper (keeper.py)
    group of ranks on one host         shared memory              ... on several: gloo (worker/crossing.py)

Owns the connection to Ray, the reservation, the keepers and the sockets to their ranks.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from quire.config import RankGrid, WorkerConfig
from quire.engine_core.executor.child_placement import ChildPlacement
from quire.engine_core.executor.joining import join_all
from quire.engine_core.executor.keeper import HostSight, Keeper, KeeperDocument
from quire.engine_core.executor.keyed_channel import KeyedAddress, KeyedChannel, KeyedListener
from quire.engine_core.executor.placement import Rank, Sight
from quire.errors import EngineError, OptionError
from quire.processes.documents import encode_document
from quire.version import __version__

if TYPE_CHECKING:
    from quire.worker.layers.ranks import Ranks

# How long the cluster may have no room: a machine that is gone may come back.
_PLACING_SECONDS = 600.0
_SAY_SECONDS = 10.0
# of a keeper, from when Ray has reserved its place
_STARTING_SECONDS = 60.0
_ENDING_SECONDS = 3.0
# Looks, four a second, at which a machine had said nothing new.
_MOST_SILENT_LOOKS = 5
logger = logging.getLogger(__name__)


class KeptProcess:
    """The process of a rank on another machine."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.end_descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._how: str | None = None

    def has_ended(self, how: str) -> None:
        """May be said twice, by any thread."""
        if self._how is None:
            self._how = how
            os.eventfd_write(self.end_descriptor, 1)

    def how_it_ended(self) -> str:
        return self._how or "it has not"

    def close(self) -> None:
        """Its keeper ends it. The descriptor stays: a word of Ray may still come."""


class Host:
    """The ranks of another machine, as the core sees them."""

    def __init__(self, number: int, ip: str, ranks: list[int], keeper: Any) -> None:
        self.number = number
        self.ip = ip
        self.numbers = ranks
        self.keeper = keeper
        self.processes: dict[int, KeptProcess] = {}
        self.sight = Sight()
        self.num_silent_looks = 0

    def is_lost(self, why: str) -> None:
        for process in self.processes.values():
            process.has_ended(why)

    def watch(self) -> None:
        """Has Ray say when a rank has ended, or the keeper, or its machine."""
        self.keeper.wait_for_end.remote().future().add_done_callback(self._hear)

    def _hear(self, future: Any) -> None:
        error = future.exception()
        if error is not None:
            self.is_lost(f"Ray has lost the machine {self.ip}: {type(error).__name__}")
            return
        for number, how in future.result().items():
            self.processes[number].has_ended(how)


class RayPlacement:
    def __init__(self, config: WorkerConfig) -> None:
        self._grid = config.grid
        assert config.host_ip is not None
        self._host_ip = config.host_ip
        self._ray, self._has_connected = _connected()
        self._group: Any = None
        self._listener = KeyedListener(self._host_ip)
        self._ears, self._sight_address = self._listener.invite(zmq.PULL)
        self._hosts: list[Host] = []
        self._own: ChildPlacement | None = None
        self._is_aborted = False
        self.ranks: list[Rank] = []
        # those of them that are on other machines
        self._kept: list[Rank] = []
        try:
            self._place(config)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------------------ as a placement

    def ranks_around_first(self, config: WorkerConfig) -> Ranks:
        own = self._own
        assert own is not None
        return join_all(self.ranks, lambda facts: own.ranks_around_first(config, facts), lambda: self.is_aborted)

    def hosts(self) -> dict[int, list[int]]:
        """The ranks of each machine; 0 is this one."""
        return {0: self._own_numbers, **{host.number: host.numbers for host in self._hosts}}

    def num_neighbours(self, rank: int) -> int:
        return next(len(numbers) for numbers in self.hosts().values() if rank in numbers)

    @property
    def has_crossings(self) -> bool:
        return bool(self._hosts)

    def look(self) -> Sight:
        self._hear_all()
        sight = Sight() if self._own is None else self._own.look()
        for host in self._hosts:
            host.num_silent_looks += 1
            if host.num_silent_looks > _MOST_SILENT_LOOKS and host.processes:
                host.is_lost(f"the machine {host.ip} says nothing any more")
            sight.ranks.update(host.sight.ranks)
            sight.arrivals.update(host.sight.arrivals)
            sight.has_lost_others |= host.sight.has_lost_others
        return sight

    def _hear_all(self) -> None:
        while self._ears.poll(0):
            told = msgspec.msgpack.decode(self._ears.recv(), type=HostSight)
            host = self._hosts[told.host - 1]
            host.sight = told.sight
            host.num_silent_looks = 0

    def abort(self) -> None:
        self._is_aborted = True
        if self._own is not None:
            self._own.abort()

    @property
    def is_aborted(self) -> bool:
        return self._is_aborted or (self._own is not None and self._own.is_aborted)

    def close(self) -> None:
        """May be called twice."""
        self.abort()
        if self._ray is None:
            return
        for rank in self._kept:
            rank.end()
        self._kept.clear()
        self.ranks.clear()
        if self._own is not None:
            self._own.close()
        self._end_keepers()
        self._listener.close()
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        if self._has_connected:
            self._ray.shutdown()
        self._ray = None

    # ------------------------------------------------------------------------------------------ inside

    def _place(self, config: WorkerConfig) -> None:
        """Again and again, as long as Ray gives places on machines that are gone already."""
        end = time.monotonic() + _PLACING_SECONDS
        while True:
            self._reserve(config, end)
            try:
                self._start(config)
                return
            except (self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError) as error:
                if "EngineError" in str(error) or time.monotonic() > end:
                    raise EngineError(f"a machine could not start its ranks: {_last_line(error)}") from error
                logger.warning("a machine could not start its ranks, trying again: %s", _last_line(error))
                self._end_keepers()
                self._ray.util.remove_placement_group(self._group)
                self._group = None
                time.sleep(1.0)

    def _reserve(self, config: WorkerConfig, end: float) -> None:
        """A place for each rank; rank 0's is on this machine."""
        ray = self._ray
        own_node = ray.get_runtime_context().get_node_id()
        self._bundles = _bundles(config.grid, config.num_threads, _most_processors(ray))
        here = {"ray.io/node-id": own_node}
        self._group = ray.util.placement_group(
            [{"CPU": len(ranks) * config.num_threads} for ranks in self._bundles],
            strategy="SPREAD",
            bundle_label_selector=[here if 0 in ranks else {} for ranks in self._bundles],
        )
        while not self._group.wait(_SAY_SECONDS):
            needed = [len(ranks) * config.num_threads for ranks in self._bundles]
            found = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
            what = f"processors for {config.grid.size} ranks ({needed}): Ray has machines with {found}"
            if time.monotonic() > end:
                raise EngineError(f"{what}, or they are taken. Add machines, or lower num_threads.")
            logger.warning("waiting for %s", what)

    def _start(self, config: WorkerConfig) -> None:
        ray = self._ray
        own_node = ray.get_runtime_context().get_node_id()
        ips = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        node_of_bundle = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        by_node: dict[str, list[int]] = {}
        bundle_of_node: dict[str, int] = {}
        for number, ranks in enumerate(self._bundles):
            node = node_of_bundle[number]
            by_node.setdefault(node, []).extend(ranks)
            bundle_of_node.setdefault(node, number)
        channels: dict[int, KeyedChannel] = {}
        for node, numbers in by_node.items():
            if node != own_node:
                self._start_host(config, ips[node], numbers, bundle_of_node[node], channels)
        for host in self._hosts:
            pids = ray.get(host.keeper.pids.remote(), timeout=_STARTING_SECONDS)
            host.processes = {number: KeptProcess(pid) for number, pid in pids.items()}
            host.watch()
        self._own_numbers = by_node[own_node]
        self._own = ChildPlacement(config, self._own_numbers, {}, self._host_ip)
        self._kept = [
            Rank(number, process, channels[number])
            for host in self._hosts
            for number, process in host.processes.items()
        ]
        self.ranks = sorted([*self._own.ranks, *self._kept], key=lambda rank: rank.number)

    def _start_host(
        self, config: WorkerConfig, ip: str, numbers: list[int], bundle: int, channels: dict[int, KeyedChannel]
    ) -> None:
        ray = self._ray
        addresses: dict[int, KeyedAddress] = {}
        for number in numbers:
            socket, addresses[number] = self._listener.invite(zmq.DEALER)
            channels[number] = KeyedChannel(socket)
        document = KeeperDocument(
            version=__version__,
            # processors have other numbers there
            config=dataclasses.replace(config, processors=None),
            ranks=numbers,
            host_ip=ip,
            addresses=addresses,
            sight=self._sight_address,
            host=len(self._hosts) + 1,
            log_level=logging.getLogger("quire").getEffectiveLevel(),
        )
        place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=bundle
        )
        # the reservation has the processors; one call waits for the end while others are answered
        kind = ray.remote(Keeper).options(num_cpus=0, max_concurrency=4, max_restarts=0, scheduling_strategy=place)
        self._hosts.append(Host(len(self._hosts) + 1, ip, numbers, kind.remote(encode_document(document))))

    def _end_keepers(self) -> None:
        ends = [host.keeper.end.remote() for host in self._hosts]
        if ends:
            self._ray.wait(ends, num_returns=len(ends), timeout=_ENDING_SECONDS)
        for host in self._hosts:
            self._ray.kill(host.keeper)
        self._hosts.clear()


def _connected() -> tuple[Any, bool]:
    """Ray, connected to the cluster of this machine, and whether it was not before."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise OptionError(
            "distributed_executor_backend=ray: Ray is not installed. pip install 'quire[ray]', on every machine."
        ) from error
    if ray.is_initialized():
        # whoever has connected this process has plans of its own
        return ray, False
    try:
        ray.init(address="auto", log_to_driver=False, configure_logging=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise OptionError(
            "distributed_executor_backend=ray: no cluster of Ray runs on this machine. Start one (ray start --head "
            "--include-dashboard=false --node-ip-address=...), join the others to it, or name it in RAY_ADDRESS."
        ) from error
    return ray, True


def _bundles(grid: RankGrid, num_threads: int, most_processors: float) -> list[list[int]]:
    """Ranks that are to be on one machine: those that share layers, if any machine has so many processors."""
    of_stage = grid.tensor * grid.context
    stages = [list(range(first, first + of_stage)) for first in range(0, grid.size, of_stage)]
    if of_stage * num_threads <= most_processors:
        return stages
    return [[rank] for ranks in stages for rank in ranks]


def _most_processors(ray: Any) -> float:
    return max(float(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"])


def _last_line(error: BaseException) -> str:
    return str(error).strip().rpartition("\n")[2]
