"""What an endpoint takes and answers, declared where the endpoint stands: `openapi_extra=described(...)`.

/openapi.json is made of these declarations (openapi.py), and tests hold real answers and every field against them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.routing import BaseRoute

_KEY = "quire"


@dataclass(frozen=True, kw_only=True)
class Description:
    """Types are whatever msgspec can describe: a Struct, a dataclass, a list of one."""

    # of a JSON body
    request: type[msgspec.Struct] | None = None
    # no body at all asks for what `{}` asks for
    is_optional: bool = False
    # other media types that the body may have, with a sentence about each
    other_bodies: Mapping[str, str] = field(default_factory=dict)
    # None: something else than JSON
    answer: Any = None
    media_type: str = "application/json"
    status: int = 200
    # of each event, where the answer can be a stream
    event: Any = None
    event_words: str = "events `data: JSON`, the last one `data: [DONE]`; after a failure one holds an ErrorAnswer"
    event_media_type: str = "text/event-stream"
    # the body of an error, where it is not OpenAI's
    error: Any = None
    # statuses beyond those that every endpoint of its kind has
    errors: tuple[int, ...] = ()


def described(**facts: Any) -> dict[str, Any]:
    """For the decorator of an endpoint."""
    return {_KEY: Description(**facts)}


def description_of(route: BaseRoute) -> Description | None:
    """What was declared with `described`."""
    extra = getattr(route, "openapi_extra", None) or {}
    found: Description | None = extra.get(_KEY)
    return found
