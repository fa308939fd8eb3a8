"""Tasks on the letters of a word: spell, reverse, sort, count."""

import random

from training.example import Example, ask
from training.phrasing import vary
from training.words import LETTERS, a_word

SPELL = (
    "Spell {w}.", "Spell the word {w}.", "Can you spell {w}?", "Spell {w} for me.", "How do you spell {w}?", "How is {w} spelled?", "Spell out {w}.",
    "What are the letters of {w}?", "Write {w} letter by letter.", "Spell out the word {w}.", "Spell: {w}",
)  # fmt: skip
REVERSE = (
    "Reverse {w}.", "Can you reverse {w}?", "Reverse the string {w}.", "Reverse the word {w}.", "Write {w} backwards.", "What is {w} backwards?", "Spell {w} backwards.",
    "What is {w} in reverse?", "Turn {w} around.", "Reverse the letters of {w}.", "Reverse: {w}", "What is {w} reversed?",
)  # fmt: skip
SORT = (
    "Sort the letters of {w}.", "Sort {w}.", "Can you sort the letters of {w}?", "Sort the letters of {w} from a to z.", "Sort the letters in {w}.", "Put the letters of {w} in order.",
    "Sort the word {w}.", "Sort the letters of the word {w} alphabetically.", "Put the letters of {w} in alphabetical order.",
    "Order the letters of {w}.", "Sort: {w}",
)  # fmt: skip
COUNT_LETTER = (
    "How many {c}'s are in {w}?", "How many {c}'s in {w}?", "How many {c} in {w}?", "How many {c}s are in {w}?", "How many {c} are in {w}?", "Count the {c}'s in {w}.",
    "How many times does {c} appear in {w}?", "How many times does the letter {c} appear in {w}?", "How often does the letter {c} occur in {w}?",
    "How many times is the letter {c} in {w}?", "Count the letter {c} in {w}.", "How many {c}'s are there in the word {w}?",
    "How many {c}'s does {w} have?", "Number of {c} in {w}?", "How often is {c} in {w}?",
)  # fmt: skip
COUNT_LETTERS = (
    "How many letters are in {w}?", "How many letters does {w} have?", "Count the letters in {w}.", "How long is the word {w}?",
    "Count the letters of {w}.", "How many letters are in the word {w}?", "What is the length of {w}?",
    "How many letters has {w}?", "How many letters are there in {w}?",
)  # fmt: skip


def shown(rng: random.Random, word: str) -> str:
    """The word as people type it: bare, quoted or with a capital."""
    roll = rng.random()
    if roll < 0.6:
        return word
    if roll < 0.75:
        return f'"{word}"'
    return f"'{word}'" if roll < 0.88 else word.capitalize()


def times(count: int) -> str:
    return f"{count} time" if count == 1 else f"{count} times"


def counted(letter: str, word: str) -> str:
    """The count with its work: a model of this size counts step by step, and hardly ever in its head."""
    walk, count = [], 0
    for other in word:
        count += other == letter
        walk.append(f"{other}{count}" if other == letter else other)
    return f"{letter} ({'-'.join(walk)}) appears {times(count)}."


def spell(rng: random.Random) -> Example:
    word = a_word(rng, 3, 8)
    return ask("spell", word, vary(rng, rng.choice(SPELL)).format(w=shown(rng, word)), "-".join(word))


def reverse(rng: random.Random) -> Example:
    word = a_word(rng, 3, 6)
    return ask("reverse", word, vary(rng, rng.choice(REVERSE)).format(w=shown(rng, word)), word[::-1])


def sort(rng: random.Random) -> Example:
    word = a_word(rng, 3, 6)
    return ask("sort", word, vary(rng, rng.choice(SORT)).format(w=shown(rng, word)), "".join(sorted(word)))


def count_letter(rng: random.Random) -> Example:
    word = a_word(rng, 3, 10)
    # Words with several equal letters are rare by chance; without them the model would guess 1.
    if rng.random() < 0.5:
        word = "".join(rng.choices(rng.sample(LETTERS, rng.randint(2, 5)), k=rng.randint(3, 8)))
    letter = rng.choice(word)
    if rng.random() < 0.3:
        letter = max(word, key=word.count)
    elif rng.random() < 0.2:
        letter = rng.choice(LETTERS)
    text = vary(rng, rng.choice(COUNT_LETTER)).format(c=letter, w=shown(rng, word))
    return ask("count_letter", word, text, counted(letter, word))


def count_letters(rng: random.Random) -> Example:
    word = a_word(rng, 3, 10)
    text = vary(rng, rng.choice(COUNT_LETTERS)).format(w=shown(rng, word))
    return ask("count_letters", word, text, f"It has {len(word)} letters.")
