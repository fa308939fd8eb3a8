"""What one training conversation is, and which contents are kept for the evaluation only."""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Tool = dict[str, Any]

HELD_OUT_ONE_IN = 10


@dataclass(frozen=True)
class Example:
    """A conversation that ends with the answer. `key` is its content: the split hashes it, not the phrasing."""

    task: str
    key: str
    messages: list[Message]
    tools: list[Tool] | None = None


Maker = Callable[[random.Random], Example]


def is_held_out(task: str, key: str) -> bool:
    """Whether this content belongs to the evaluation. A hash and no list, so that it can never drift."""
    digest = hashlib.blake2b(f"{task}:{key}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def ask(task: str, key: str, question: str, answer: str) -> Example:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Example(task, key, messages)


def draw(maker: Maker, rng: random.Random, *, held_out: bool) -> Example:
    """Draw until the example falls on the wanted side of the split."""
    while True:
        example = maker(rng)
        if is_held_out(example.task, example.key) == held_out:
            return example
