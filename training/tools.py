"""Tool calls in the Hermes format: which tool, which arguments, and the answer after the result."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from training.arithmetic import addition
from training.example import Example, Message, Tool, draw
from training.faq import faq
from training.phrasing import vary
from training.smalltalk import talk
from training.words import CITIES, NAMES, WORDS, a_value, random_word

Arguments = dict[str, Any]
Values = Callable[[random.Random], Arguments]
Reply = Callable[[random.Random, Arguments], tuple[str, str]]

JSON_TYPES = {str: "string", int: "integer", bool: "boolean"}
SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear")
TEXTS = (
    "hello", "good morning", "see you soon", "I am late", "call me", "happy birthday", "dinner is ready", "come home",
    "thank you", "the train is late", "lunch at noon", "I am here",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A tool that people know: how it is described, asked for, and answered."""

    name: str
    description: str
    asked: tuple[str, ...]
    values: Values
    reply: Reply


def weather_reply(rng: random.Random, arguments: Arguments) -> tuple[str, str]:
    sky, degrees = rng.choice(SKIES), rng.randint(-9, 39)
    forms = (
        json.dumps({"sky": sky, "temperature": degrees}), json.dumps({"temperature": degrees, "sky": sky}),
        f"{sky}, {degrees} degrees", json.dumps({"condition": sky, "temperature": degrees}),
    )  # fmt: skip
    return rng.choice(forms), f"The weather in {arguments['city']} is {sky}, {degrees} degrees."


def time_reply(rng: random.Random, arguments: Arguments) -> tuple[str, str]:
    time = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    return rng.choice((time, json.dumps({"time": time}))), f"It is {time} in {arguments['city']}."


def number_reply(rng: random.Random, arguments: Arguments) -> tuple[str, str]:
    total = arguments["a"] + arguments["b"]
    return rng.choice((str(total), json.dumps({"result": total}))), f"The result is {total}."


def done(text: str) -> Reply:
    return lambda rng, _: (rng.choice(("ok", "done", '{"ok": true}', '{"status": "ok"}', "success")), text)


def search_reply(rng: random.Random, _: Arguments) -> tuple[str, str]:
    count = rng.randint(0, 99)
    return rng.choice((f"{count} results", json.dumps({"results": count}))), f"I found {count} results."


KINDS = (
    Kind("get_weather", "Get the weather of a city.",
         ("What is the weather in {city}?", "What's the weather like in {city}?", "Weather in {city}", "How is the weather in {city}?",
          "Tell me the weather in {city}.", "Is it raining in {city}?", "Get the weather for {city}."),
         lambda rng: {"city": a_value(rng, CITIES)}, weather_reply),
    Kind("get_time", "Get the time in a city.",
         ("What time is it in {city}?", "What is the time in {city}?", "Tell me the time in {city}.", "Time in {city}",
          "How late is it in {city}?"),
         lambda rng: {"city": a_value(rng, CITIES)}, time_reply),
    Kind("add", "Add two numbers.",
         ("What is {a} + {b}?", "Add {a} and {b}.", "{a} + {b}", "What is {a} plus {b}?", "Calculate {a} + {b}."),
         lambda rng: {"a": rng.randint(0, 999), "b": rng.randint(0, 999)}, number_reply),
    Kind("search", "Search the web.",
         ("Search for {query}.", "Search the web for {query}.", "Look up {query}.", "Find {query}.", "Google {query}."),
         lambda rng: {"query": " ".join(rng.sample(WORDS, rng.randint(1, 2)))}, search_reply),
    Kind("set_timer", "Set a timer.",
         ("Set a timer for {minutes} minutes.", "Timer for {minutes} minutes", "Start a timer of {minutes} minutes.",
          "Wake me in {minutes} minutes.", "Set a {minutes} minute timer."),
         lambda rng: {"minutes": rng.randint(1, 90)}, done("The timer is set.")),
    Kind("send_message", "Send a message to a person.",
         ("Send a message to {to}: {text}", "Tell {to}: {text}", "Message {to}: {text}", "Write to {to}: {text}",
          "Send {to} the message: {text}"),
         lambda rng: {"to": a_value(rng, NAMES), "text": rng.choice(TEXTS)}, done("The message is sent.")),
    Kind("play_music", "Play a song.",
         ("Play {song}.", "Play the song {song}.", "I want to hear {song}.", "Put on {song}."),
         lambda rng: {"song": " ".join(rng.sample(WORDS, 2))}, done("The song is playing.")),
    Kind("turn_light", "Turn the light of a room on or off.",
         ("Light in the {room} on: {on}", "Turn the light in the {room}, on: {on}", "Set the light of the {room} to on={on}."),
         lambda rng: {"room": rng.choice(("kitchen", "bedroom", "office", "hall")), "on": rng.random() < 0.5},
         done("The light is set.")),
)  # fmt: skip

