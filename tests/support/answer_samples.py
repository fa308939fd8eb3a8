"""What models write, and what it means: samples of every format of calls and reasoning (docs/tools.md)."""

from __future__ import annotations

import json
import re
from typing import Any

Values = dict[str, Any]

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
W: tuple[str, Values] = ("weather", {"city": "Paris"})
F: tuple[str, Values] = ("f", {})
WILD_CALL: tuple[str, Values] = ("f", WILD)
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


def kimi(*calls: str) -> str:
    inside = "".join(f"<|tool_call_begin|>{call}<|tool_call_end|>" for call in calls)
    return f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>"


def glm(name: str, *, between: str = "\n", **values: str) -> str:
    pairs = (f"<arg_key>{key}</arg_key>{between}<arg_value>{value}</arg_value>" for key, value in values.items())
    return f"<tool_call>{between.join((name, *pairs, '</tool_call>'))}"


def minimax(name: str, **values: str) -> str:
    parameters = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in values.items())
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{parameters}</invoke>\n</minimax:tool_call>'


def dsml(text: str) -> str:
    """Tags with their marks."""
    return re.sub("<(/?)(?=function_calls|invoke|parameter)", r"<\1｜DSML｜", text)


def seed(name: str, **values: str) -> str:
    return coder(name, **values).replace("tool_call>", "seed:tool_call>")


def step3(*calls: str) -> str:
    calls = tuple(re.sub("<(/?)(?=invoke|parameter)", r"<\1steptml:", call) for call in calls)
    inside = "".join(f"<｜tool_call_begin｜>function<｜tool_sep｜>{call}<｜tool_call_end｜>" for call in calls)
    return f"<｜tool_calls_begin｜>{inside}<｜tool_calls_end｜>"


def gemma(name: str, arguments: str) -> str:
    return f"<|tool_call>call:{name}{{{arguments}}}<tool_call|>"


def harmony(*messages: str) -> str:
    return "<|start|>assistant".join(f"<|channel|>{message}" for message in messages)


PYTHON = (
    r"""[f(a=1_000, b=-2.5, c=True, d=None, e=[1, (2,), {}], f={"k": {'q': ")]}"}}, g='it\'s \x41ü\u00e9\d"', h=[],)]"""
)
PYTHON_VALUES: Values = {"a": 1000, "b": -2.5, "c": True, "d": None, "e": [1, [2], {}], "f": {"k": {"q": ")]}"}}}
PYTHON_VALUES |= {"g": "it's Aüé\\d\"", "h": []}
XML_TEXTS = {
    "days": "3",
    "tags": '["a", {"b": "</x>"}]',
    "maybe": "None",
    "either": "5",
    "other": "7",
    "city": '\n"\n\\',
}
XML_VALUES: Values = {**XML_TEXTS, "days": 3, "tags": ["a", {"b": "</x>"}], "maybe": None, "either": 5, "odd": "x"}
XML_TEXTS |= {"odd": "x"}

