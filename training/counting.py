"""Counting items of a list, and counting up and down."""

import random

from training.example import Example, ask
from training.phrasing import vary
from training.words import NAMES, WORDS, random_word

ITEMS = (
    "How many items are in this list: {x}?", "How many words are here: {x}?", "Count the items: {x}", "Count these: {x}.",
    "How many things are in the list {x}?", "Count the words: {x}", "How many items are there: {x}?",
    "How many items: {x}", "Count the items in this list: {x}.",
)  # fmt: skip
UP = (
    "Count from {a} to {b}.", "Count up from {a} to {b}.", "Count from {a} up to {b}.", "List the numbers from {a} to {b}.",
    "Write the numbers from {a} to {b}.", "Say the numbers {a} to {b}.", "Give me the numbers from {a} to {b}.",
)  # fmt: skip
UP_FROM_ONE = ("Count to {b}.", "Count up to {b}.", "Can you count to {b}?")
DOWN = (
    "Count down from {a} to {b}.", "Count backwards from {a} to {b}.", "Count from {a} down to {b}.",
)  # fmt: skip


def count_items(rng: random.Random) -> Example:
    count = rng.randint(1, 8)
    source = NAMES if rng.random() < 0.2 else WORDS
    items = [random_word(rng, 3, 5) if rng.random() < 0.15 else rng.choice(source) for _ in range(count)]
    joined = ", ".join(items)
    if count > 1 and rng.random() < 0.25:
        joined = ", ".join(items[:-1]) + f" and {items[-1]}"
    text = vary(rng, rng.choice(ITEMS)).format(x=joined)
    answer = "There is 1 item." if count == 1 else f"There are {count} items."
    return ask("count_items", joined, text, answer)


def count_up(rng: random.Random) -> Example:
    # Short counts are drawn more often: where to stop is what must be learned, and it is learned once a count.
    length = min(rng.randint(2, 10), rng.randint(2, 10))
    first = rng.randint(0, 12) if rng.random() < 0.4 else rng.randint(0, 99 - length)
    last = first + length
    if rng.random() < 0.25:
        numbers = range(last, first - 1, -1)
        text = vary(rng, rng.choice(DOWN)).format(a=last, b=first)
    elif first == 1 and rng.random() < 0.5:
        numbers = range(first, last + 1)
        text = vary(rng, rng.choice(UP_FROM_ONE)).format(b=last)
    else:
        numbers = range(first, last + 1)
        text = vary(rng, rng.choice(UP)).format(a=first, b=last)
    return ask("count_up", f"{numbers[0]}..{numbers[-1]}", text, ", ".join(map(str, numbers)) + ".")
