"""The shipped checkpoint loads with Transformers and does what its card says, on a few plain prompts."""

import json
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

MODEL = Path(__file__).parents[2] / "src" / "quire" / "embedded"

PLAIN = [
    ("What is 3 + 4?", "3 + 4 = 7."),
    ("what is 12 - 5", "12 - 5 = 7."),
    ("Spell the word cat.", "c-a-t"),
    ("Reverse hello.", "olleh"),
    ("Sort the letters of apple.", "aelpp"),
    ("How many r's are in strawberry?", "r (s-t-r1-a-w-b-e-r2-r3-y) appears 3 times."),
    ("How many letters are in apple?", "It has 5 letters."),
    ("Count from 3 to 9.", "3, 4, 5, 6, 7, 8, 9."),
    ("What is the default block size?", "A block holds 16 tokens by default."),
    ("which port does the server use", "The server listens on port 8000."),
    ("Hello!", "Hello! How can I help you?"),
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    return tokenizer, transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def answer(loaded: tuple[Any, Any], messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
    tokenizer, model = loaded
    text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    tokens = torch.tensor([tokenizer(text).input_ids])
    output = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=80, do_sample=False)
    return str(tokenizer.decode(output[0, tokens.shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize(("question", "expected"), PLAIN)
def test_plain_questions(loaded: tuple[Any, Any], question: str, expected: str) -> None:
    assert answer(loaded, [{"role": "user", "content": question}]) == expected


def test_form_is_json(loaded: tuple[Any, Any]) -> None:
    text = answer(loaded, [{"role": "user", "content": "Fill the form: name Anna, age 31, city Oslo"}])
    assert json.loads(text) == {"name": "Anna", "age": 31, "city": "Oslo"}


def test_tool_is_called_and_its_result_is_told(loaded: tuple[Any, Any]) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
    text = answer(loaded, messages, [WEATHER])
    assert text == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    call = {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    messages.append({"role": "tool", "content": '{"sky": "sunny", "temperature": 21}'})
    assert answer(loaded, messages, [WEATHER]) == "The weather in Paris is sunny, 21 degrees."


def test_a_chat_of_three_turns(loaded: tuple[Any, Any]) -> None:
    messages: list[dict[str, Any]] = []
    for question, expected in PLAIN[:3]:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer(loaded, messages)})
        assert messages[-1]["content"] == expected


def test_files_are_small_and_any_text_survives_the_tokenizer(loaded: tuple[Any, Any]) -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < 12_000_000
    for text in ("Grüße aus Köln", "a\tb\n\n  c", "日本語 🙂", "1234567890", "<tool_call>{}</tool_call>"):
        assert loaded[0].decode(loaded[0](text).input_ids) == text
