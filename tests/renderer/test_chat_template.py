"""Chat templates: the same text as Transformers, and no way out of the sandbox."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from quire.errors import ModelError, OptionError, RequestError
from quire.renderer.chat_messages import prepare_messages
from quire.renderer.chat_template import ChatTemplates, dialect_of
from quire.renderer.special_tokens import SpecialTokens

TEMPLATES = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
EMBEDDED = Path(__file__).parents[2] / "src" / "quire" / "embedded" / "chat_template.jinja"
SPECIAL = SpecialTokens(by_name={"bos_token": "<s>", "eos_token": "</s>"})
USER = {"role": "user", "content": "  Hello, <b>\"world\"</b> & 'you' 日本 😀\n"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "<think>\nwell\n</think>\n\nHi! "}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "z": "ü"}}}],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds <a>", "parameters": {"type": "object", "properties": {}}},
    }
]
CHATS = {
    "one turn": [USER],
    "instructions": [SYSTEM, USER],
    "more turns": [USER, ANSWER, {"role": "user", "content": "And?"}, ANSWER, {"role": "user", "content": "So?"}],
    "call": [USER, CALL, {"role": "tool", "content": '{"sum": 3}'}, {"role": "tool", "content": "x"}],
    "thought": [USER, {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}, USER],
    "last is assistant": [SYSTEM, USER, {"role": "assistant", "content": "4", "reasoning": "2 + 2"}],
}


def render(text: str, chat, **options) -> str:
    return ChatTemplates({"default": text}, SPECIAL).render(chat, **options)


def by_transformers(text: str, chat, tools, **options) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([chat], tools=tools, chat_template=text, **SPECIAL.by_name, **options)
    return rendered[0]


@pytest.mark.parametrize("name", [*TEMPLATES, "embedded"])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_equal_to_transformers(name, chat, tools, add_generation_prompt):
    text = TEMPLATES.get(name) or EMBEDDED.read_text()
    try:
        expected = by_transformers(text, CHATS[chat], tools, add_generation_prompt=add_generation_prompt)
    except Exception:
        with pytest.raises(RequestError) as caught:
            render(text, CHATS[chat], tools=tools, add_generation_prompt=add_generation_prompt)
        assert caught.value.param == "messages"
        return
    assert render(text, CHATS[chat], tools=tools, add_generation_prompt=add_generation_prompt) == expected


def test_values_for_a_template():
    text = TEMPLATES["tools_in_tags"]
    options = {"enable_thinking": False}
    expected = by_transformers(text, [USER], None, add_generation_prompt=True, **options)
    assert render(text, [USER], template_kwargs=options) == expected
    assert expected.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "chat_template", "tokenize"])
def test_values_that_a_request_may_not_set(name):
    with pytest.raises(RequestError, match=name):
        render("x", [USER], template_kwargs={name: True})


def test_the_clock_is_handed_in():
    templates = ChatTemplates({"default": "{{ strftime_now('%d %B %Y') }}"}, SPECIAL, lambda: datetime(2031, 2, 3))
    assert templates.render([USER]) == "03 February 2031"


def test_a_templates_own_refusal_is_shown():
    with pytest.raises(RequestError, match="System role not supported"):
        render(TEMPLATES["strict_roles"], [SYSTEM, USER])


@pytest.mark.parametrize(
    "text", ["{{ 1 / 0 }}", "{{ messages[9].role }}", "{{ none.x() }}", "{% for %}", "{{ 'a' + 1 }}"]
)
def test_a_broken_template_fails_the_request_alone(text):
    with pytest.raises(RequestError, match="chat template"):
        render(text, [USER])


ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ ('' | attr('__cla' ~ 'ss__')).mro() }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ ('{0.__cla' ~ 'ss__}').format_map({'0': ''}) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ joiner.__init__.__globals__['os'] }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('id') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ range.__class__ }}",
    "{{ dict.__base__ }}",
    "{{ dict.mro() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ strftime_now.__closure__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ messages[0].pop('role') }}",
    "{% set ns = namespace(__class__=1) %}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ (messages | map(attribute='__class__') | list)[0].__name__ }}",
    "{{ messages[0].items.__self__ }}",
    "{{ messages | tojson(default=1) }}",
]


@pytest.mark.parametrize("text", ESCAPES)
def test_there_is_no_way_out_of_the_sandbox(text):
    chat = [dict(USER)]
    try:
        rendered = render(text, chat)
    except RequestError:
        rendered = ""
    # Jinja answers some of these with an undefined value, which renders as nothing
    assert rendered.strip() == ""
    assert chat == [USER]


@pytest.mark.parametrize(
    "text",
    [
        "{{ 'a' * 10**9 }}",
        "{{ 10**9 * 'a' }}",
        "{{ [1] * 10**9 }}",
        "{{ range(10**9) | list }}",
        "{{ 9 ** 999999 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% for a in range(9999) %}{{ 'b' * 9999 }}{% endfor %}",
        "{% set text %}{% for a in range(9999) %}{{ 'b' * 9999 }}{% endfor %}{% endset %}{{ text | length }}",
    ],
)
def test_what_a_template_makes_is_bounded(text):
    with pytest.raises(RequestError):
        render(text, [USER])


# ---- shapes of messages ---------------------------------------------------------------------------------------------

PARTS = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]}
LISTS_ONLY = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"


def test_a_template_that_reads_texts_gets_joined_parts():
    assert render("{{ messages[0].content }}", [PARTS]) == "one\ntwo"


def test_a_template_that_reads_lists_gets_lists():
    assert render(LISTS_ONLY, [PARTS]) == "[one][two]"
    assert render(LISTS_ONLY, [{"role": "user", "content": "one"}]) == "[one]"


def test_a_template_that_reads_both_gets_what_was_given():
    text = TEMPLATES["parts_or_text"]
    assert render(text, [PARTS]) == "<|user|>onetwo<|end|>"
    assert render(text, [{"role": "user", "content": "one"}]) == "<|user|>one<|end|>"


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("{{ messages[0].content }}", (False, True)),
        (LISTS_ONLY, (True, False)),
        (TEMPLATES["parts_or_text"], (True, True)),
        ("{% set c = m['content'] %}{% for part in c %}{{ part.text }}{% endfor %}", (True, False)),
        (
            "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}",
            (True, False),
        ),
        ("{% for %}", (False, True)),
    ],
)
def test_what_a_template_reads_is_found_in_it(text, kinds):
    dialect = dialect_of(text)
    assert (dialect.keeps_parts, not dialect.as_parts) == kinds


def test_arguments_of_a_call_become_an_object():
    call = json.loads(json.dumps(CALL))
    call["tool_calls"][0]["function"]["arguments"] = '{"a": 1, "z": "ü"}'
    text = TEMPLATES["tools_and_date"]
    assert render(text, [USER, call]) == render(text, [USER, CALL])
    call["tool_calls"][0]["function"]["arguments"] = ""
    assert '"parameters": {}' in render(text, [USER, call])
    call["tool_calls"][0]["function"]["arguments"] = "{"
    with pytest.raises(RequestError, match="JSON object"):
        render(text, [USER, call])


def test_a_developer_is_the_system_for_templates_that_know_none():
    chat = [{"role": "developer", "content": "Be brief."}, USER]
    assert render("{{ messages[0].role }}", chat) == "system"
    assert render("{% if messages[0].role == 'developer' %}yes{% endif %}", chat) == "yes"


def test_a_content_of_none_is_not_printed():
    assert render("[{{ messages[0].content }}]", [CALL]) == "[]"
    assert render("{% if messages[0].content is none %}yes{% endif %}", [CALL]) == "yes"


def test_objects_of_the_official_client_are_messages():
    from openai.types.chat import ChatCompletionMessage

    answer = ChatCompletionMessage(role="assistant", content="Hi")
    assert render("{{ messages[1].content }}", [USER, answer]) == "Hi"


@pytest.mark.parametrize(
    ("chat", "param"),
    [
        ([], "messages"),
        ("text", "messages"),
        ({"role": "user"}, "messages"),
        (["text"], "messages[0]"),
        ([{"content": "no role"}], "messages[0].role"),
        ([{"role": 1}], "messages[0].role"),
        ([{"role": "x", "content": "a"}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([USER, {"role": "tool", "content": None}], "messages[1].content"),
        ([USER] * 4097, "messages"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        ([USER, {"role": "user", "content": 3}], "messages[1].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [3]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": "x", "other": object()}], "messages[0]"),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], "messages[0].tool_calls"),
    ],
)
def test_what_is_no_chat_is_refused_by_name(chat, param):
    with pytest.raises(RequestError) as caught:
        render("x", chat)
    assert caught.value.param == param


@pytest.mark.parametrize("part", [{"type": "input_audio"}, {"type": "text", "text": "a", "audio_url": "b"}])
def test_what_is_refused_comes_with_what_is_allowed(part):
    with pytest.raises(RequestError, match="texts, and image_url or video_url where the model sees these"):
        prepare_messages([{"role": "user", "content": [part]}], dialect_of(""))


def test_an_image_that_is_an_object_needs_a_model_that_sees_it():
    with pytest.raises(RequestError, match="only to models that see them"):
        render("x", [{"role": "user", "content": [{"type": "image", "image": object()}]}])


def test_nesting_is_bounded():
    deep: object = "x"
    for _ in range(200):
        deep = [deep]
    with pytest.raises(RequestError, match="nested"):
        render("x", [{"role": "user", "content": "x", "deep": deep}])


# ---- going on with the last message ---------------------------------------------------------------------------------


def test_the_last_message_can_go_on():
    chat = [USER, {"role": "assistant", "content": "The answer is "}]
    rendered = render(TEMPLATES["turns"], chat, add_generation_prompt=False, continue_final_message=True)
    assert rendered.endswith("<|im_start|>assistant\nThe answer is ")
    parts = [USER, {"role": "assistant", "content": [{"type": "text", "text": "The answer"}]}]
    rendered = render(TEMPLATES["parts_or_text"], parts, add_generation_prompt=False, continue_final_message=True)
    assert rendered.endswith("<|assistant|>The answer")


def test_a_last_message_that_cannot_go_on():
    with pytest.raises(RequestError, match="add_generation_prompt"):
        render("x", [USER], continue_final_message=True)
    with pytest.raises(RequestError, match="only the assistant's can go on"):
        render("x", [USER], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(RequestError, match="drops or changes"):
        render("x", [ANSWER], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(RequestError, match="no text"):
        render("x", [CALL], add_generation_prompt=False, continue_final_message=True)


# ---- where templates are found --------------------------------------------------------------------------------------


def found(folder: Path, asked: str | None = None) -> dict[str, str] | None:
    templates = ChatTemplates.find([folder], SPECIAL, asked)
    return templates.texts if templates is not None else None


def write_config(folder: Path, template) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def test_no_template(tmp_path):
    assert found(tmp_path) is None


def test_a_template_in_the_config(tmp_path):
    write_config(tmp_path, "one")
    assert found(tmp_path) == {"default": "one"}


def test_a_file_of_its_own_comes_first(tmp_path):
    write_config(tmp_path, "one")
    (tmp_path / "chat_template.jinja").write_text("two")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("three")
    assert found(tmp_path) == {"default": "two", "tool_use": "three"}


def test_an_option_comes_before_all(tmp_path):
    write_config(tmp_path, "one")
    (tmp_path / "mine.jinja").write_text("mine")
    assert found(tmp_path, str(tmp_path / "mine.jinja")) == {"default": "mine"}
    assert found(tmp_path, "{{ messages }}") == {"default": "{{ messages }}"}
    with pytest.raises(OptionError, match="no such file"):
        found(tmp_path, str(tmp_path / "other.jinja"))
    with pytest.raises(OptionError, match="line 1"):
        found(tmp_path, "{% for %}")


def test_named_templates(tmp_path):
    write_config(tmp_path, [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}])
    templates = ChatTemplates.find([tmp_path], SPECIAL)
    assert templates is not None
    assert templates.render([USER]) == "plain"
    assert templates.render([USER], tools=TOOLS) == "tools"
    write_config(tmp_path, [{"name": "rag", "template": "x"}])
    templates = ChatTemplates.find([tmp_path], SPECIAL)
    assert templates is not None
    with pytest.raises(RequestError, match="rag"):
        templates.render([USER])
    write_config(tmp_path, [{"template": "x"}])
    with pytest.raises(ModelError, match="name and template"):
        found(tmp_path)


@pytest.mark.parametrize("given", [{"x": "ü", "y": [1]}, '{"x": "ü", "y": [1]}'])
@pytest.mark.parametrize(
    "joined", ["'call: ' + call['function']['arguments'] + '!'", "('call: ' + (call.function.arguments)) ~ '!'"]
)
def test_arguments_that_a_template_adds_to_a_text_are_text(given, joined):
    """DeepSeek's templates write them down as the client sent them."""
    text = "{% for call in messages[0]['tool_calls'] %}{{ " + joined + " }}{% endfor %}"
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": given}}]
    assert render(text, [{"role": "assistant", "tool_calls": calls}]) == 'call: {"x": "ü", "y": [1]}!'
