"""Tool calls and reasoning: what each sample means, and that it means the same however it is cut into pieces."""

import itertools
import json
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.renderer.output_parsing.answer import CallArguments, CallStart, Content, Reasoning
from quire.renderer.output_parsing.parser import OutputParser
from quire.renderer.reasoning_parsers import REASONING_FORMATS
from quire.renderer.tool_parsers import TOOL_FORMATS

KINDS = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "tags": {"type": "array"},
    "maybe": {"type": ["number", "null"]},
    "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    "odd": {"type": 3, "enum": 7},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": KINDS}}}
    for name in ("weather", "f")
]
WILD = {
    "city": 'Zürich "日本" 😀 \\ <tool_call> </parameter',
    "deep": {"a": [1, -2.5e3, {"b": None}], "c": True, "": [[], {}]},
    "code": "if (x) { y[0] = '}]' }\n\n[TOOL_CALLS]",
}
W, F, WILD_CALL = ("weather", {"city": "Paris"}), ("f", {}), ("f", WILD)
W_JSON, F_JSON = '{"name": "weather", "arguments": {"city": "Paris"}}', '{"arguments": {}, "name": "f"}'
# as models write it, and with everything escaped
WILD_JSON, WILD_ESCAPED = json.dumps(WILD, ensure_ascii=False), json.dumps(WILD)
DEEP = '{"a": ' * 70 + "1" + "}" * 70


def hermes(*objects: str) -> str:
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)


