"""When an answer counts as right: equal text, equal JSON, equal tool calls, or a story that follows the grammar."""

import json
import re
from typing import Any

from training.example import Example
from training.render import render
from training.stories import ANIMALS, parses

TOOL_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


def expected(example: Example) -> str:
    """The last turn as the model should write it."""
    return render([example.messages[-1]], None).removeprefix("<|assistant|>").removesuffix("<|end|>")


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def calls(text: str) -> list[Any]:
    return [parsed(block) for block in TOOL_CALL.findall(text)]


def is_right(example: Example, answer: str) -> bool:
    wanted = expected(example)
    if example.messages[-1].get("tool_calls"):
        return TOOL_CALL.sub("", answer).strip() == "" and calls(answer) == calls(wanted)
    if example.task == "form":
        return bool(parsed(answer) == json.loads(wanted))
    if example.task == "story":
        question = example.messages[-2]["content"].lower()
        named = [animal for animal in ANIMALS if re.search(rf"\b{animal}\b", question)]
        return parses(answer) and all(animal in answer for animal in named)
    return answer.strip() == wanted
