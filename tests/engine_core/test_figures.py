"""The walk-throughs of chapter 3 as golden tests: figures 3.6 to 3.9, with the physical blocks of the text."""

from __future__ import annotations

from quire.messages import Candidates, IntArray, sequence_id_of
from quire.testing.core import CoreUnderTest


def tables(core: CoreUnderTest) -> list[list[int]]:
    return [sequence.block_tables[0].blocks.tolist() for sequence in core.scheduler.running.living_sequences()]


def test_figure_3_6_blocks_on_demand() -> None:
    core = CoreUnderTest(num_blocks=9, block_size=4, free_order=[7, 1, 3, 0, 2, 4, 5, 6, 8], prefix_caching=False)
    core.add(1, list(range(7)), max_tokens=8)
    core.step()
    assert tables(core) == [[7, 1]]  # two logical blocks for seven tokens
    core.step()
    assert tables(core) == [[7, 1]]  # the first generated token fills the last slot
    core.step()
    assert tables(core) == [[7, 1, 3]]  # the second one needs a new block


def test_figure_3_7_two_requests_share_one_pool() -> None:
    core = CoreUnderTest(num_blocks=9, block_size=4, free_order=[7, 1, 5, 2, 3, 8, 0, 4, 6], prefix_caching=False)
    core.add(1, list(range(7)), max_tokens=8)
    core.add(2, list(range(20, 27)), max_tokens=8)
    for _ in range(3):
        core.step()
    assert tables(core) == [[7, 1, 3], [5, 2, 8]]  # neighbours in the table need not be neighbours in memory


def test_figure_3_8_parallel_sampling_shares_the_prompt() -> None:
    core = CoreUnderTest(num_blocks=9, block_size=4, free_order=[7, 1, 3, 0, 2, 4, 5, 6, 8], prefix_caching=False)
    core.add(1, list(range(7)), max_tokens=8, n=2, temperature=1.0)
    core.step()
    assert tables(core) == [[7, 1], [7, 1]]
    assert [core.pool.count(block) for block in (7, 1)] == [2, 2]
    core.step()
    # A1 writes first and copies block 1 to block 3; then A2 holds block 1 alone and writes in place
    assert sorted(tables(core)) == [[7, 1], [7, 3]]
    assert [core.pool.count(block) for block in (7, 1, 3)] == [2, 1, 1]
    assert core.manager.num_copied_blocks == 1
    core.run()
    assert core.pool.num_held == 0


def test_waste_is_less_than_a_block_a_sequence() -> None:
    core = CoreUnderTest(num_blocks=64, block_size=16, prefix_caching=False)
    for request in range(4):
        core.add(request, list(range(5 + 9 * request)), max_tokens=20)
    while core.core.has_work:
        core.step()
        for sequence in core.scheduler.running.living_sequences():
            slots = 16 * len(sequence.block_tables[0])
            assert 0 <= slots - sequence.num_computed_tokens < 16


class ScriptedBeams:
    """Four beams whose continuations follow a table, so that they branch as in the figure."""

    def __init__(self, free_order: list[int]) -> None:
        self.core = CoreUnderTest(num_blocks=len(free_order), block_size=1, prefix_caching=False, free_order=free_order)
        self.core.executor._candidates = self._candidates  # type: ignore[method-assign]
        self.likely: dict[tuple[int, ...], list[int]] = {}
        self.core.beam(1, [40], 4, max_tokens=10)

    def step(self, likely: dict[tuple[int, ...], list[int]]) -> dict[tuple[int, ...], list[int]]:
        """One step after which these outputs go on with these tokens; the block table of each output."""
        self.likely = likely
        self.core.step()
        return {
            tuple(sequence.token_ids(1, sequence.num_total_tokens).tolist()): sequence.block_tables[0].blocks.tolist()
            for sequence in self.core.scheduler.running.living_sequences()
        }

    def hand_out_next(self, block_by_output: dict[tuple[int, ...], int]) -> None:
        """The beam with this output gets this block next, so that the numbers are those of the figure."""
        order = [block_by_output[self._output(row)] for row in self.core.scheduler.running.rows_in_order().tolist()]
        free = self.core.pool._free
        assert set(order) <= set(free)
        free[:] = [block for block in free if block not in order] + order[::-1]

    def _output(self, row: int) -> tuple[int, ...]:
        return tuple(self.core.rows.tokens[row, 1 : self.core.rows.num_total[row]].tolist())

    def _candidates(self, rows: IntArray) -> dict[int, Candidates]:
        found = {}
        for row in rows.tolist():
            tokens = self.likely.get(self._output(row), [])
            others = [token for token in range(30, 40) if token not in tokens]
            logprobs = [-1.0] * len(tokens) + [-100.0] * len(others)
            found[row] = Candidates([*tokens, *others], logprobs)
        return found


def test_figure_3_9_beam_search_shares_and_frees_blocks() -> None:
    beams = ScriptedBeams(list(range(60)))
    # the prompt is block 0; of four beams two go on, and one of these branches after its third block
    beams.step({(): [1, 2, 3, 4]})
    beams.hand_out_next({(1,): 1, (2,): 2, (3,): 50, (4,): 51})
    beams.step({(1,): [5, 8, 9], (2,): [6]})
    beams.hand_out_next({(1, 5): 3, (1, 8): 52, (1, 9): 53, (2, 6): 4})
    beams.step({(1, 5): [10, 11, 12], (2, 6): [13]})
    beams.hand_out_next({(1, 5, 10): 5, (1, 5, 11): 6, (1, 5, 12): 7, (2, 6, 13): 8})
    shared = beams.step({(1, 5, 11): [20, 21], (1, 5, 12): [22, 23]})
    # candidates 1 and 2 have two children each, which share all four blocks; 0 and 3 are gone; blocks 2, 4, 5, 8 free
    assert shared == {
        (1, 5, 11, 20): [0, 1, 3, 6],
        (1, 5, 11, 21): [0, 1, 3, 6],
        (1, 5, 12, 22): [0, 1, 3, 7],
        (1, 5, 12, 23): [0, 1, 3, 7],
    }
    pool = beams.core.pool
    assert [pool.count(block) for block in (0, 1, 3, 6, 7)] == [4, 4, 4, 2, 2]
    assert {2, 4, 5, 8} <= set(pool.free_blocks)
    beams.hand_out_next({(1, 5, 11, 20): 9, (1, 5, 11, 21): 10, (1, 5, 12, 22): 11, (1, 5, 12, 23): 12})
    after = beams.step({output: [25] for output in shared})
    assert sorted(after.values()) == [[0, 1, 3, 6, 9], [0, 1, 3, 6, 10], [0, 1, 3, 7, 11], [0, 1, 3, 7, 12]]
    assert beams.core.manager.num_copied_blocks == 0  # every block was full when it was shared
    # what every output begins with was shown as soon as it was certain
    assert [beams.core.tokens[sequence_id_of(1, output)] for output in range(4)] == [[1, 5]] * 4


def test_a_fork_copies_at_most_one_block() -> None:
    core = CoreUnderTest(num_blocks=200, block_size=16, max_model_len=128)
    core.beam(1, list(range(20)), 4, max_tokens=60)
    core.beam(2, list(range(7)), 6, max_tokens=60)
    core.run()
    work = core.executor.work
    assert 0 < work.num_copied_blocks <= work.num_forks
