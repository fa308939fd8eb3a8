"""Filling a small JSON form from a sentence."""

import json
import random
from collections.abc import Callable

from training.example import Example, ask
from training.phrasing import vary
from training.words import CITIES, COUNTRIES, NAMES, WORDS, a_value

Value = str | int | bool

COLOURS = ("red", "green", "blue", "yellow", "black", "white", "pink", "grey", "brown", "purple", "orange")
JOBS = (
    "baker",
    "teacher",
    "doctor",
    "farmer",
    "pilot",
    "writer",
    "nurse",
    "painter",
    "driver",
    "cook",
    "singer",
    "lawyer",
)

FIELDS: dict[str, Callable[[random.Random], Value]] = {
    "name": lambda rng: a_value(rng, NAMES),
    "age": lambda rng: rng.randint(1, 99),
    "city": lambda rng: a_value(rng, CITIES),
    "country": lambda rng: a_value(rng, COUNTRIES),
    "job": lambda rng: rng.choice(JOBS),
    "colour": lambda rng: rng.choice(COLOURS),
    "color": lambda rng: rng.choice(COLOURS),
    "pet": lambda rng: rng.choice(WORDS[:20]),
    "item": lambda rng: rng.choice(WORDS),
    "quantity": lambda rng: rng.randint(1, 50),
    "price": lambda rng: rng.randint(1, 999),
    "year": lambda rng: rng.randint(1900, 2030),
    "id": lambda rng: rng.randint(1, 999),
    "friend": lambda rng: a_value(rng, NAMES),
    "active": lambda rng: rng.random() < 0.5,
}

LISTED = (
    "Fill the form: {x}", "Fill the form: {x}.", "Fill in the form: {x}", "Fill out this form: {x}.", "Make JSON: {x}",
    "Write JSON with {x}.", "Write this as JSON: {x}", "Give me JSON for {x}.", "Turn this into JSON: {x}",
    "Convert to JSON: {x}", "JSON: {x}", "Fill the JSON form with {x}.", "Fill a form with {x}.", "Make a JSON object with {x}.",
    "Return JSON: {x}",
)  # fmt: skip
SENTENCES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("{name} is {age} years old and lives in {city}.", ("name", "age", "city")),
    ("{name} is {age} and lives in {city}.", ("name", "age", "city")),
    ("My name is {name}, I am {age} years old and I live in {city}.", ("name", "age", "city")),
    ("I am {name}, {age}, from {city}.", ("name", "age", "city")),
    ("{name} is a {job} from {city}.", ("name", "job", "city")),
    ("{name} works as a {job} in {city}.", ("name", "job", "city")),
    ("{name} is {age} years old.", ("name", "age")),
    ("{name} lives in {city}, {country}.", ("name", "city", "country")),
    ("{name} has a {colour} {pet}.", ("name", "colour", "pet")),
)
READ = (
    "{s} Fill the form with {f}.", "Fill the form with {f}: {s}", "{s} Write JSON with {f}.", "Extract {f} as JSON: {s}",
    "{s} Make JSON with {f}.", "{s} Return {f} as JSON.", "JSON with {f}: {s}",
)  # fmt: skip


def as_text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def listed_form(rng: random.Random) -> tuple[str, dict[str, Value]]:
    names = rng.sample(list(FIELDS), rng.randint(2, 4))
    if rng.random() < 0.4:
        names = ["name", *[n for n in names if n != "name"][:3]]
    values = {name: FIELDS[name](rng) for name in names}
    mark = rng.choice((" ", " ", ": ", " = ", " is ", "="))
    separator = rng.choice((", ", ", ", "; ", "\n"))
    parts = [f"{name}{mark}{as_text(value)}" for name, value in values.items()]
    return vary(rng, rng.choice(LISTED)).format(x=separator.join(parts)), values


def sentence_form(rng: random.Random) -> tuple[str, dict[str, Value]]:
    sentence, names = rng.choice(SENTENCES)
    values = {name: FIELDS[name](rng) for name in names}
    asked = ", ".join(names[:-1]) + f" and {names[-1]}"
    text = vary(rng, rng.choice(READ), polite=False).format(s=sentence.format(**values), f=asked)
    return text, values


def form(rng: random.Random) -> Example:
    text, values = listed_form(rng) if rng.random() < 0.65 else sentence_form(rng)
    answer = json.dumps(values)
    return ask("form", answer, text, answer)
