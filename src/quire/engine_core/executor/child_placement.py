"""Ranks as children of the core's process, which meet in memory that they inherit."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import TYPE_CHECKING

from quire.config import WorkerConfig
from quire.engine_core.executor.keyed_channel import KeyedAddress
from quire.engine_core.executor.placement import Rank, RankSight, Sight
from quire.engine_core.executor.rank_channel import channel_pair
from quire.engine_core.executor.shared_memory import GridMeetings
from quire.processes.child_process import ChildProcess, is_stopped, processor_ticks
from quire.processes.documents import encode_document

if TYPE_CHECKING:
    from quire.worker.crossing import Facts
    from quire.worker.layers.ranks import Ranks

_PROGRAM = "quire.engine_core.executor.rank_process"


class ChildPlacement:
    """The ranks of one machine; by default all of them, and rank 0 among them."""

    def __init__(
        self,
        config: WorkerConfig,
        numbers: list[int] | None = None,
        addresses: dict[int, KeyedAddress] | None = None,
        host_ip: str = "",
    ) -> None:
        """`addresses`: of the core on another machine; `host_ip`: of this one, where there are others. Then ranks have
        to find each other first (joining.py)."""
        from quire.worker.kernels import link_bytes, meeting_bytes

        self._grid = config.grid
        self._numbers = list(range(config.grid.size)) if numbers is None else numbers
        self._addresses = addresses or {}
        self._host_ip = host_ip
        self._meetings = GridMeetings(
            config.grid,
            lambda direction, size: (link_bytes if direction == "stage" else meeting_bytes)(size),
            self._numbers,
        )
        self.ranks: list[Rank] = []
        try:
            with contextlib.ExitStack() as if_one_fails:
                for number in self._numbers:
                    if number > 0:
                        self.ranks.append(self._start(config.of_rank(number)))
                        if_one_fails.callback(self.ranks[-1].end)
                if_one_fails.pop_all()
        finally:
            # inherited by then, or of no use any more
            self._meetings.close_descriptors()

    def _start(self, config: WorkerConfig) -> Rank:
        # imported here: the core itself knows no torch
        from quire.engine_core.executor.rank_process import RankDocument, SharedBytes

        number = config.rank
        channel, theirs = channel_pair()
        memories: dict[str, SharedBytes] = {}
        for direction, meeting in self._meetings.of_rank(number).items():
            assert meeting.descriptor is not None
            memories[direction] = SharedBytes(meeting.descriptor, meeting.num_bytes)
        document = RankDocument(
            config=config,
            channel=self._addresses.get(number, theirs),
            memories=memories,
            crossings=self._meetings.crossings_of(number),
            host_ip=self._host_ip,
            log_level=logging.getLogger("quire").getEffectiveLevel(),
        )
        try:
            inherited = (theirs, *(memory.descriptor for memory in memories.values()))
            process = ChildProcess(encode_document(document), [], inherited, program=_PROGRAM)
        finally:
            os.close(theirs)
        return Rank(number, process, channel)

    def ranks_around_first(self, config: WorkerConfig, facts: Facts | None = None) -> Ranks:
        from quire.engine_core.executor.rank_process import ranks_around

        crossings = self._meetings.crossings_of(0)
        return ranks_around(config, self._meetings.of_rank(0), crossings, facts, self._host_ip)

    def num_neighbours(self, rank: int) -> int:
        return len(self._numbers)

    @property
    def has_crossings(self) -> bool:
        return False

    def look(self) -> Sight:
        return Sight(
            {rank.number: self._sight_of(rank) for rank in self.ranks},
            {group: meeting.arrivals(len(group)) for group, meeting in self._meetings.by_group.items()},
            self._meetings.has_lost_others,
        )

    def _sight_of(self, rank: Rank) -> RankSight:
        pid = rank.process.pid
        return RankSight(processor_ticks(pid), is_stopped(pid), self._is_waiting(rank.number))

    def _is_waiting(self, number: int) -> bool:
        """For another stage, or in a sum, where the others show who is to blame."""
        meetings = self._meetings.of_rank(number)
        stage = self._grid.place_of(number).stage
        link = meetings.get("stage")
        return any(one.has_sleepers for one in meetings.values()) or (
            link is not None and link.is_waiting(stage, self._grid.pipeline)
        )

    def abort(self) -> None:
        self._meetings.abort()

    @property
    def is_aborted(self) -> bool:
        return self._meetings.is_aborted

    def close(self) -> None:
        """May be called twice."""
        self.abort()
        for rank in self.ranks:
            rank.end()
        self.ranks.clear()
