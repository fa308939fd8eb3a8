"""A template that asks for any amount of work or memory ends with an error, soon and in little memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire.errors import RequestError
from quire.renderer import NotBriefError
from quire.renderer.chat_template import ChatTemplates
from quire.renderer.special_tokens import SpecialTokens
from quire.renderer.template_budget import WHOLE, Allowance, Budget, TemplateBudgetError
from quire.renderer.template_sandbox import compile_template, render

LOOP = "{% for i in range(99999) %}"
DOUBLE = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = %s %}{% endfor %}{{ ns.x|length }}"
NEST = "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = %s %}{% endfor %}"
BIG = "{% set big = 'ab' * 4000000 %}"

BOMBS = {
    "nested loops": LOOP * 2 + "{% endfor %}" * 2,
    "nested loops with a test": LOOP + "{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "loops that write": LOOP * 2 + "x" * 100 + "{% endfor %}" * 2,
    "a recursive loop": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 90 }}{% endfor %}",
    "loops over a filter": LOOP + "{{ range(99999)|select('none')|list }}{% endfor %}",
    "a filter over a filter": LOOP + "{{ range(99999)|map('string')|map('upper')|join }}{% endfor %}",
    "a macro that calls itself": "{% macro m(n) %}{{ m(n - 1) ~ m(n - 1) if n }}{% endmacro %}{{ m(60) }}",
    "a wide number": "{{ '%999999999d'|format(1) }}",
    "a wide number by %": "{{ '%999999999d' % 1 }}",
    "a wide number by *": "{{ '%*d' % (999999999, 1) }}",
    "a wide number by format": "{{ '{:999999999}'.format(1) }}",
    "a width that is an argument": "{{ '{:{}}'.format(1, 999999999) }}",
    "one text in many fields": BIG + "{{ ('%s' * 100000) % ((big,) * 100000) }}",
    "one text in many fields by format": BIG + "{{ ('{0}' * 100000).format(big) }}",
    "a named text in many fields": BIG + "{{ ('%(a)s' * 100000)|format(a=big) }}",
    "centred": "{{ 'x'.center(10**10) }}",
    "centred by a filter": "{{ 'x'|center(10000000000) }}",
    "justified": "{{ 'x'.ljust(10**10) }}{{ 'x'.rjust(10**10) }}",
    "filled with zeros": "{{ '1'.zfill(10**10) }}",
    "tabs": "{{ ('\t' * 1000).expandtabs(10**8) }}",
    "wrapped words": "{{ ('ab ' * 300000)|wordwrap(1, wrapstring='x' * 900000) }}",
    "replaced": BIG + "{{ big.replace('', big) }}",
    "replaced by a filter": BIG + "{{ big|replace('a', big) }}",
    "joined": BIG + "{{ big.join(range(99999)|map('string')) }}",
    "joined by a filter": BIG + "{{ range(99999)|join(big) }}",
    "indented": "{{ ('\n' * 900000)|indent(900000) }}",
    "indented by a text": "{{ ('\n' * 900000)|indent('x' * 900000) }}",
    "indented JSON": "{{ [1, messages]|tojson(indent=10**9) }}",
    "JSON with long separators": "{{ range(9999)|list|tojson(separators=('x' * 900000, ':')) }}",
    "deep JSON": NEST.replace("60", "400").replace("%s", "[ns.x]") + "{{ ([ns.x] * 9999)|tojson(indent=16) }}",
    "doubled by ~": DOUBLE.replace("%s", "ns.x ~ ns.x"),
    "doubled by +": DOUBLE.replace("%s", "ns.x + ns.x"),
    "doubled by *": DOUBLE.replace("%s", "ns.x * 9"),
    "doubled by a macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + DOUBLE.replace("%s", "m(ns.x)"),
    "doubled by a block": DOUBLE.replace(
        "{% set ns.x = %s %}", "{% set t %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = t %}"
    ),
    "doubled by join": DOUBLE.replace("%s", "[ns.x, ns.x]|join"),
    "doubled by format": DOUBLE.replace("%s", "'%s%s' % (ns.x, ns.x)"),
    "doubled by replace": DOUBLE.replace("%s", "ns.x.replace('a', 'aa').replace('b', 'bb')"),
    "a list of lists": NEST.replace("%s", "[ns.x, ns.x]") + "{{ ns.x }}",
    "a tuple of tuples": NEST.replace("%s", "(ns.x, ns.x)") + "{{ ns.x == (ns.x, 1) }}",
    "an object of objects": NEST.replace("%s", "{'a': ns.x, 'b': ns.x}") + "{{ ns.x|tojson }}",
    "a dict of dicts": NEST.replace("%s", "dict(a=ns.x, b=ns.x)") + "{{ ns.x|string }}",
    "a list by filters": NEST.replace("%s", "(ns.x * 2)|batch(2)|list") + "{{ ns.x }}",
    "a list by arguments": "{% macro m(n) %}{{ m(n - 1, varargs, varargs) }}{% endmacro %}{{ m(60, 1) }}",
    "a namespace of namespaces": NEST.replace("['a']", "1").replace("%s", "namespace(a=ns.x, b=ns.x)")
    + LOOP
    + "{{ [ns.x, ns.x] * 999999 }}{% endfor %}",
    "a batch that is filled": BIG + "{{ [1]|batch(10**9, big)|list }}",
    "slices": BIG + "{{ [1]|slice(10**9)|list }}",
    "parts kept": BIG + NEST.replace("60", "9999").replace("%s", "[big[loop.index:], ns.x]"),
    "split": BIG + "{{ big.split('a') }}",
    "split at spaces": BIG + "{{ (big.replace('a', ' ')).split() }}",
    "lines": "{{ ('\n' * 9000000).splitlines() }}",
    "characters": BIG + "{{ big|list }}",
    "words": BIG + "{{ big|replace('a', ' ')|wordcount }}",
    "found from the end": BIG + "{{ big.rfind('a' ~ big) }}",
    "split from the end": "{{ ('a' * 900000).rsplit('ab' + 'a' * 400000) }}",
    "stripped": "{{ ('b' * 900000).strip('a' * 900000 + 'b') }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a power of powers": DOUBLE.replace("'ab'", "10").replace("%s", "ns.x ** 60") + "{{ ns.x }}",
    "a product": DOUBLE.replace("'ab'", "10").replace("%s", "ns.x * ns.x") + "{{ ns.x }}",
    "rounded": "{{ 1|round(10**9) }}{{ 1.5|round(10**9, 'ceil') }}",
    "bytes of a number": "{{ (1).to_bytes(10**10, 'big') }}",
    "translated": BIG + "{{ big.translate({97: big}) }}",
    "a sum of lists": "{{ ([range(9999)|list] * 9999)|sum(start=[]) }}",
    "words without sense": "{{ lipsum(n=10**9) }}",
    "a block again and again": BIG + "{% block b %}" + "{{ big }}" * 50 + "{% endblock %}{{ self.b() }}",
    "a date": "{{ strftime_now('%Y' * 900000) }}",
    "a long template": "{# " + "x" * 300_000 + " #}",
}
assert len(BOMBS) > 60

CHILD = """
import json, resource, sys, time
from quire.errors import RequestError
from quire.renderer.chat_template import ChatTemplates
from quire.renderer.special_tokens import SpecialTokens

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


@pytest.mark.parametrize("name", ["nested loops", "a macro that calls itself", "loops that write", "doubled by +"])
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
