"""The tables in docs/server.md and docs/metrics.md are those that the code makes."""

from pathlib import Path

import pytest

from quire.interfaces.server.anthropic_messages.fields import RULES as MESSAGES_RULES
from quire.interfaces.server.openai.requests import ChatRequest, CompletionRequest
from quire.interfaces.server.openai_responses.fields import RULES as RESPONSES_RULES
from quire.interfaces.server.reference import page_of, tables
from quire.interfaces.server.wire.field_rules import IGNORED, REFUSED_BY_BOTH, REFUSED_BY_CHAT, REFUSED_BY_COMPLETIONS

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("title", tables())
def test_a_table_is_in_the_documentation(title):
    page = DOCS / page_of(title)
    assert f"## {title}\n\n{tables()[title]}\n" in page.read_text(encoding="utf-8"), (
        f"{page.name}: run `python -m quire.interfaces.server.reference` and put its tables there"
    )


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
