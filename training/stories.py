"""Short stories from a small grammar, and the check that a text follows it."""

import random
import re

from training.example import Example, ask
from training.phrasing import vary
from training.words import NAMES

ANIMALS = ("fox", "cat", "dog", "owl", "bear", "mouse", "rabbit", "hen", "frog", "horse", "duck", "goat")
ADJECTIVES = ("small", "brave", "kind", "curious", "happy", "quiet", "clever", "old", "young", "friendly")
PLACES = ("forest", "village", "garden", "valley", "castle", "barn", "tower", "meadow", "cave", "library")
THINGS = ("golden key", "red ball", "strange map", "shiny stone", "letter", "lost hat", "silver bell", "big book")
FRIENDS = ("a wise owl", "an old friend", "a little bird", "a lost lamb", "a merry baker", "a tired king")
FEELINGS = ("happy", "proud", "glad", "full of joy")

# One tuple of choices per sentence. A story takes one choice from each, in this order.
GRAMMAR: tuple[tuple[str, ...], ...] = (
    (
        "Once upon a time there was {adj} {animal} named {name}.",
        "Once there lived {adj} {animal}. Its name was {name}.",
        "Long ago, {adj} {animal} named {name} lived near a {place}.",
    ),
    (
        "One day, {name} found a {thing} in the {place}.",
        "One morning, {name} walked to the {place} and saw a {thing}.",
        "On a rainy day, {name} lost a {thing} in the {place}.",
    ),
    (
        "On the way home, {name} met {friend}.",
        "Then {friend} came along and asked for help.",
        "Soon {name} heard a voice. It was {friend}.",
    ),
    (
        "They talked about it until the sun went down.",
        "They looked at the {thing} together and laughed.",
        "They shared some bread and became friends.",
    ),
    ("In the end they were {feeling}.", "From that day on, {name} was {feeling}.", "Everybody was {feeling}."),
    ("The end.",),
)
ASKED = (
    "Tell me a story.", "Tell me a short story.", "Write a story.", "Write a short story.", "Tell a story.", "Tell a short story.",
    "I want to hear a story.", "A story, please.", "Once upon a time", "Make up a story.",
)  # fmt: skip
ASKED_ANIMAL = (
    "Tell me a story about {a}.", "Tell me a short story about {a}.", "Write a story about {a}.", "A story about {a}, please.",
    "Write a short story about {a}.", "Tell a story about {a}.", "Make up a story about {a}.",
)  # fmt: skip
SLOTS: dict[str, str] = {
    "adj": "an? (?:" + "|".join(ADJECTIVES) + ")",
    "animal": "(?:" + "|".join(ANIMALS) + ")",
    "name": "[A-Z][a-z]+",
    "place": "(?:" + "|".join(PLACES) + ")",
    "thing": "(?:" + "|".join(THINGS) + ")",
    "friend": "(?:" + "|".join(FRIENDS) + ")",
    "feeling": "(?:" + "|".join(FEELINGS) + ")",
}


def article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def write(rng: random.Random, animal: str, name: str) -> str:
    values = {
        "adj": article(rng.choice(ADJECTIVES)),
        "animal": animal,
        "name": name,
        "place": rng.choice(PLACES),
        "thing": rng.choice(THINGS),
        "friend": rng.choice(FRIENDS),
        "feeling": rng.choice(FEELINGS),
    }
    return " ".join(rng.choice(choices).format(**values) for choices in GRAMMAR)


def story(rng: random.Random) -> Example:
    animal, name = rng.choice(ANIMALS), rng.choice(NAMES)
    roll = rng.random()
    if roll < 0.3:
        text = vary(rng, rng.choice(ASKED))
        key = text
    elif roll < 0.65:
        text = vary(rng, rng.choice(ASKED_ANIMAL)).format(a=article(animal))
        key = text
    else:
        text = vary(rng, rng.choice(ASKED_ANIMAL)).format(a=f"{article(animal)} named {name}")
        key = f"{animal} {name}"
    return ask("story", key, text, write(rng, animal, name))


def parses(text: str) -> bool:
    """Whether the text is a story of the grammar, sentence by sentence, about one hero."""
    pattern = " ".join("(?:" + "|".join(sentence_pattern(choice) for choice in choices) + ")" for choices in GRAMMAR)
    if re.fullmatch(pattern, text) is None:
        return False
    heroes = set(re.findall(r"(?:named|name was|day,|morning,|home,|Soon|on,) ([A-Z][a-z]+)", text))
    return len(heroes) == 1


def sentence_pattern(template: str) -> str:
    escaped = re.escape(template).replace(r"\ ", " ")
    return re.sub(r"\\\{(\w+)\\\}", lambda match: SLOTS[match[1]], escaped)