def deepseek(*calls: str) -> str:
    inside = "\n".join(f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def fenced(name: str, arguments: str) -> str:
    return f"function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"


def coder(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def harmony(*messages: str) -> str:
    return "<|start|>assistant".join(f"<|channel|>{message}" for message in messages)


PYTHON = (
    r"""[f(a=1_000, b=-2.5, c=True, d=None, e=[1, (2,), {}], f={"k": {'q': ")]}"}}, g='it\'s \x41ü\u00e9\d"', h=[],)]"""
)
PYTHON_VALUES = {"a": 1000, "b": -2.5, "c": True, "d": None, "e": [1, [2], {}], "f": {"k": {"q": ")]}"}}}
PYTHON_VALUES |= {"g": "it's Aüé\\d\"", "h": []}
XML_TEXTS = {
    "days": "3",
    "tags": '["a", {"b": "</x>"}]',
    "maybe": "None",
    "either": "5",
    "other": "7",
    "city": '\n"\n\\',
}
XML_VALUES = {**XML_TEXTS, "days": 3, "tags": ["a", {"b": "</x>"}], "maybe": None, "either": 5, "odd": "x"}
XML_TEXTS |= {"odd": "x"}

# Formats -> title -> text, content, calls, reasoning (what is left out is empty; one text alone stays as it is). The
# arguments of a call are an object, or the text of what is none.
SAMPLES = {
    "hermes": {
        "plain": ("Just text, 5 < 6 and <b>bold</b>. \n",),
        "one": (hermes(W_JSON), "", [W]),
        "parallel": ("Let me see.\n\n" + hermes(W_JSON, F_JSON) + "\n", "Let me see.", [W, F]),
        "text after": (hermes(W_JSON) + "\nDone. ", "Done. ", [W]),
        "wild": (hermes(f'{{"name": "f", "arguments": {WILD_JSON}}}'), "", [WILD_CALL]),
        "wild, escaped": (hermes(f'{{"name": "f", "arguments": {WILD_ESCAPED}}}'), "", [WILD_CALL]),
        "name last": (hermes(f'{{"arguments": {WILD_JSON}, "name": "f"}}'), "", [WILD_CALL]),
        "a string": (hermes('{"name": "f", "arguments": "{\\"x\\": 1}"}'), "", [("f", {"x": 1})]),
        "null": (hermes('{"name": "f", "arguments": null, "id": [7]}'), "", [F]),
        "no arguments": (hermes('{"name": "f"}'), "", [F]),
        "line end": (hermes('{"name":"f","arguments":{"x":"a\nb"}}'), "", [("f", {"x": "a\nb"})]),
        "apostrophe": (hermes(r'{"name":"f","arguments":{"x":"it\'s"}}'), "", [("f", {"x": "it's"})]),
        "not closed": (hermes(W_JSON)[:-12] + hermes(F_JSON), "", [W, F]),
        "mark as text": ("Use <tool_call> tags.",),
        "mark in a string": (
            hermes('{"name":"f","arguments":{"x":"</tool_call>"}}'),
            "",
            [("f", {"x": "</tool_call>"})],
        ),
        "no json": (hermes("{name: f}"),),
        "a list": (hermes("[1]"),),
        "arguments no object": (hermes('{"name": "f", "arguments": 3}'),),
        "bad name": (hermes('{"name": "a b", "arguments": {}}'),),
        "half a character": (hermes(r'{"name": "\ud800"}'),),
        "bad number": (hermes('{"arguments": {"x": 007}}'),),
        "ends before the name": ('Hm <tool_call>\n{"name": "f", ',),
        "ends in the mark": ("Hm <tool_ca",),
        "ends in the arguments": ('<tool_call>{"name": "f", "arguments": {"x": "a', "", [("f", '{"x": "a')]),
        "broken": ('<tool_call>{"name":"f","arguments":{"x": oops}} end', "}} end", [("f", '{"x": ')]),
        "good, then broken": (hermes(W_JSON) + "<tool_call>?", "<tool_call>?", [W]),
        "unknown escape": (hermes(r'{"name":"f","arguments":{"x":"\d"}}'), 'd"}}\n</tool_call>', [("f", '{"x":"')]),
        "too deep": (
            f'<tool_call>{{"name": "f", "arguments": {DEEP}}}',
            DEEP.removeprefix('{"a": ' * 64 + "{") + "}",
            [("f", '{"a": ' * 64 + "{")],
        ),
        "too deep, name last": (hermes(f'{{"arguments": {DEEP}}}'),),
        "spaces": ("a" + " " * 600 + "\n" * 300 + hermes(F_JSON), "a" + " " * 600 + "\n" * 168, [F]),
    },
    "llama3_json": {
        "plain": ("Hello {name}",),
        "one": ('{"name": "weather", "parameters": {"city": "Paris"}}', "", [W]),
        "one after the other": (W_JSON + F_JSON, "", [W, F]),
        "llama 4": (f"<|python_start|>{W_JSON}<|python_end|>", "", [W]),
        "tag": ('<|python_tag|>{"name": "new", "parameters": {}}', "", [("new", {})]),
        "parallel": (f"{W_JSON}; {F_JSON}", "", [W, F]),
        "wild": (f'{{"name": "f", "parameters": {WILD_JSON}}}', "", [WILD_CALL]),
        "an answer in json": ('{"name": "Ann", "parameters": {}}',),
        "other json": (' {"x": [1, 2]} ',),
        "unknown second": (W_JSON + ';{"name": "no"} .', ';{"name": "no"} .', [W]),
        "python": ("<|python_tag|>print(1)",),
        "ends in the arguments": ('{"name": "f", "parameters": {"a', "", [("f", '{"a')]),
    },
    "pythonic": {
        "plain": ("[1, 2] is a list",),
        "one": ("[weather(city='Paris')]", "", [W]),
        "parallel": ('[weather(city="Paris"), f(), ]', "", [W, F]),
        "tags": ("<|python_start|>[f()]<|python_end|>", "", [F]),
        "values": (PYTHON, "", [("f", PYTHON_VALUES)]),
        "wild": (f"[f(x={WILD})]", "", [("f", {"x": WILD})]),
        "unknown": ("[rm(x=1)]",),
        "code": ("[f(__import__('os'))]",),
        "code as a value": ("[f(x=open('a'))] ", "('a'))] ", [("f", '{"x": ')]),
        "ends in the arguments": ("[weather(city='Par", "", [("weather", '{"city": "Par')]),
    },
    "mistral": {
        "plain": ("[TOOL] [ARGS] [",),
        "list": (f"[TOOL_CALLS] [{W_JSON}, {F_JSON}]", "", [W, F]),
        "object": (f"Hm. [TOOL_CALLS]{W_JSON}", "Hm.", [W]),
        "named": ('[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]f{}', "", [W, F]),
        "with an id": ("[TOOL_CALLS]f[CALL_ID]abc123[ARGS]{}", "", [F]),
        "wild": (f"[TOOL_CALLS]f[ARGS]{WILD_JSON}", "", [WILD_CALL]),
        "empty": ("[TOOL_CALLS] []",),
        "mark as text": ("[TOOL_CALLS] is a token",),
        "ends in the name": ("[TOOL_CALLS]f[AR",),
        "ends in the arguments": ('[TOOL_CALLS]f[ARGS]{"a":', "", [("f", '{"a":')]),
    },
    "deepseek_v3": {
        "plain": ("<｜tool▁cal",),
        "fenced": ("Hm" + deepseek(fenced("weather", '{"city": "Paris"}')), "Hm", [W]),
        "fenced parallel": (deepseek(fenced("weather", '{"city": "Paris"}'), fenced("f", "{}")), "", [W, F]),
        "bare": (deepseek('weather<｜tool▁sep｜>{"city": "Paris"}', "f<｜tool▁sep｜>{}"), "", [W, F]),
        "wild": (deepseek(f"f<｜tool▁sep｜>{WILD_JSON}", fenced("f", WILD_ESCAPED)), "", [WILD_CALL] * 2),
        "mark as text": ("<｜tool▁calls▁begin｜> x",),
        "no json": (deepseek("f<｜tool▁sep｜>x"),),
        "ends in the arguments": (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1',
            "",
            [("f", '{"a": 1')],
        ),
    },
    "qwen3_coder": {
        "plain": ("a <function f> <tool_call b",),
        "one": (coder("weather", city="Paris"), "", [W]),
        "parallel": ("Hm.\n" + coder("weather", city="Paris") + "\n" + coder("f"), "Hm.", [W, F]),
        "kinds": (coder("f", **XML_TEXTS), "", [("f", XML_VALUES)]),
        "misfits": (
            coder("f", days="many", maybe="1e5", either="five", tags="[1,", city=""),
            "",
            [("f", {"days": "many", "maybe": 1e5, "either": "five", "tags": "[1,", "city": ""})],
        ),
        "wild": (coder("f", maybe=WILD_JSON, x=WILD_JSON), "", [("f", {"maybe": WILD, "x": WILD_JSON})]),
        "code": (coder("f", tags="[].__class__"), "", [("f", {"tags": "[].__class__"})]),
        "bare": ("<function=f>\n</function> ok", "ok", [F]),
        "mark as text": ("<tool_call> x <function=f y",),
        "ends in the arguments": ("<function=f><parameter=city>\na b", "", [("f", '{"city": "a b')]),
        "ends in a number": ("<function=f><parameter=days>\n12", "", [("f", '{"days": ')]),
    },
    "openai openai_gptoss": {
        "plain": ("to whom? No marks.",),
        "answer": (harmony("analysis<|message|>Think <b>.<|end|>", "final<|message|>Hi."), "Hi.", [], "Think <b>."),
        "call": (
            harmony(
                "analysis<|message|>Hm.<|end|>",
                "commentary<|message|>Let me see.<|end|>",
                'commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>',
            ),
            "Let me see.",
            [W],
            "Hm.",
        ),
        "wild": (harmony(f"commentary to=functions.f<|message|>{WILD_JSON}<|call|>"), "", [WILD_CALL]),
        "header begun": (" to=functions.f<|channel|>commentary json<|message|>{}", "", [F]),
        "no json": (harmony("commentary to=functions.f<|message|>oops<|end|>"), "oops<|end|>"),
        "ends in the thought": (harmony("analysis<|message|>Hm <|en"), "", [], "Hm <|en"),
        "ends in the header": (harmony("ana"),),
    },
    "think": {
        "plain": ("  Hi <think> there",),
        "thought": ("<think>\nHm,\n ok.\n</think>\n\nHi. ", "Hi. ", [], "Hm,\n ok."),
        "empty": ("<think>\n\n</think>\n\nHi", "Hi"),
        "unclosed": ("<think>Hm </thin", "", [], "Hm </thin"),
    },
    "think open": {
        "closed": ("Hm</think>Hi", "Hi", [], "Hm"),
        "opened twice": ("\n<think>Hm</think>Hi", "Hi", [], "Hm"),
    },
    "think hermes": {"call": (f"<think>a <tool_call></think>\n\n{hermes(W_JSON)}", "", [W], "a <tool_call>")},
    "deepseek_r1": {"thought": ("Hm</think>Hi</think>", "Hi</think>", [], "Hm")},
    "reasoning:mistral mistral": {"call": ("[THINK]a [b][/THINK]\nOk[TOOL_CALLS]f{}", "Ok", [F], "a [b]")},
    "hermes at-most-one": {"parallel": (hermes(W_JSON, F_JSON) + "!", "!", [W])},
    "mistral hiding": {
        "special tokens": ("<s>a<|x|> [b</s>", "a [b"),
        "no call": ("[TOOL_CALLS] x[ARGS]", " x"),
    },
    "hermes no-tools think": {"open": ("<think>a</think> <tool_call>", "<tool_call>", [], "a")},
}
HIDDEN = frozenset({"<s>", "</s>", "<|x|>", "[TOOL_CALLS]", "[ARGS]"})
CASES = [(formats, title) for formats, table in SAMPLES.items() for title in table]


def parser_of(formats: str) -> OutputParser:
    words = formats.split()
    thinks = [word.removeprefix("reasoning:") for word in words]
    return OutputParser(
        next((TOOL_FORMATS[word] for word in words if word in TOOL_FORMATS), None),
        next((REASONING_FORMATS[w] for w, word in zip(thinks, words, strict=True) if _is_reasoning(word, w)), None),
        is_thinking="open" in words,
        tools=[] if "no-tools" in words else TOOLS,
        hidden=HIDDEN if "hiding" in words else frozenset(),
        max_calls=1 if "at-most-one" in words else None,
    )


def _is_reasoning(word: str, name: str) -> bool:
    return name in REASONING_FORMATS and (word != name or word not in TOOL_FORMATS)


def said(parser: OutputParser, parts):
    """Content, reasoning and calls, once the parts have come; and what becomes of the reason `stop`."""
    content, reasoning, calls = "", "", []
    for number, part in enumerate(parts):
        for piece in parser.push(part, is_last=number == len(parts) - 1):
            match piece:
                case Content(text):
                    content += text
                case Reasoning(text):
                    reasoning += text
                case CallStart(index, name):
                    assert index == len(calls)
                    calls.append([name, ""])
                case CallArguments(index, text):
                    assert text
                    assert index == len(calls) - 1
                    calls[index][1] += text
    return content, reasoning, calls, parser.finish_reason("stop")


def cut(text: str, places) -> list[str]:
    return [text[start:end] for start, end in itertools.pairwise([0, *sorted(places), len(text)])]


@pytest.mark.parametrize("formats, title", CASES)
def test_what_it_means(formats, title):
    text, *rest = SAMPLES[formats][title]
    expected, calls, thought = [*rest, *["", [], ""][len(rest) :]] if rest else [text, [], ""]
    content, reasoning, found, reason = said(parser_of(formats), [text])
    assert (content, reasoning) == (expected, thought)
    assert [name for name, _ in found] == [name for name, _ in calls]
    for (_, arguments), (_, wanted) in zip(found, calls, strict=True):
        assert arguments == wanted if isinstance(wanted, str) else json.loads(arguments) == wanted
    is_whole = bool(calls) and not any(isinstance(wanted, str) for _, wanted in calls)
    assert reason == ("tool_calls" if is_whole else "stop")


@pytest.mark.parametrize("formats, title", CASES)
def test_however_it_is_cut(formats, title):
    text = SAMPLES[formats][title][0]
    whole = said(parser_of(formats), [text])
    for place in range(len(text) + 1):
        assert said(parser_of(formats), cut(text, [place])) == whole, place
    assert said(parser_of(formats), [*text, ""]) == whole
    chance = random.Random(title)
    for _ in range(20):
        places = [chance.randrange(len(text) + 1) for _ in range(chance.randrange(2, 12))]
        assert said(parser_of(formats), cut(text, places)) == whole, places


NOISE = [
    *"{}[](),:;=<>\"'\\ \n\taf1_-.é😀",
    "name", "arguments", '"name": "f"', '"arguments": {', '{"name": "f"', "f(", "x=1",
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<function=f>", "<parameter=x>",
    "</parameter>", "</function>",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<|python_tag|>", "<|python_start|>",
    "<|python_end|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```json\n", "```",
    "<|channel|>", "analysis", " to=functions.f", "<|message|>", "<|end|>", "<|call|>", "<|start|>",
    "\\u00e9", "\\ud800",
]  # fmt: skip


@given(st.sampled_from(sorted(SAMPLES)), st.lists(st.sampled_from(NOISE), max_size=40), st.data())
def test_noise_is_no_error_and_may_be_cut_anywhere(formats, words, data):
    text = "".join(words)
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    whole = said(parser_of(formats), [text])
    assert said(parser_of(formats), cut(text, places)) == whole
    assert said(parser_of(formats), [*text, ""]) == whole
    content, reasoning, calls, _ = whole
    # whatever was found can be sent
    json.dumps([content, reasoning, calls], ensure_ascii=False).encode()


ADVERSARIAL = [
    "[", "{", '"', "\\", "<", "<tool", "<tool_call>", '{"a":', '{"name": "f", "arguments": [', " ", "\n",
    "[f(", "f(f(x=",
    '<tool_call>{"name": "f", "arguments": {"x": "', "<tool_call>{", "[TOOL_CALLS]", "[TOOL_CALLS][{", "<function=f>",
    "<function=f><parameter=x>", "</parameter", "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f",
    "<|channel|>", "<|start|>assistant<|channel|>analysis<|message|>", "to=", "<think>", "</think", "1", "-", "é",
]  # fmt: skip


@pytest.mark.parametrize("formats", [*TOOL_FORMATS, "think", "openai openai_gptoss", "mistral hiding"])
def test_time_is_linear(formats):
    """SEC-18: what makes a parser slow, long and in small pieces."""

    def seconds(text: str) -> float:
        start = time.process_time()
        said(parser_of(formats), cut(text, range(0, len(text), 7)))
        return time.process_time() - start

    for word in ADVERSARIAL:
        text = word * (8_000 // len(word))
        # a busy machine may be slow once, not each time
        assert any(seconds(text * 2) < 3 * seconds(text) + 0.02 for _ in range(5)), word
        assert said(parser_of(formats), [text]) == said(parser_of(formats), cut(text, range(0, len(text), 7)))


def test_what_is_held_back_is_bounded():
    """A value that waits for the name of its call, and a call that is none."""
    for opening in ('<tool_call>{"arguments": {"x": "', "<tool_call>{" + " " * 100):
        parser = parser_of("hermes")
        parser.push(opening, is_last=False)
        num_shown = sum(len(piece.text) for _ in range(200) for piece in parser.push("a " * 500, is_last=False))
        assert num_shown > 100_000


def test_after_the_end_nothing_comes():
    parser = parser_of("hermes")
    assert parser.push("Hi", is_last=True) == [Content("Hi")]
    assert parser.push("Hi", is_last=True) == []


def test_arguments_come_while_they_are_written():
    parser = parser_of("hermes")
    assert parser.push('<tool_call>{"name": "f", "argu', is_last=False) == []
    assert parser.push('ments": {"x": "a', is_last=False) == [CallStart(0, "f"), CallArguments(0, '{"x": "a')]
    assert parser.push("b c", is_last=False) == [CallArguments(0, "b c")]
