"""The ways in which people type the same request: capitals, missing marks, a polite word."""

import random

OPENINGS = ("Please ", "Can you ", "Could you ", "Hey, ", "Now ", "Ok, ", "Please, ")
COMMAND_OPENINGS = frozenset({"Can you ", "Could you "})
# "Could you once upon a time" is nothing that anybody says.
NO_COMMANDS = ("A ", "I ", "Once ", "Number ", "JSON", "Weather ", "Time", "Light ", "{")


def vary(rng: random.Random, template: str, *, polite: bool = True) -> str:
    """Change the wrapping of a template. Slots are filled afterwards, so that values keep their case."""
    text = template
    is_question = text.endswith("?")
    if polite and not is_question and not text.startswith(NO_COMMANDS) and rng.random() < 0.15:
        opening = rng.choice(OPENINGS)
        text = opening + lower_first(text)
        if opening in COMMAND_OPENINGS:
            text = text.removesuffix(".") + "?"
    roll = rng.random()
    if roll < 0.15:
        text = text.lower()
    elif roll < 0.25:
        text = lower_first(text)
    roll = rng.random()
    if roll < 0.3:
        text = text.rstrip(".?!")
    elif roll < 0.33 and not is_question:
        text = text.rstrip(".") + "!"
    return text


def lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
