"""Conversations to text, through the same chat template that ships with the checkpoint."""

import json
from functools import cache
from pathlib import Path

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from training.example import Message, Tool

TEMPLATE = Path(__file__).with_name("chat_template.jinja")


@cache
def template() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def render(messages: list[Message], tools: list[Tool] | None, *, add_generation_prompt: bool = False) -> str:
    return template().render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt)
