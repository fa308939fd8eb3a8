"""The breakdown of memory as people read it."""

from quire.interfaces.memory_account import HOST_MEANINGS, MEANINGS, MemoryAccount
from quire.observability.metrics import HOST_STATES, SLOT_STATES
from quire.testing.fake_kept import KEEPING_CORE
from quire.testing.fake_llm import fake_llm

REPLY = {
    "block_size": 16,
    "num_blocks": 100,
    "num_host_blocks": 10,
    "slots": {
        "token_states": 800, "shared": 160, "reserved": 24, "cached": 16, "kept": 0, "pinned": 400, "free": 200,
    },
    "host_slots": {"swapped": 16, "free": 144},
    "num_blocks_saved_by_sharing": 1234,
}  # fmt: skip


def test_a_table_of_shares():
    lines = str(MemoryAccount.of(REPLY)).splitlines()
    assert lines[0] == "KV cache: 100 blocks of 16 tokens"
    assert lines[1].split() == ["token", "states", "800", "slots", "50.0%", "filled,", "held", "by", "one", "sequence"]
    assert [line.split()[0] for line in lines[1:8]] == [name.split("_")[0] for name in MEANINGS]
    assert lines[8] == "swap space: 10 blocks"
    assert lines[9].split()[:4] == ["swapped", "16", "slots", "10.0%"]
    assert lines[-1] == "sharing saves 1,234 blocks"


def test_what_is_not_there_takes_no_line():
    account = MemoryAccount.of(
        {**REPLY, "num_host_blocks": 0, "host_slots": dict.fromkeys(HOST_MEANINGS, 0), "num_blocks_saved_by_sharing": 0}
    )
    assert len(str(account).splitlines()) == 1 + len(MEANINGS)


def test_a_category_that_this_table_does_not_know_is_shown():
    account = MemoryAccount.of({**REPLY, "slots": {**REPLY["slots"], "lent_out": 1600}})
    assert "lent out" in str(account)
    assert "25.0%" in str(account)


def test_table_and_metrics_know_the_same_categories():
    assert tuple(MEANINGS) == SLOT_STATES
    assert tuple(HOST_MEANINGS) == HOST_STATES


def test_an_llm_shows_its_memory():
    with fake_llm(core=KEEPING_CORE) as llm:
        llm.pin_prefix([1] * 40)
        account = llm.memory()
    assert account.slots["pinned"] == 40
    assert sum(account.slots.values()) == account.num_blocks * account.block_size
