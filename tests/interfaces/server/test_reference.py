"""The tables in docs/fields.md and metrics.md are those that the code makes."""

import shutil
from pathlib import Path

import pytest
from tests.pages.tables import page_of, tables, write

from quire.interfaces.server.anthropic_messages.fields import RULES as MESSAGES_RULES
from quire.interfaces.server.openai.requests import ChatRequest, CompletionRequest
from quire.interfaces.server.openai_responses.fields import RULES as RESPONSES_RULES
from quire.interfaces.server.wire.field_rules import IGNORED, REFUSED_BY_BOTH, REFUSED_BY_CHAT, REFUSED_BY_COMPLETIONS

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("title", tables())
def test_a_table_is_in_the_documentation(title):
    page = DOCS / page_of(title)
    assert f"## {title}\n\n{tables()[title]}\n" in page.read_text(encoding="utf-8"), (
        f"{page.name}: run `python -m tests.pages --write docs`"
    )


@pytest.fixture
def docs(tmp_path):
    """A copy of the pages that have tables."""
    folder = tmp_path / "docs"
    folder.mkdir()
    for page in {page_of(title) for title in tables()}:
        shutil.copy(DOCS / page, folder)
    return folder


def texts_of(folder):
    return {page.name: page.read_text(encoding="utf-8") for page in folder.iterdir()}


@pytest.mark.parametrize("stale", ["a row less", "no table", "another table"])
def test_tables_are_written_in_place(docs, stale):
    right = texts_of(docs)
    assert write(docs) == []
    for title, table in tables().items():
        lines = table.splitlines(keepends=True)
        instead = {"a row less": lines[:-1], "no table": [], "another table": ["| x | y |\n", *lines[1:2]]}[stale]
        page = docs / page_of(title)
        text = page.read_text("utf-8")
        page.write_text(text.replace(f"## {title}\n\n{table}\n", f"## {title}\n\n{''.join(instead)}"), "utf-8")
        assert page.read_text("utf-8") != text
    assert set(write(docs)) == set(right)
    assert texts_of(docs) == right


def test_a_page_without_the_heading_is_left_alone(docs):
    page = docs / "metrics.md"
    page.write_text(
        page.read_text("utf-8").replace("## Of the engine", "## Of an engine").replace("| `", "| `x"), "utf-8"
    )
    stale = docs / "fields.md"
    stale.write_text(stale.read_text("utf-8").replace("| `prompt` |", "| `prompts` |"), "utf-8")
    before = texts_of(docs)
    with pytest.raises(ValueError, match=r"metrics\.md: has 0 headings 'Of the engine'"):
        write(docs)
    assert texts_of(docs) == before


# openai-python 3.54: every parameter of chat.completions.create and completions.create
@pytest.mark.parametrize(
    ("resource", "request_type", "refused"),
    [("chat", ChatRequest, REFUSED_BY_CHAT), ("completions", CompletionRequest, REFUSED_BY_COMPLETIONS)],
)
def test_every_field_of_the_official_client_is_known(resource, request_type, refused):
    import inspect

    from openai.resources.chat.completions import Completions as Chat
    from openai.resources.completions import Completions

    create = (Chat if resource == "chat" else Completions).create
    ours = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    known = {*request_type.__struct_fields__, *REFUSED_BY_BOTH, *refused, *IGNORED}
    assert {name for name in inspect.signature(create).parameters if name not in ours} - known == set()


# openai-python 3.54 and anthropic 2.12: every parameter of responses.create and messages.create
@pytest.mark.parametrize("dialect", ["responses", "messages"])
def test_every_field_of_a_dialects_client_is_known(dialect):
    import inspect

    from anthropic.resources.messages import Messages
    from openai.resources.responses import Responses

    create, rules = (Responses.create, RESPONSES_RULES) if dialect == "responses" else (Messages.create, MESSAGES_RULES)
    ours = {"self", "extra_headers", "extra_query", "extra_body", "timeout", "output_format"}
    known = {*rules.implemented, *rules.refused, *rules.ignored}
    assert {name for name in inspect.signature(create).parameters if name not in ours} - known == set()
    assert set(rules.implemented) & set(rules.refused) == set()
    assert {*rules.implemented, *rules.refused} & set(rules.ignored) == set()


@pytest.mark.parametrize("request_type", [ChatRequest, CompletionRequest])
def test_a_field_stands_in_one_table(request_type):
    refused = {**REFUSED_BY_BOTH, **(REFUSED_BY_CHAT if request_type is ChatRequest else REFUSED_BY_COMPLETIONS)}
    assert set(request_type.__struct_fields__) & set(refused) == set()
    assert {*request_type.__struct_fields__, *refused} & set(IGNORED) == set()
