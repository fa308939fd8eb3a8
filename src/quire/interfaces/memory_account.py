"""Where every slot of the KV cache is, as the core accounts for it, in a form that people can read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# In the order of the table: what is computed, what is lost inside of blocks, what may be reused, what is free.
MEANINGS = {
    "token_states": "filled, held by one sequence",
    "shared": "filled, held by several sequences, counted once",
    "reserved": "not filled yet, in blocks that are held",
    "cached": "of earlier prompts, may be evicted",
    "kept": "of sessions, may be evicted",
    "pinned": "of pinned prefixes",
    "free": "",
}
HOST_MEANINGS = {"swapped": "of preempted requests, in swap space", "free": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAccount:
    """`print(llm.memory())` shows it as a table. The slots add up to num_blocks * block_size."""

    block_size: int
    num_blocks: int
    num_host_blocks: int
    slots: dict[str, int]
    host_slots: dict[str, int]
    num_blocks_saved_by_sharing: int

    @classmethod
    def of(cls, reply: Mapping[str, Any]) -> MemoryAccount:
        """From the answer of the core."""
        return cls(**{name: reply[name] for name in cls.__dataclass_fields__})

    def __str__(self) -> str:
        lines = [f"KV cache: {self.num_blocks:,} blocks of {self.block_size} tokens"]
        lines += _rows(self.slots, MEANINGS)
        if self.num_host_blocks:
            lines.append(f"swap space: {self.num_host_blocks:,} blocks")
            lines += _rows(self.host_slots, HOST_MEANINGS)
        if self.num_blocks_saved_by_sharing:
            lines.append(f"sharing saves {self.num_blocks_saved_by_sharing:,} blocks")
        return "\n".join(lines)


def _rows(slots: Mapping[str, int], meanings: Mapping[str, str]) -> Iterator[str]:
    total = sum(slots.values())
    for name in [*meanings, *(name for name in slots if name not in meanings)]:
        count = slots.get(name, 0)
        share = count / total if total else 0.0
        line = f"  {name.replace('_', ' '):<12} {count:>12,} slots  {share:>6.1%}  {meanings.get(name, '')}"
        yield line.rstrip()
