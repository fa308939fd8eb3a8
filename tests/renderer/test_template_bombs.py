"""A template that asks for any amount of work or memory ends with an error, soon and in little memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.template_bombs import BOMBS

from quire.errors import OptionError, RequestError
from quire.renderer import NotBriefError
from quire.renderer.chat_template import ChatTemplates, dialect_of
from quire.renderer.special_tokens import SpecialTokens
from quire.renderer.template_budget import WHOLE, Allowance, Budget, TemplateBudgetError
from quire.renderer.template_sandbox import compile_template, render

CHILD = """
import dataclasses, json, resource, sys, time
from quire.errors import OptionError, RequestError
from quire.renderer.chat_template import ChatTemplates
from quire.renderer import template_budget
from quire.renderer.special_tokens import SpecialTokens

# what is endless is so with an eighth of the steps as well
template_budget.WHOLE = dataclasses.replace(template_budget.WHOLE, steps=template_budget.WHOLE.steps // 8)

def ends_of(name, text):
    chat = [{"role": "user", "content": "hi"}]
    before = time.process_time()
    try:
        text = ChatTemplates({"default": text}, SpecialTokens(), origin="a file").render(chat)
        answer = f"{len(text)} characters"
    except RequestError as error:
        answer = str(error)
    return answer, time.process_time() - before

bombs = json.load(sys.stdin)
ends_of("", "{{ 'a'|upper }}")
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20),) * 2)
for name, text in bombs.items():
    print(json.dumps([name, *ends_of(name, text)]), flush=True)
"""


@pytest.fixture(scope="module")
def ends():
    """What each answers, and the processor's seconds it took."""
    child = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps(BOMBS), capture_output=True, text=True, timeout=600, check=False
    )
    assert child.returncode == 0, child.stderr
    return {name: (answer, seconds) for name, answer, seconds in map(json.loads, child.stdout.splitlines())}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused(ends, name):
    answer, _ = ends[name]
    assert answer.startswith("messages: the chat template of a file does not accept them"), answer
    assert "MemoryError" not in answer
    assert len(answer) < 1_200


def chat_of(num_messages):
    turns = [{"role": ("user", "assistant")[n % 2], "content": f"message {n} of many"} for n in range(num_messages)]
    return [*turns, {"role": "user", "content": "the last one"}]


NOT_BRIEF = ["nested loops", "a macro that calls itself", "loops that write", "doubled by +", "a test behind a filter"]


@pytest.mark.parametrize("name", NOT_BRIEF)
def test_what_is_not_brief_is_rendered_elsewhere(name):
    templates = ChatTemplates({"default": BOMBS[name]}, SpecialTokens())
    with pytest.raises(RequestError):
        templates.render(chat_of(0))
    with pytest.raises(NotBriefError):
        templates.render(chat_of(0), is_brief=True)


def test_a_brief_rendering_compiles_nothing():
    templates = ChatTemplates({"default": "{% for m in messages %}{{ m.content }}{% endfor %}"}, SpecialTokens())
    with pytest.raises(NotBriefError):
        templates.render(chat_of(2), is_brief=True)
    text = templates.render(chat_of(2))
    assert templates.render(chat_of(2), is_brief=True) == text