VERBS = (
    "get",
    "set",
    "find",
    "make",
    "open",
    "read",
    "send",
    "check",
    "list",
    "create",
    "update",
    "delete",
    "run",
    "count",
)
NOUNS = (
    "user",
    "order",
    "file",
    "page",
    "price",
    "ticket",
    "room",
    "task",
    "note",
    "image",
    "report",
    "event",
    "player",
    "item",
)
ARGUMENT_NAMES = (
    "name",
    "id",
    "city",
    "title",
    "count",
    "size",
    "color",
    "date",
    "query",
    "path",
    "level",
    "text",
    "unit",
    "key",
)
CALLS = (
    "Call {f} with {x}.", "Use {f} with {x}.", "Call {f}: {x}", "Please use {f} with {x}.", "Run {f} with {x}.", "Use the tool {f} with {x}.",
)  # fmt: skip


def tool(name: str, description: str, arguments: Arguments) -> Tool:
    properties = {key: {"type": JSON_TYPES[type(value)]} for key, value in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def call_text(name: str, arguments: Arguments) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def call(name: str, arguments: Arguments) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def made_up(rng: random.Random) -> tuple[Tool, Arguments, str]:
    """A tool that exists nowhere, so that name and arguments must be read from the prompt."""
    verb = rng.choice(VERBS) if rng.random() < 0.7 else random_word(rng, 3, 6)
    noun = rng.choice(NOUNS) if rng.random() < 0.7 else random_word(rng, 3, 6)
    names = rng.sample(ARGUMENT_NAMES, rng.randint(1, 2))
    arguments: Arguments = {
        name: rng.randint(0, 999) if rng.random() < 0.4 else a_value(rng, WORDS).lower() for name in names
    }
    mark = rng.choice((" ", " = ", "=", ": "))
    asked = rng.choice((" and ", ", ")).join(f"{key}{mark}{value}" for key, value in arguments.items())
    name = f"{verb}_{noun}"
    text = vary(rng, rng.choice(CALLS), polite=False).format(f=name, x=asked)
    return tool(name, f"{verb.capitalize()} a {noun}.", arguments), arguments, text


def known_tool(rng: random.Random, kind: Kind) -> Tool:
    return tool(kind.name, kind.description, kind.values(rng))


def others(rng: random.Random, name: str) -> list[Tool]:
    kinds = [kind for kind in KINDS if kind.name != name]
    tools = [known_tool(rng, kind) for kind in rng.sample(kinds, rng.choice((0, 0, 1, 1, 2)))]
    return [*tools, made_up(rng)[0]] if rng.random() < 0.2 else tools


def tool_call(rng: random.Random) -> Example:
    """One question that needs a tool; often with the result and the answer to it."""
    if rng.random() < 0.35:
        chosen, arguments, text = made_up(rng)
        name, reply = chosen["function"]["name"], done("It is done.")
    else:
        kind = rng.choice(KINDS)
        arguments = kind.values(rng)
        shown = {key: as_text(value) for key, value in arguments.items()}
        text = vary(rng, rng.choice(kind.asked)).format(**shown)
        chosen, name, reply = known_tool(rng, kind), kind.name, kind.reply
    tools = [chosen, *others(rng, name)]
    rng.shuffle(tools)
    key = json.dumps([name, arguments])
    messages: list[Message] = [{"role": "user", "content": text}]
    if rng.random() < 0.45:
        result, answer = reply(rng, arguments)
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call(name, arguments)]},
            {"role": "tool", "content": result},
            {"role": "assistant", "content": answer},
        ]
        return Example("tool_answer", key, messages, tools)
    messages.append({"role": "assistant", "content": "", "tool_calls": [call(name, arguments)]})
    return Example("tool_call", key, messages, tools)


def two_calls(rng: random.Random) -> Example:
    """The same tool for two cities: two calls in one answer."""
    kind = rng.choice(KINDS[:2])
    cities = [a_value(rng, CITIES), a_value(rng, CITIES)]
    text = vary(rng, rng.choice(kind.asked)).format(city=f"{cities[0]} and {cities[1]}")
    calls = [call(kind.name, {"city": city}) for city in cities]
    messages: list[Message] = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    return Example("tool_two_calls", json.dumps(cities), messages, [known_tool(rng, kind), *others(rng, kind.name)])


def tool_unneeded(rng: random.Random) -> Example:
    """Tools are there, but the question does not need them."""
    # What is held out elsewhere must not slip in through this door.
    example = draw(rng.choice((faq, faq, talk, addition)), rng, held_out=False)
    tools = others(rng, "add") or [known_tool(rng, KINDS[0])]
    return Example("tool_unneeded", f"{example.task}:{example.key}", example.messages, tools)