# Formats -> title -> text, content, calls, reasoning (what is left out is empty; one text alone stays as it is). The
# arguments of a call are an object, or the text of what is none.
SAMPLES: dict[str, dict[str, tuple[Any, ...]]] = {
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
    "glm45": {
        "plain": ("a <tool_call b <arg_key>",),
        "one": (glm("weather", city="Paris"), "", [W]),
        "in one line": (glm("weather", between="", city="Paris") + glm("f", between=""), "", [W, F]),
        "parallel": ("Hm.\n" + glm("weather", city="Paris") + "\n" + glm("f"), "Hm.", [W, F]),
        "kinds": (glm("f", **XML_TEXTS), "", [("f", XML_VALUES)]),
        "line ends of a text are part of it": (glm("f", city="\na\n"), "", [("f", {"city": "\na\n"})]),
        "wild": (glm("f", maybe=WILD_JSON, x=WILD_JSON), "", [("f", {"maybe": WILD, "x": WILD_JSON})]),
        "json": (hermes(W_JSON),),
        "mark as text": ("Use <tool_call> tags.",),
        "no value": ("<tool_call>f<arg_key>x</arg_key></tool_call>", "</tool_call>", [("f", "")]),
        "ends in the arguments": ("<tool_call>f<arg_key>city</arg_key><arg_value>a b", "", [("f", '{"city": "a b')]),
    },
    "glm45 think": {"call": ("<think>Hm</think>\n" + glm("f"), "", [F], "Hm")},
    "kimi_k2": {
        "plain": ("<|tool_calls",),
        "one": ("Hm. " + kimi('functions.weather:0<|tool_call_argument_begin|>{"city": "Paris"}'), "Hm.", [W]),
        "parallel": (
            kimi(
                'functions.weather:0<|tool_call_argument_begin|>{"city": "Paris"}',
                "\nf\n<|tool_call_argument_begin|> {}\n",
            ),
            "",
            [W, F],
        ),
        "wild": (kimi(f"functions.f:12<|tool_call_argument_begin|>{WILD_JSON}"), "", [WILD_CALL]),
        "mark as text": ("<|tool_calls_section_begin|> x",),
        "no arguments": (kimi("functions.f:0"),),
        "no json": (kimi("f<|tool_call_argument_begin|>x"),),
        "no name": (kimi(" <|tool_call_argument_begin|>{}"),),
        "ends in the arguments": (
            '<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>{"a": 1',
            "",
            [("f", '{"a": 1')],
        ),
    },
    "granite": {
        "plain": ("<|tool_cal",),
        "one": (f"<|tool_call|>[{W_JSON}]", "", [W]),
        "parallel": (f"Hm. <|tool_call|> [{W_JSON}, {F_JSON}]", "Hm.", [W, F]),
        "without bars": (f"<tool_call>[{W_JSON}]\nOk", "Ok", [W]),
        "closed": (f"<|tool_call|>[{F_JSON}]<|/tool_call|>", "", [F]),
        "wild": (f'<|tool_call|>[{{"name": "f", "arguments": {WILD_JSON}}}]', "", [WILD_CALL]),
        "empty": ("<|tool_call|>[]",),
        "not closed": (f"<|tool_call|>[{W_JSON} x", "x", [W]),
        "ends in the arguments": ('<tool_call>[{"name": "f", "arguments": {"x": "a', "", [("f", '{"x": "a')]),
    },
    "cohere": {
        "plain": ("<|START_ACT",),
        "one": (
            'Hm. <|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Paris"}}\n]'
            "<|END_ACTION|>",
            "Hm.",
            [W],
        ),
        "parallel": (
            f'<|START_ACTION|>[{W_JSON.replace("name", "tool_name")}, {{"tool_name": "f"}}]<|END_ACTION|>',
            "",
            [W, F],
        ),
        "wild": (f'<|START_ACTION|>[{{"parameters": {WILD_JSON}, "tool_name": "f"}}]', "", [WILD_CALL]),
        "an answer": ("<|START_RESPONSE|>Hi there.<|END_RESPONSE|>", "Hi there."),
        "no list": ("<|START_ACTION|>{}<|END_ACTION|>",),
        "ends in the arguments": ('<|START_ACTION|>[{"tool_name": "f", "parameters": {"x": 1', "", [("f", '{"x": 1')]),
    },
    "cohere reasoning:cohere": {
        "thought": (
            '<|START_THINKING|>Look.<|END_THINKING|><|START_ACTION|>[{"tool_name": "f"}]<|END_ACTION|>',
            "",
            [F],
            "Look.",
        ),
        "answer": ("<|START_THINKING|>Hm<|END_THINKING|><|START_RESPONSE|>Hi<|END_RESPONSE|>", "Hi", [], "Hm"),
    },
    "minimax_m2": {
        "plain": ("<minimax:tool <invoke",),
        "one": ("Hm.\n" + minimax("weather", city="Paris"), "Hm.", [W]),
        "parallel": (
            minimax("weather", city="Paris").removesuffix("</minimax:tool_call>")
            + minimax("f").removeprefix("<minimax:tool_call>\n"),
            "",
            [W, F],
        ),
        "kinds": (minimax("f", **XML_TEXTS), "", [("f", {**XML_VALUES, "city": '"\n\\'})]),
        "lines": (minimax("f", city="\na\n\nb\n", days="\n3\n"), "", [("f", {"city": "a\n\nb", "days": 3})]),
        "wild": (minimax("f", maybe=WILD_JSON), "", [("f", {"maybe": WILD})]),
        "mark as text": ("<minimax:tool_call> is a tag",),
        "a function has no kind": (minimax('f" string="true'),),
        "an unknown attribute": (
            '<minimax:tool_call><invoke name="f"><parameter name="x" y="z">1</parameter>',
            "1</parameter>",
            [("f", "")],
        ),
        "ends in the arguments": (
            '<minimax:tool_call><invoke name="f"><parameter name="city">a b',
            "",
            [("f", '{"city": "a b')],
        ),
    },
    "dots": {
        "plain": ("<dots_function",),
        "one": ("Hm.\n" + minimax("weather", city="Paris").replace("minimax:tool", "dots_function"), "Hm.", [W]),
        "kinds": (
            minimax("f", **XML_TEXTS).replace("minimax:tool", "dots_function"),
            "",
            [("f", {**XML_VALUES, "city": '"\n\\'})],
        ),
    },
    "minicpm5": {
        "plain": ("A <function name is",),
        "one": ('Hm.\n<function name="weather"><param name="city">Paris</param></function>', "Hm.", [W]),
        "parallel": (
            '<function name="weather">\n<param name="city">Paris</param>\n</function>\n<function name="f"></function>',
            "",
            [W, F],
        ),
        "mark as text": ('<function name="f"> is a tag',),
        "ends in the arguments": ('<function name="f"><param name="city">a b', "", [("f", '{"city": "a b')]),
    },
    "deepseek_v41": {
        "plain": ("<｜DSML｜ call",),
        "one": (
            'Hm.\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n'
            '<｜DSML｜ parameter name="city" string="true">Paris</｜DSML｜ parameter>\n'
            "</｜DSML｜ invoke>\n</｜DSML｜ calls>",
            "Hm.",
            [W],
        ),
    },
    "apertus": {
        "plain": ("<|tools_pre",),
        "one": ('Hm. <|tools_prefix|>[{"weather": {"city": "Paris"}}]<|tools_suffix|>', "Hm.", [W]),
        "parallel": ('<|tools_prefix|>[{"weather": {"city": "Paris"}}, {"f": {}}]<|tools_suffix|>', "", [W, F]),
        "wild": (f'<|tools_prefix|>[{{"f": {WILD_JSON}}}]<|tools_suffix|>', "", [WILD_CALL]),
        "no arguments": ('<|tools_prefix|>[{"f": 3}]<|tools_suffix|>',),
        "no name": ('<|tools_prefix|>[{"": {}}]<|tools_suffix|>',),
        "empty": ("<|tools_prefix|>[]<|tools_suffix|>",),
        "ends in the arguments": ('<|tools_prefix|>[{"f": {"x": "a', "", [("f", '{"x": "a')]),
    },
    "gigachat3": {
        "plain": ("a function call",),
        "one": (f"Hm.<|message_sep|>\n\nfunction call<|role_sep|>\n{W_JSON}", "Hm.", [W]),
        "marked": (f"Hm.<|function_call|>{W_JSON}", "Hm.", [W]),
        "alone": (f"function call<|role_sep|>\n{F_JSON}", "", [F]),
        "no call": ("function call<|role_sep|>\nx",),
    },
    "deepseek_v32": {
        "plain": ("<｜DSML｜func",),
        "one": (
            dsml(
                'Hm.\n<function_calls>\n<invoke name="weather">\n'
                '<parameter name="city" string="true">Paris</parameter>\n</invoke>\n</function_calls>'
            ),
            "Hm.",
            [W],
        ),
        "parallel": (
            dsml(
                '<function_calls><invoke name="weather"><parameter name="city">Paris</parameter></invoke>'
                '<invoke name="f"></invoke></function_calls>'
            ),
            "",
            [W, F],
        ),
        "kinds are as it says": (
            dsml(
                '<function_calls><invoke name="f"><parameter name="city" string="false">3</parameter>'
                '<parameter name="days" string="true">3\n</parameter>'
                '<parameter name="tags" string="false">"a b"</parameter>'
                '<parameter name="x" string="false">oops</parameter></invoke></function_calls>'
            ),
            "",
            [("f", {"city": 3, "days": "3\n", "tags": "a b", "x": "oops"})],
        ),
        "other tags": ('<｜DSML｜function_calls><invoke name="f">',),
        "ends in the arguments": (
            dsml('<function_calls><invoke name="f"><parameter name="x" string="true">a b'),
            "",
            [("f", '{"x": "a b')],
        ),
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
    "jamba": {
        "plain": ("<tool_calls",),
        "one": (f"Hm. <tool_calls>[\n{W_JSON}\n]</tool_calls>", "Hm.", [W]),
        "parallel": (f"<tool_calls>[{W_JSON}, {F_JSON}]</tool_calls> Ok", "Ok", [W, F]),
        "wild": (f'<tool_calls>[{{"name": "f", "arguments": {WILD_JSON}}}]</tool_calls>', "", [WILD_CALL]),
        "mark as text": ("Write <tool_calls> first.",),
        "empty": ("<tool_calls>[]</tool_calls>",),
    },
    "longcat": {
        "parallel": ("".join(f"<longcat_tool_call>{o}</longcat_tool_call>\n" for o in (W_JSON, F_JSON)), "", [W, F]),
        "no json": ("<longcat_tool_call>x</longcat_tool_call>",),
    },
    "internlm": {
        "plain": ("<|action_start|> x",),
        "one": (f"Hm.\n<|action_start|><|plugin|>\n{W_JSON}<|action_end|>\n", "Hm.", [W]),
        "parameters": ('<|action_start|><|plugin|>{"name": "f", "parameters": {}}', "", [F]),
        "an interpreter": ("<|action_start|><|interpreter|>\nx = 1<|action_end|>",),
    },
    "granite-20b-fc": {
        "parallel": (f"<function_call> {W_JSON} <function_call> {F_JSON}", "", [W, F]),
        "mark as text": ("<function_call> and then",),
    },
    "phi4_mini_json": {
        "plain": ("import functools\nfunctools.reduce",),
        "parallel": (f"functools[{W_JSON}, {F_JSON}]", "", [W, F]),
    },
    "xlam": {
        "plain": ("[1, 2]",),
        "one": (f"[{W_JSON}]", "", [W]),
        "fenced": (f"```json\n[{W_JSON}, {F_JSON}]\n```", "", [W, F]),
        "other code": ("```python\nprint()\n```",),
        "an answer in json": ('[{"name": "g", "arguments": {}}]',),
        "marked": (f"Hm. <tool_call>[{F_JSON}]</tool_call>", "Hm.", [F]),
        "marked otherwise": (f"[TOOL_CALLS][{F_JSON}]", "", [F]),
    },
    "olmo3": {
        "plain": ("<function_calls",),
        "parallel": ('Hm.\n<function_calls>\nweather(city="Paris")\nf()\n</function_calls>', "Hm.", [W, F]),
        "wild": (f"<function_calls>{PYTHON.strip('[],')}</function_calls>", "", [("f", PYTHON_VALUES)]),
        "not closed": ("<function_calls>f()", "", [F]),
        "an unknown function": ("<function_calls>g()</function_calls>",),
    },
    "lfm2": {
        "plain": ("<|tool_call_start|> [x]",),
        "parallel": ('<|tool_call_start|>[weather(city="Paris"), f()]<|tool_call_end|>Ok', "Ok", [W, F]),
        "wild": (f"<|tool_call_start|>{PYTHON}<|tool_call_end|>", "", [("f", PYTHON_VALUES)]),
    },
    "seed_oss": {
        "one": (seed("weather", city="Paris"), "", [W]),
        "kinds": (seed("f", **XML_TEXTS), "", [("f", XML_VALUES)]),
        "other marks": ("<tool_call>\nx",),
    },
    "seed_oss reasoning:seed_oss": {"call": ("<seed:think>Hm</seed:think>" + seed("f"), "", [F], "Hm")},
    "deepseek_v4": {
        "parallel": (
            "Hm.\n<｜DSML｜tool_calls>"
            + dsml('<invoke name="weather"><parameter name="city" string="true">Paris</parameter></invoke>')
            + dsml('<invoke name="f"></invoke>')
            + "</｜DSML｜tool_calls>",
            "Hm.",
            [W, F],
        ),
    },
    "step3": {
        "plain": ("<｜tool_calls_begin｜> x",),
        "parallel": (
            "Hm."
            + step3(
                '<invoke name="weather"><parameter name="city">Paris</parameter></invoke>',
                '<invoke name="f"></invoke>',
            ),
            "Hm.",
            [W, F],
        ),
        "kinds": (step3('<invoke name="f"><parameter name="days">3</parameter></invoke>'), "", [("f", {"days": 3})]),
        "no kind": ("<｜tool_calls_begin｜><｜tool_call_begin｜>f<｜tool_call_end｜>",),
    },
    "gemma4": {
        "plain": ("<|tool_call> x",),
        "one": ("Hm. " + gemma("weather", 'city:<|"|>Paris<|"|>'), "Hm.", [W]),
        "parallel": (gemma("weather", 'city:<|"|>Paris<|"|>') + gemma("f", ""), "", [W, F]),
        "kinds": (
            gemma("f", 'a:1,b:-2.5e3,c:true,d:null,e:[<|"|>x}<|"|>,{y:2}],<|"|>two words<|"|>:{z:[]},g:bare,'),
            "",
            [
                (
                    "f",
                    {
                        "a": 1,
                        "b": -2500.0,
                        "c": True,
                        "d": None,
                        "e": ["x}", {"y": 2}],
                        "two words": {"z": []},
                        "g": "bare",
                    },
                )
            ],
        ),
        "letters": (gemma("f", 'x:<|"|>"\\\n:,é😀<|"|>'), "", [("f", {"x": '"\\\n:,é😀'})]),
        "no function": ("<|tool_call>f{}",),
        "too deep": (gemma("f", "x:" + "[" * 70), "[" * 7 + "}<tool_call|>", [("f", '{"x": ' + "[" * 63)]),
        "ends in the arguments": ('<|tool_call>call:f{city:<|"|>a b', "", [("f", '{"city": "a b')]),
    },
    "gemma4 reasoning:gemma4": {
        "call": ("<|channel>thought\nHm<channel|>" + gemma("f", ""), "", [F], "Hm"),
        "another channel": ("<|channel>final",),
    },
    "functiongemma": {
        "one": ("<start_function_call>call:weather{city:<escape>Paris<escape>}<end_function_call>", "", [W]),
    },
    "reasoning:granite": {
        "plain": ("Here is a plan.",),
        "thought": ("Here is my thought process: Hm. Here is my response: Hi", "Hi", [], "Hm."),
        "in short": ("Here's my thought process:\nHm.\n\nHere's my response:\nHi", "Hi", [], "Hm."),
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
