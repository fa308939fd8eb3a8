"""What a client may send to /v1/sessions. Turns have the fields of the endpoints that they resemble, but for a few."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from quire.interfaces.server.openai.known_fields import rules_for
from quire.interfaces.server.openai.requests import ChatRequest, CompletionRequest
from quire.interfaces.server.wire.field_rules import (
    REFUSED_BY_BOTH,
    REFUSED_BY_CHAT,
    REFUSED_BY_COMPLETIONS,
    FieldRules,
    Refused,
)


class SessionRequest(msgspec.Struct, kw_only=True):
    """POST /v1/sessions."""

    cache_salt: Annotated[
        str | None, Meta(description="shares the prefix cache only with requests and sessions of the same salt")
    ] = None


class ForkRequest(msgspec.Struct, kw_only=True):
    """POST /v1/sessions/{id}/fork, which has nothing to say."""


class RewindRequest(msgspec.Struct, kw_only=True):
    """POST /v1/sessions/{id}/rewind: exactly one of both."""

    num_turns: Annotated[int | None, Meta(description="so many turns are left")] = None
    num_tokens: Annotated[int | None, Meta(description="so many tokens are left; in a chat the end of a turn")] = None


_BY_BOTH: dict[str, Refused] = {
    "prompt_logprobs": Refused("only what is new is computed; send the whole as a request of its own"),
    "priority": Refused("turns of sessions have the priority 0", (0,)),
    "kv_transfer_params": Refused("a session has both halves of its turns in one server"),
    "cache_salt": Refused("it belongs to the session; give it when you open one"),
}
_BY_CHATS = {
    "continue_final_message": Refused("what was said stays as it is; send a new message", (False,)),
    "add_generation_prompt": Refused("a turn brings an answer; leave it out", (True,)),
    "chat_template": Refused("the model's own template writes the turns of a session"),
}
_BY_TEXTS = {
    "echo": Refused("the answer of a turn is what is new; leave it out", (False,)),
    "prompt_embeds": Refused("a session keeps tokens; send vectors to /v1/completions"),
}

# what turns refuse beyond the endpoints that they resemble
REFUSED_BY_TURNS = {**_BY_BOTH, **_BY_CHATS, **_BY_TEXTS}

_WHOLE = Refused("a fork has the whole past; rewind it afterwards")

OPEN_RULES = FieldRules(SessionRequest, {})
FORK_RULES = FieldRules(ForkRequest, {"num_turns": _WHOLE, "num_tokens": _WHOLE, "cache_salt": _BY_BOTH["cache_salt"]})
REWIND_RULES = FieldRules(RewindRequest, {})
CHAT_RULES = rules_for(ChatRequest, _BY_BOTH, _BY_CHATS, REFUSED_BY_BOTH, REFUSED_BY_CHAT)
TEXT_RULES = rules_for(CompletionRequest, _BY_BOTH, _BY_TEXTS, REFUSED_BY_BOTH, REFUSED_BY_COMPLETIONS)
