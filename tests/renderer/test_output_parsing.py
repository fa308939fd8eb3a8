"""Tool calls and reasoning: what each sample means, and that it means the same however it is cut into pieces."""

import itertools
import json
import random
import time
from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.answer_samples import F_JSON, SAMPLES, TOOLS, hermes, kimi

from quire.renderer.output_parsing.answer import CallArguments, CallStart, Content, Reasoning
from quire.renderer.output_parsing.parser import OutputParser
from quire.renderer.reasoning_parsers import REASONING_FORMATS
from quire.renderer.tool_parsers import TOOL_FORMATS

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
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "f:0<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call|>", "<|/tool_call|>", '[{"tool_name": "f"}',
    "<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|START_THINKING|>", "<|END_THINKING|>",
    "<minimax:tool_call>", '<invoke name="f">', '<parameter name="x">', "</invoke>",
    "<｜DSML｜function_calls>", '<｜DSML｜invoke name="f">', '<｜DSML｜parameter name="x" string="false">',
    "</｜DSML｜parameter>", "</｜DSML｜invoke>",
    "<|channel|>", "analysis", " to=functions.f", "<|message|>", "<|end|>", "<|call|>", "<|start|>",
    "\\u00e9", "\\ud800",
    "<tool_calls>", "<longcat_tool_call>", "<|action_start|>", "<|plugin|>", "<|action_end|>", "<function_call>",
    "functools", "```", "json", "<function_calls>", "<|tool_call_start|>", "<seed:tool_call>", "<seed:think>",
    "<｜DSML｜tool_calls>", "<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", "<｜tool_sep｜>",
    '<steptml:invoke name="f">', "<|tool_call>", "call:f", '<|"|>', "<tool_call|>", "<|channel>thought\n", "<channel|>",
    "Here is my thought process:", "Here is my response:",
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
    "<|tool_calls_section_begin|><|tool_call_begin|>f:0", "<tool_call>f<arg_key>x</arg_key><arg_value>",
    "<|tool_call|>[", "<|START_ACTION|>[{", '<minimax:tool_call><invoke name="f"><parameter name="city">',
    '<｜DSML｜function_calls><｜DSML｜invoke name="', "<|START_RESPONSE|>",
    "<|channel|>", "<|start|>assistant<|channel|>analysis<|message|>", "to=", "<think>", "</think", "1", "-", "é",
    '<|tools_prefix|>[{"f": {"x": "', '<|function_call|>{"', '<function name="f"><param name="x">',
    "<tool_calls>[", "functools", "<function_calls>f(", '<|tool_call>call:f{x:<|"|>', "<|tool_call>call:f{x:[",
    "<start_function_call>", "<｜tool_calls_begin｜><｜tool_call_begin｜>", "<｜tool_call_begin｜>f<｜tool_sep｜>",
]  # fmt: skip


# read by the same functions as others
ALIKE = (
    "longcat", "granite-20b-fc", "phi4_mini_json", "internlm", "functiongemma", "deepseek_v4", "seed_oss", "olmo3",
    "lfm2", "deepseek_v41", "dots", "gigachat3",
)  # fmt: skip
TIMED = [pytest.param(one, marks=pytest.mark.nightly) if one in ALIKE else one for one in TOOL_FORMATS]


@pytest.mark.parametrize("formats", [*TIMED, "think", "openai openai_gptoss", "mistral hiding"])
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
    assert parser.push('ments": {"x": "a', is_last=False) == [CallStart(0, "f", ANY), CallArguments(0, '{"x": "a')]
    assert parser.push("b c", is_last=False) == [CallArguments(0, "b c")]


def test_ids_of_calls():
    """Kimi's are those that it wrote, because its template writes them back; two calls never have the same."""
    written = kimi(*(f"functions.f:{number}<|tool_call_argument_begin|>{{}}" for number in (3, 4, 4)))
    pieces = parser_of("kimi_k2").push(written, is_last=True)
    first, second, third = [piece.id for piece in pieces if isinstance(piece, CallStart)]
    assert (first, second) == ("functions.f:3", "functions.f:4")
    assert third.startswith("call_")
    pieces = parser_of("hermes").push(hermes(F_JSON, F_JSON), is_last=True)
    ids = [piece.id for piece in pieces if isinstance(piece, CallStart)]
    assert len(set(ids)) == 2
    assert all(one.startswith("call_") for one in ids)
