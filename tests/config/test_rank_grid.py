"""Where each rank of a grid stands, and with whom it is in a group."""

import pytest

from quire.config import RankGrid, RankPlace
from quire.engine_core.executor.shared_memory import GridMeetings

GRIDS = [RankGrid(), RankGrid(tensor=4), RankGrid(pipeline=3), RankGrid(tensor=2, context=3, pipeline=2)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_each_rank_has_a_place_of_its_own(grid):
    places = [grid.place_of(rank) for rank in range(grid.size)]
    assert len(set(places)) == grid.size
    assert [grid.rank_at(place.stage, place.context, place.tensor) for place in places] == list(range(grid.size))


def test_the_tensor_coordinate_counts_fastest_and_the_stage_slowest():
    grid = RankGrid(tensor=2, context=2, pipeline=2)
    assert grid.place_of(1) == RankPlace(stage=0, context=0, tensor=1)
    assert grid.place_of(2) == RankPlace(stage=0, context=1, tensor=0)
    assert grid.place_of(4) == RankPlace(stage=1, context=0, tensor=0)
    assert grid.tensor_group(3) == [2, 3]
    assert grid.context_group(3) == [1, 3]
    assert grid.stage_group(3) == [3, 7]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_group_is_the_same_for_each_of_its_members(grid):
    for rank in range(grid.size):
        for group_of in (grid.tensor_group, grid.context_group, grid.stage_group):
            assert all(group_of(member) == group_of(rank) for member in group_of(rank))


def test_each_group_meets_in_a_memory_of_its_own():
    meetings = GridMeetings(RankGrid(tensor=2, pipeline=2), lambda direction, size: 16384)
    try:
        assert set(meetings.by_group) == {(0, 1), (2, 3), (0, 2), (1, 3)}
        assert meetings.of_rank(2) == {"tensor": meetings.by_group[2, 3], "stage": meetings.by_group[0, 2]}
        meetings.by_group[1, 3].abort()
        assert meetings.is_aborted
        assert not meetings.by_group[0, 1].is_aborted
        meetings.abort()
        assert all(meeting.is_aborted for meeting in meetings.by_group.values())
    finally:
        meetings.close_descriptors()
