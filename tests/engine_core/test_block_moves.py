"""What a copy still reads is kept until it has run, and no longer; of a row that is let go no entry is left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from quire.engine_core.block_table import BlockTable
from quire.engine_core.kv_cache_manager.block_moves import BlockMoves
from quire.engine_core.kv_cache_manager.block_pool import BlockPool
from quire.engine_core.kv_cache_manager.swap_space import SwapSpace
from quire.engine_core.request import Sequence
from quire.messages import SchedulerOutput, int_array
from quire.testing.core import FULL


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(4)


def taken_from(moves: BlockMoves) -> SchedulerOutput:
    step = SchedulerOutput(step=1)
    moves.take_into(step)
    return step


@pytest.fixture
def moves(pool: BlockPool) -> BlockMoves:
    return BlockMoves(pool)


def test_a_source_is_kept_until_its_copy_has_run(pool: BlockPool, moves: BlockMoves) -> None:
    source, target = pool.allocate(2)
    moves.copy(source, target)
    moves.release(int_array([source]))
    assert pool.num_available == 2
    assert taken_from(moves).block_copies.T.tolist() == [[source, target]]
    assert pool.num_available == 3


def test_a_source_whose_copies_are_all_given_up_is_there_at_once(pool: BlockPool, moves: BlockMoves) -> None:
    """No step may come that would give it back: the one that is to go on may need this very block."""
    source, first, second = pool.allocate(3)
    moves.copy(source, first)
    moves.copy(first, second)  # nothing lies in `first` yet: this one reads the source as well
    moves.release(int_array([source]))
    moves.release(int_array([first]))
    assert pool.num_available == 2, "the second copy still reads it"
    moves.release(int_array([second]))
    assert pool.num_available == 4
    assert taken_from(moves).block_copies.size == 0


def test_what_was_to_be_swapped_into_such_a_source_is_not_moved(pool: BlockPool, moves: BlockMoves) -> None:
    source, target = pool.allocate(2)
    moves.swap_in(host_block=0, block=source)
    moves.copy(source, target)
    moves.release(int_array([source, target]))
    assert pool.num_available == 4
    taken = taken_from(moves)
    assert taken.swapped_in.size == taken.block_copies.size == 0


def test_of_a_row_that_is_let_go_no_entry_is_left(moves: BlockMoves) -> None:
    moves.write_one_each(int_array([0, 1, 2]), [5, 5, 6], [10, 11, 12])
    moves.write(0, 1, 6, [13, 14])
    moves.write(0, 2, 7, [15])
    moves.drop_writes(1)
    moves.drop_writes(3)
    moves.write(0, 1, 0, [16])
    assert taken_from(moves).block_writes.T.tolist() == [[0, 0, 5, 10], [0, 2, 6, 12], [0, 2, 7, 15], [0, 1, 0, 16]]
    moves.drop_writes(1)
    assert taken_from(moves).block_writes.shape == (4, 0)


def test_a_host_block_that_is_read_in_this_step_is_not_filled_in_it(pool: BlockPool, moves: BlockMoves) -> None:
    """Blocks go out before others come in, so who gives way now must not go where somebody comes from."""
    swap = SwapSpace(1, pool, moves)
    (block,) = pool.allocate(1)
    sequence = SimpleNamespace(num_computed_tokens=4, block_tables=[BlockTable([block])], host_tables=[])
    request: Any = SimpleNamespace(sequences={0: sequence})
    swap.swap_out(request, [FULL], block_size=4)
    taken_from(moves)
    swap.settle()
    ((host_block,),) = sequence.host_tables
    moves.swap_in(host_block, block)
    swap.free(cast(Sequence, sequence))
    assert not swap.has_room_for(1)
    assert swap.num_used == 0, "nobody holds it, also if no step comes"
    swap.check_invariants([])
    taken_from(moves)
    swap.settle()
    assert swap.has_room_for(1)