@pytest.mark.parametrize("name", ["loops_and_macros", "tools_in_tags", "tools_and_date", "turns", "parts_or_text"])
def test_a_long_chat_takes_a_part_of_the_budget(name):
    """A tenth, with 4,000 messages."""
    text = (Path(__file__).parent / f"templates/{name}.jinja").read_text()
    values = {"messages": chat_of(4_000), "bos_token": "", "eos_token": "", "add_generation_prompt": True}
    allowance = Allowance(WHOLE.steps // 10, WHOLE.num_bytes // 10, seconds=600)
    assert "message 0 of many" in render(compile_template(text), values, allowance)


def test_values_weigh_what_is_reached():
    budget = Budget(WHOLE)
    text = "x" * 1_000_000
    texts = [text] * 9
    assert budget.weight(texts) >= 9_000_000
    with pytest.raises(TemplateBudgetError, match="stands for over"):
        budget.made([texts, texts])
    # but what is counted is the memory
    for _ in range(100):
        budget.made(texts)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("'abab'|replace(old='a', new='c')", "cbcb"),
        ("'abab'|replace('a', 'c', count=1)", "cbab"),
        ("2.45|round(precision=1, method='floor')", "2.4"),
        ("['a', 'b']|join(d='-')", "a-b"),
        ("[{'a': 1}, {'a': 2}]|join('-', attribute='a')", "1-2"),
        ("'xax'|trim(chars='x')", "a"),
        ("[1, 2, 3]|batch(linecount=2, fill_with=0)|list", "[[1, 2], [3, 0]]"),
        ("[1, 2, 3]|slice(slices=2, fill_with=0)|list", "[[1, 2], [3, 0]]"),
        ("'a'|center(width=3)", " a "),
        ("'a b c d e f'|truncate(length=5, killwords=true, end='', leeway=0)", "a b c"),
        ("'a\\nb'|indent(width=1, first=true, blank=true)", " a\n b"),
        ("[{'a': 1}]|sum(attribute='a', start=1)", "2"),
        ("{'b': 1, 'a': 2}|dictsort(case_sensitive=true, by='value', reverse=true)", "[('a', 2), ('b', 1)]"),
        ("['b', 'a']|sort(reverse=true, case_sensitive=true)", "['b', 'a']"),
        ("['a', 'A']|unique(case_sensitive=true)|list", "['a', 'A']"),
        ("[{'a': 1}, {'b': 2}]|map(attribute='a', default=0)|list", "[1, 0]"),
        ("none|default(default_value='x', boolean=true)", "x"),
        ("'f'|int(default=3, base=16)", "15"),
        ("'x'|float(default=2.5)", "2.5"),
        ("'%(a)s'|format(a=1)", "1"),
        ("[3, 1]|min(case_sensitive=true)", "1"),
        ("{'b': 1, 'a': 2}|tojson(sort_keys=true, separators=(',', ':'), ensure_ascii=true)", '{"a":2,"b":1}'),
        ("'a\\nb'.splitlines(keepends=true)", "['a\\n', 'b']"),
        ("'a b c'.split(sep=' ', maxsplit=1)", "['a', 'b c']"),
        ("'a\\t'.expandtabs(tabsize=2)", "a "),
        ("[1, 2]|select('in', [2])|list", "[2]"),
        ("1 is in [1], 'a' is lower, 4 is divisibleby(num=2)", "(True, True, True)"),
        ("'upper' is filter, 'in' is test", "(True, True)"),
    ],
)
def test_operations_take_the_names_that_jinja_gives_them(expression, expected):
    assert ChatTemplates({"default": "{{ " + expression + " }}"}, SpecialTokens()).render(chat_of(0)) == expected


DEEP = {
    "sum": "{{ a" + " + a" * 1_500 + " }}",
    "names": "{{ a" + ".a" * 1_500 + " }}",
    "filters": "{{ a" + "|e" * 1_500 + " }}",
}


@pytest.mark.parametrize("name", DEEP)
def test_a_deep_template_is_refused_in_words(name):
    templates = ChatTemplates({"default": DEEP[name]}, SpecialTokens())
    templates.prepare()
    with pytest.raises(RequestError, match="nested too deep"):
        templates.render(chat_of(0))


def test_a_template_of_a_request_is_compiled_once_and_is_not_large():
    """Nobody else runs while Python compiles it."""
    templates = ChatTemplates.brought("{{ messages[0].content }}", SpecialTokens())
    assert list(templates._compiled) == ["{{ messages[0].content }}"]
    assert templates.render(chat_of(0)) == "the last one"
    with pytest.raises(OptionError, match="more than 4,096 nodes"):
        ChatTemplates.brought("{{ [" + "a," * 5_000 + "] }}", SpecialTokens())
    blocks = "".join(f"{{%block b{number}%}}x{{%endblock%}}" for number in range(1_000))
    with pytest.raises(OptionError, match=r"becomes \d{3},\d{3} characters of code, .* at most 96,000"):
        ChatTemplates.brought(blocks, SpecialTokens())
    assert ChatTemplates({"default": blocks}, SpecialTokens()).render(chat_of(0)) == "x" * 1_000


def test_templates_of_requests_push_out_nothing_of_the_models(monkeypatch):
    """What it reads is found once, however many others come with requests."""
    looked_at = []

    def look(text):
        looked_at.append(text)
        return dialect_of(text)

    monkeypatch.setattr("quire.renderer.chat_template.dialect_of", look)
    own = ChatTemplates({"default": "{{ messages[0].content }}"}, SpecialTokens())
    own.prepare()
    for number in range(40):
        ChatTemplates.brought(f"{number}{{{{ messages[0].content }}}}", SpecialTokens()).render(chat_of(0))
        own.render(chat_of(0), is_brief=True)
    assert len(looked_at) == len(set(looked_at)) == 41


def test_a_message_that_ends_with_an_image_cannot_go_on():
    template = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    chat = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]
    templates = ChatTemplates({"default": template}, SpecialTokens())
    with pytest.raises(RequestError, match="no text at its end"):
        templates.render_pieces(chat, add_generation_prompt=False, continue_final_message=True, takes_images=True)
