"""Room for who waits: from what kept sequences offer, without loss for nothing and without counting what is kept."""

from __future__ import annotations

import pytest

from quire.engine_core.block_table import Blocks, BlockTable
from quire.testing.core import CoreUnderTest


def with_sessions(number: int, num_blocks: int) -> CoreUnderTest:
    """Sessions of ten blocks each, and so many blocks beside them."""
    core = CoreUnderTest(num_blocks=number * 10 + num_blocks, max_model_len=200, budget=200)
    for handle in range(number):
        core.add(handle, [handle % 50, handle // 50] * 19, max_tokens=3, request={"keep": str(handle)})
        core.run()
    return core


@pytest.mark.parametrize("number", [4, 40])
def test_what_could_be_had_is_known_without_counting_it(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    core = with_sessions(number, num_blocks=12)
    held = BlockTable.held
    tables_read: list[BlockTable] = []

    def counted(table: BlockTable) -> Blocks:
        tables_read.append(table)
        return held(table)

    monkeypatch.setattr(BlockTable, "held", counted)
    assert core.manager.kept.num_blocks_to_give_up() == 10 * number
    assert not tables_read
