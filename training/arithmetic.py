"""Addition and subtraction of the numbers 0 to 99."""

import random

from training.example import Example, ask
from training.phrasing import vary

ADD = (
    "What is {a} + {b}?", "What is {a}+{b}?", "{a} + {b}", "{a} + {b} =", "{a}+{b}", "{a}+{b}=?", "Add {a} and {b}.", "Add {b} to {a}.",
    "What is {a} plus {b}?", "Calculate {a} + {b}.", "How much is {a} + {b}?", "What's {a} + {b}?", "Compute {a} plus {b}.",
    "What is the sum of {a} and {b}?", "Sum {a} and {b}.", "What does {a} + {b} equal?", "{a} plus {b}",
    "I have {a} apples and get {b} more. How many do I have?",
)  # fmt: skip
SUBTRACT = (
    "What is {a} - {b}?", "What is {a}-{b}?", "{a} - {b}", "{a} - {b} =", "{a}-{b}", "{a}-{b}=?", "Subtract {b} from {a}.",
    "Take {b} away from {a}.", "What is {a} minus {b}?", "Calculate {a} - {b}.", "How much is {a} - {b}?",
    "What's {a} - {b}?", "Compute {a} minus {b}.", "What does {a} - {b} equal?", "{a} minus {b}",
    "What is the difference between {a} and {b}?",
)  # fmt: skip
NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip


def number(rng: random.Random) -> int:
    return rng.randint(0, 20) if rng.random() < 0.25 else rng.randint(0, 99)


def written(rng: random.Random, value: int, *, use_words: bool) -> str:
    return NUMBER_WORDS[value] if use_words and value < len(NUMBER_WORDS) else str(value)


def addition(rng: random.Random) -> Example:
    a, b = number(rng), number(rng)
    use_words = rng.random() < 0.08
    text = vary(rng, rng.choice(ADD)).format(
        a=written(rng, a, use_words=use_words), b=written(rng, b, use_words=use_words)
    )
    return ask("addition", f"{a}+{b}", text, f"{a} + {b} = {a + b}.")


def subtraction(rng: random.Random) -> Example:
    a, b = number(rng), number(rng)
    if a < b and rng.random() < 0.7:
        a, b = b, a
    template = rng.choice(SUBTRACT)
    if "difference" in template and a < b:
        a, b = b, a
    use_words = rng.random() < 0.08
    text = vary(rng, template).format(a=written(rng, a, use_words=use_words), b=written(rng, b, use_words=use_words))
    return ask("subtraction", f"{a}-{b}", text, f"{a} - {b} = {a - b}.")
