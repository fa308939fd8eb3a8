"""Iteration-level scheduling (3.2.3), and a cache policy exchanged without the scheduler noticing (4.2.2)."""

from __future__ import annotations

import hashlib

from quire.engine_core.kv_cache_manager.prefix_cache import PrefixHasher
from quire.engine_core.request import Sequence
from quire.testing.core import CoreUnderTest
from quire.testing.simulator.checking_model import expected_tokens


def test_a_new_request_waits_for_one_step_and_a_finished_one_leaves_after_its_own() -> None:
    core = CoreUnderTest()
    core.add(1, [1, 2, 3], max_tokens=3)
    core.add(2, [4, 5], max_tokens=8)
    core.step()
    core.add(3, [6], max_tokens=2)
    seen = [sorted(sequence_id >> 10 for sequence_id in core.step().sequence_ids.tolist()) for _ in range(4)]
    assert seen == [[1, 2, 3], [1, 2, 3], [2], [2]]


def test_a_step_holds_whole_prompts_and_last_tokens_side_by_side_without_padding() -> None:
    core = CoreUnderTest()
    core.add(1, [1, 2, 3], max_tokens=9)
    core.step()
    core.add(2, list(range(11)), max_tokens=9)
    output = core.scheduler.schedule()
    assert output is not None
    assert sorted(output.num_tokens.tolist()) == [1, 11]
    assert output.num_scheduled_tokens == 12
    core.scheduler.update_from_output(core.executor.execute(output).result())


def test_a_steady_step_sends_two_columns_and_nothing_else() -> None:
    core = CoreUnderTest(block_size=16)
    for number in range(3):
        core.add(number, [number + 1], max_tokens=30)
    for _ in range(4):
        core.step()
    output = core.scheduler.schedule()
    assert output is not None
    assert (output.rows.tolist(), output.num_tokens.tolist()) == ([0, 1, 2], [1, 1, 1])
    changes = (output.forked, output.released, output.admitted, output.progress, output.appended, output.step_data)
    assert not any(changes)
    assert output.block_writes.size == output.block_copies.size == 0
    core.scheduler.update_from_output(core.executor.execute(output).result())


class WordHasher(PrefixHasher):
    """Another name for the same content: SHA-256 over all tokens instead of a keyed chain."""

    def hashes(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        tokens = sequence.token_ids(0, num_blocks * self.block_size)
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        return [hashlib.sha256(tokens[:end].tobytes()).digest() for end in ends]


def test_the_naming_of_contents_can_be_exchanged() -> None:
    hits = []
    for hasher in (PrefixHasher(4), WordHasher(4)):
        core = CoreUnderTest(block_size=4)
        core.manager._hasher = hasher
        prompt = list(range(14))
        for number in range(2):
            core.add(number, prompt, max_tokens=6)
            core.run()
            assert core.tokens[number << 10] == expected_tokens(prompt, 6, vocab_size=50)
        hits.append(core.manager.num_hit_tokens)
    assert hits == [12, 12]
