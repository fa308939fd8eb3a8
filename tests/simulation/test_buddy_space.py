"""Pieces of powers of two."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.simulation.baselines.buddy_space import BuddySpace, power_of_two


@pytest.mark.parametrize(("number", "power"), [(1, 1), (2, 2), (3, 4), (25, 32), (128, 128), (129, 256)])
def test_the_next_power_of_two(number, power):
    assert power_of_two(number) == power


def test_a_space_is_the_powers_of_two_of_which_it_is_the_sum():
    space = BuddySpace(13)
    assert [space.take(size) for size in (8, 4, 1, 1)] == [0, 8, 12, None]


def test_halves_are_joined_again():
    space = BuddySpace(8)
    first, second = space.take(2), space.take(2)
    assert (first, second) == (0, 2)
    # free are the pieces 4..7, so there is one of 4 and none of 8
    assert (space.num_pieces(4), space.num_pieces(8)) == (1, 0)
    space.give_back(second, 2)
    space.give_back(first, 2)
    assert space.take(8) == 0


def test_free_blocks_that_no_piece_has():
    space = BuddySpace(8)
    pieces = [space.take(1) for _ in range(8)]
    for start in pieces[::2]:
        space.give_back(start, 1)
    assert space.num_free == 4
    assert space.take(2) is None


@given(st.integers(1, 70), st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60))
def test_pieces_are_apart_and_nothing_is_lost(num_blocks, steps):
    space = BuddySpace(num_blocks)
    taken: list[tuple[int, int]] = []
    for is_take, number in steps:
        if is_take:
            size = 1 << number
            there = space.num_pieces(size)
            start = space.take(size)
            assert (start is None) == (there == 0)
            if start is not None:
                assert start % size == 0
                taken.append((start, size))
        elif taken:
            space.give_back(*taken.pop(number % len(taken)))
        blocks = [block for start, size in taken for block in range(start, start + size)]
        assert len(set(blocks)) == len(blocks)
        assert space.num_free == num_blocks - len(blocks)
    for piece in taken:
        space.give_back(*piece)
    assert space.num_pieces(1) == num_blocks
    assert space.take(1 << (num_blocks.bit_length() - 1)) is not None
