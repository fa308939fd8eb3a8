"""The mixture: how often each task is drawn, and how single tasks become conversations."""

import random
from dataclasses import dataclass

from training import arithmetic, counting, faq, forms, letters, smalltalk, stories, tools
from training.example import Example, Maker, Message, Tool, draw

TASKS: dict[str, tuple[Maker, float]] = {
    "addition": (arithmetic.addition, 11),
    "subtraction": (arithmetic.subtraction, 24),
    "spell": (letters.spell, 2),
    "reverse": (letters.reverse, 7),
    "sort": (letters.sort, 14),
    "count_letter": (letters.count_letter, 18),
    "count_letters": (letters.count_letters, 4),
    "count_items": (counting.count_items, 4),
    "count_up": (counting.count_up, 11),
    "form": (forms.form, 10),
    "faq": (faq.faq, 28),
    "tool_call": (tools.tool_call, 11),
    "tool_two_calls": (tools.two_calls, 2),
    "tool_unneeded": (tools.tool_unneeded, 3),
    "story": (stories.story, 3),
    "talk": (smalltalk.talk, 3),
    "unknown": (smalltalk.unknown, 1),
}
MAKERS: list[Maker] = [maker for maker, _ in TASKS.values()]
WEIGHTS: list[float] = [weight for _, weight in TASKS.values()]
PLAIN: tuple[Maker, ...] = (faq.faq, smalltalk.talk, letters.spell, letters.reverse, counting.count_up)

MULTI_TURN = 0.22
SYSTEM = 0.08
RAW = 0.06
SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are Quire.", "Answer briefly.", "You are a helpful assistant. Answer in one sentence.",
    "Be polite.", "You are a small model.", "Answer the question.", "You help people to use Quire.", "Be short and exact.",
    "You are an assistant that can call tools.", "You are a test.", "Think before you answer.",
)  # fmt: skip


@dataclass(frozen=True)
class Document:
    """What one training document holds: a conversation, or a plain text; `given` precedes it and is not learned."""

    messages: list[Message]
    tools: list[Tool] | None = None
    given: str = ""
    text: str | None = None


def single(rng: random.Random) -> Example:
    return draw(rng.choices(MAKERS, WEIGHTS)[0], rng, held_out=False)


def conversation(rng: random.Random, turns: int) -> Document:
    """Several examples in a row. With tools on the table the rest stays plain: a sum could mean a call."""
    examples = [single(rng)]
    has_tools = examples[0].tools is not None
    while len(examples) < turns:
        following = draw(rng.choice(PLAIN), rng, held_out=False) if has_tools else single(rng)
        if following.tools is None:
            examples.append(following)
    rng.shuffle(examples)
    offered = next((example.tools for example in examples if example.tools is not None), None)
    messages = [message for example in examples for message in example.messages]
    if rng.random() < SYSTEM:
        messages = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}, *messages]
    return Document(messages, offered)


def raw_text(rng: random.Random) -> Document:
    """Text without a chat around it, for the plain completion endpoint."""
    roll = rng.random()
    if roll < 0.12:
        return Document([], text=stories.story(rng).messages[-1]["content"])
    if roll < 0.2:
        return Document([], text=faq.faq(rng).messages[-1]["content"])
    example = single(rng)
    while example.tools is not None:
        example = single(rng)
    question, answer = (message["content"] for message in example.messages)
    return Document([], given=f"{question}\n", text=answer)


def document(rng: random.Random) -> Document:
    roll = rng.random()
    if roll < RAW:
        return raw_text(rng)
    return conversation(rng, rng.choice((2, 2, 3)) if roll < RAW + MULTI_TURN else 1)
