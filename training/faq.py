"""Questions about Quire: the entries of faq.toml and the patterns that paraphrase them."""

import random
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from training.example import Example, ask

DEFINE_PATTERNS = (
    "what is {t}", "what's {t}", "explain {t}", "define {t}", "what does {t} mean", "tell me about {t}", "describe {t}",
    "what do you know about {t}", "what is meant by {t}", "{t}", "what exactly is {t}", "explain what {t} is",
    "tell me what {t} is", "do you know what {t} is", "i want to know about {t}", "what is {t} in quire", "what is {t} good for",
    "give me a definition of {t}", "can you explain {t}", "please explain {t}", "in quire, what is {t}",
)  # fmt: skip
QUESTION_PATTERNS = (
    "{q}", "{q}", "please tell me, {q}", "tell me, {q}", "quick question: {q}", "hi, {q}", "hey, {q}", "in quire, {q}",
    "i want to know: {q}", "one question: {q}", "question: {q}", "hello, {q}", "{q}, please", "so, {q}", "{q} in quire",
)  # fmt: skip
ARTICLES = ("a ", "an ", "the ")


@dataclass(frozen=True)
class Entry:
    """One answer and the questions that lead to it."""

    terms: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str


@cache
def entries() -> tuple[Entry, ...]:
    data = tomllib.loads(Path(__file__).with_name("faq.toml").read_text(encoding="utf-8"))
    defined = [Entry((term, *bare(term)), (), answer) for term, answer in data["define"]]
    asked = [Entry((), tuple(part.strip() for part in text.split("|")), answer) for text, answer in data["questions"]]
    return (*defined, *asked)


def bare(term: str) -> tuple[str, ...]:
    """The term without its article, as in "what is block"."""
    return tuple(term.removeprefix(article) for article in ARTICLES if term.startswith(article))


def named(rng: random.Random, question: str) -> str:
    """The questions say "it"; people often say the name."""
    return re.sub(r"\bit\b", "quire", question, count=1) if rng.random() < 0.5 else question


def dress(rng: random.Random, question: str) -> str:
    """Capitals and the question mark, or their absence."""
    if rng.random() < 0.7:
        question = question[:1].upper() + question[1:]
    if rng.random() < 0.7:
        question = question.replace("quire", "Quire")
    command = question.lower().startswith(("explain", "define", "tell me a", "describe", "give", "please explain"))
    return question + (rng.choice((".", "", "")) if command else rng.choice(("?", "?", "?", "")))


def faq(rng: random.Random) -> Example:
    every = entries()
    index = rng.randrange(len(every))
    entry = every[index]
    if entry.terms:
        core = rng.choice(DEFINE_PATTERNS).format(t=rng.choice(entry.terms))
    else:
        core = rng.choice(QUESTION_PATTERNS).format(q=named(rng, rng.choice(entry.questions)))
    # The answer is known from training, so the content that is held out is the wording of the question.
    return ask("faq", core, dress(rng, core), entry.answer)
