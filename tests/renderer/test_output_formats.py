"""Which formats a model's answers have, and from what that is known."""

import itertools
import json
from pathlib import Path

import pytest

from quire.config.engine_options import EngineOptions
from quire.config.model_source import embedded_path
from quire.config.option import options_of
from quire.errors import OptionError
from quire.renderer.chat_template import ChatTemplates
from quire.renderer.output_formats import OutputFormats
from quire.renderer.output_parsing.answer import CallArguments, CallStart
from quire.renderer.reasoning_parsers import REASONING_FORMATS
from quire.renderer.special_tokens import SpecialTokens
from quire.renderer.tool_parsers import TOOL_FORMATS

TEMPLATE_FOLDER = Path(__file__).parent / "templates"
TOOLS = [{"type": "function", "function": {"name": "f"}}]
# What the templates of these families say, in short.
TEMPLATES = {
    "qwen 2.5": ('{{- "<tool_call></tool_call> XML tags" }}', "hermes", None),
    "qwen 3": ("{%- if '</think>' in content %}...<tool_call>\\n{\"name\": ", "hermes", "think"),
    "qwen 3 coder": ("<tool_call>\\n<function=example>\\n<parameter=x>", "qwen3_coder", None),
    "glm 4.5": ("<tool_call>{function-name}\\n<arg_key>", "glm45", None),
    "kimi k2": ("<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>", "kimi_k2", None),
    "granite 3": ("respond with <|tool_call|> followed by a JSON list of tools used", "granite", None),
    "phi 4 mini": ("'<|tool|>' + message['tools'] + '<|/tool|>'", "granite", None),
    "command r7b": ("<|START_THINKING|>...<|END_THINKING|><|START_ACTION|>[", "cohere", "cohere"),
    "dots": ("<dots_function_call>\\n<invoke name=\"' + name", "dots", None),
    "deepseek v4.1": ("<｜DSML｜ calls>\\n<｜DSML｜ invoke name=\"' + name", "deepseek_v41", None),
    "apertus": ("'<|tools_prefix|>[' + calls", "apertus", None),
    "gigachat 3": ("'function call<|role_sep|>\\n' + call", "gigachat3", None),
    "minicpm 5": ('<function name="f"><param name="key">value</param></function>', "minicpm5", None),
    "minimax m2": ('<minimax:tool_call>\\n<invoke name="tool-name"> ... <think>', "minimax_m2", "think"),
    "deepseek v3.2": ('<｜DSML｜function_calls>\\n<｜DSML｜invoke name="$NAME">', "deepseek_v32", None),
    "llama 3": ('{"name": function name, "parameters": dictionary of argument name and', "llama3_json", None),
    "llama 4 json": ("<|python_start|>...\"parameters\": dictionary of argument name and", "llama3_json", None),
    "llama 4": ("in the format of [func_name1(params_name1=params_value1)]", "pythonic", None),
    "mistral": ("{{- '[TOOL_CALLS] [' }}", "mistral", None),
    "magistral": ("[THINK] [TOOL_CALLS]", "mistral", "mistral"),
    "deepseek r1": ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' ... split('</think>')", "deepseek_v3", "think"),
    "gpt-oss": ("<|start|>assistant<|channel|>analysis<|message|>", "openai", "openai_gptoss"),
    "jamba": ("<tool_calls>[{{ calls }}]</tool_calls>", "jamba", None),
    "internlm 2.5": ("'<|action_start|><|plugin|>' + call", "internlm", None),
    "olmo 3": ("wrap them in <function_calls></function_calls> ... <think>", "olmo3", "think"),
    "seed-oss": ("<seed:think> <seed:tool_call>\\n<function=example>\\n<parameter=x>", "seed_oss", "seed_oss"),
    "step 3": ("'<｜tool_calls_begin｜>' ... '<think>\\n'", "step3", "think"),
    "gemma 4": ("'<|tool_call>call:' + name ... '<|channel>thought\\n<channel|>'", "gemma4", "gemma4"),
    "granite 3.2": ("Write your thoughts after 'Here is my thought process:'", None, "granite"),
    "deepseek v4": ('<｜DSML｜tool_calls>\\n<｜DSML｜invoke name="$NAME"> <think>', "deepseek_v4", "think"),
    "none": ("{{ messages }}", None, None),
}  # fmt: skip


