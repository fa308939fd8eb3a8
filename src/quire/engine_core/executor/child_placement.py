"""Ranks as children of the core's process, which meet in memory that they inherit."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import TYPE_CHECKING

from quire.config import WorkerConfig
from quire.engine_core.executor.placement import Rank, RankSight, Sight
from quire.engine_core.executor.rank_channel import channel_pair
from quire.engine_core.executor.shared_memory import GridMeetings, SharedMeeting
from quire.processes.child_process import ChildProcess
from quire.processes.documents import encode_document
from quire.processes.process_state import is_stopped, processor_ticks

if TYPE_CHECKING:
    from quire.worker.layers.ranks import Ranks

_PROGRAM = "quire.engine_core.executor.rank_process"


def start_child(config: WorkerConfig, meetings: dict[str, SharedMeeting]) -> Rank:
    """A rank of this machine."""
    # imported here: the core itself knows no torch
    from quire.engine_core.executor.rank_process import RankDocument, SharedBytes

    channel, theirs = channel_pair()
    memories: dict[str, SharedBytes] = {}
    for direction, meeting in meetings.items():
        assert meeting.descriptor is not None
        memories[direction] = SharedBytes(meeting.descriptor, meeting.num_bytes)
    document = RankDocument(
        config=config,
        channel=theirs,
        memories=memories,
        log_level=logging.getLogger("quire").getEffectiveLevel(),
    )
    try:
        inherited = (theirs, *(memory.descriptor for memory in memories.values()))
        process = ChildProcess(encode_document(document), [], inherited, program=_PROGRAM)
    finally:
        os.close(theirs)
    return Rank(config.rank, process, channel)


class ChildPlacement:
    def __init__(self, config: WorkerConfig) -> None:
        from quire.worker.kernels import link_bytes, meeting_bytes

        self._grid = config.grid
        self._meetings = GridMeetings(
            config.grid, lambda direction, size: (link_bytes if direction == "stage" else meeting_bytes)(size)
        )
        self.ranks: list[Rank] = []
        try:
            with contextlib.ExitStack() as if_one_fails:
                for number in range(1, config.grid.size):
                    self.ranks.append(start_child(config.of_rank(number), self._meetings.of_rank(number)))
                    if_one_fails.callback(self.ranks[-1].end)
                if_one_fails.pop_all()
        finally:
            # inherited by then, or of no use any more
            self._meetings.close_descriptors()

    def ranks_around_first(self, config: WorkerConfig) -> Ranks:
        from quire.engine_core.executor.rank_process import ranks_around

        return ranks_around(config, self._meetings.of_rank(0))

    def look(self) -> Sight:
        return Sight(
            {rank.number: self._sight_of(rank) for rank in self.ranks},
            {group: meeting.arrivals(len(group)) for group, meeting in self._meetings.by_group.items()},
        )

    def _sight_of(self, rank: Rank) -> RankSight:
        pid = rank.process.pid
        return RankSight(processor_ticks(pid), is_stopped(pid), self._is_waiting(rank.number))

    def _is_waiting(self, number: int) -> bool:
        """For another stage, or in a sum, where the others show who is to blame."""
        meetings = self._meetings.of_rank(number)
        stage = self._grid.place_of(number).stage
        link = meetings.get("stage")
        sums = [meeting for direction, meeting in meetings.items() if direction != "stage"]
        return any(one.has_sleepers for one in sums) or (
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