@pytest.mark.parametrize("title", TEMPLATES)
def test_a_template_teaches(title):
    template, tool, reasoning = TEMPLATES[title]
    found = OutputFormats.choose([template])
    assert (found.tool.name if found.tool else None) == tool
    assert (found.reasoning.name if found.reasoning else None) == reasoning


def test_the_embedded_model():
    found = OutputFormats.choose([(embedded_path() / "chat_template.jinja").read_text(encoding="utf-8")])
    assert found.tool is TOOL_FORMATS["hermes"]
    assert found.reasoning is None


def test_an_option_wins():
    template = TEMPLATES["qwen 3"][0]
    found = OutputFormats.choose([template], tool="pythonic", reasoning="deepseek_r1")
    assert found == OutputFormats(tool=TOOL_FORMATS["pythonic"], reasoning=REASONING_FORMATS["deepseek_r1"])
    assert OutputFormats.choose([template], tool="none", reasoning="none") == OutputFormats()


@pytest.mark.parametrize(
    "option, formats", [("tool_call_parser", TOOL_FORMATS), ("reasoning_parser", REASONING_FORMATS)]
)
def test_the_options_know_all_names(option, formats):
    declared = options_of(EngineOptions)[option]
    assert declared.choices == ("auto", "none", *formats)
    with pytest.raises(OptionError, match=r"must be one of auto, none, .*Did you mean"):
        declared.check("autoo")
    with pytest.raises(OptionError, match=r"must be one of auto, none, "):
        OutputFormats.choose([], **{"tool" if option == "tool_call_parser" else "reasoning": "x"})


def test_nothing_to_look_for():
    assert OutputFormats().answers("", tools=TOOLS) is None
    assert OutputFormats.choose([], tool="hermes", reasoning="auto").answers("") is None


@pytest.mark.parametrize(
    "prompt, continued, is_thinking",
    [
        ("<|im_start|>assistant\n", None, False),
        ("<|im_start|>assistant\n<think>\n", None, True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", None, False),
        ("<|user|>What<think>is?<|assistant|>", None, False),
        ("<|user|><think><|assistant|>Hm", "Hm", False),
        ("<|assistant|><think>Hm", "<think>Hm", True),
        ("<|assistant|><think>Hm</think>a", "<think>Hm</think>a", False),
    ],
)
def test_whether_the_prompt_ends_in_a_thought(prompt, continued, is_thinking):
    answers = OutputFormats.choose([], reasoning="think").answers(prompt, continued=continued)
    assert answers.is_thinking == is_thinking


def test_special_tokens_are_asked_for_only_where_they_are_marks():
    formats = OutputFormats.choose([], tool="mistral")
    with_mark, without = frozenset({"[TOOL_CALLS]", "<s>"}), frozenset({"<s>"})
    assert formats.answers("", tools=TOOLS, special_tokens=with_mark).needs_special_tokens
    assert not formats.answers("", tools=TOOLS, special_tokens=without).needs_special_tokens


@pytest.mark.parametrize("folder", [embedded_path() / "chat_template.jinja", TEMPLATE_FOLDER / "tools_in_tags.jinja"])
def test_what_a_template_writes_is_read_back(folder):
    """Calls of an earlier turn are written as the model would write them."""
    written = [("f", {"x": 'a "b" {', "y": [1, None, {"ü": True}]}), ("g", {})]
    calls = [{"type": "function", "function": {"name": name, "arguments": values}} for name, values in written]
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name, _ in written]
    user, said = {"role": "user", "content": "Go"}, {"role": "assistant", "content": "", "tool_calls": calls}
    templates = ChatTemplates.find([], SpecialTokens(), str(folder))
    before = templates.render([user], tools=tools)
    answer = templates.render([user, said], tools=tools, add_generation_prompt=False)
    assert answer.startswith(before)
    parser = OutputFormats.choose(templates.texts.values()).answers(before, tools=tools).open_parser()
    pieces = parser.push(answer.removeprefix(before), is_last=True)
    read = [
        (start.name, json.loads(rest.text))
        for start, rest in itertools.pairwise(pieces)
        if isinstance(start, CallStart) and isinstance(rest, CallArguments)
    ]
    assert read == written
