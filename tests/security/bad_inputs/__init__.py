"""Inputs that a server must refuse, written by hand, in groups. `ALL` names the groups."""

from __future__ import annotations

from . import grammars, grammars_regex, ids, media, messages, prompts, ranges, routes, stops, tools, transport, types
from .case import Case

ALL: dict[str, list[Case]] = {
    "transport": transport.CASES,
    "types": types.CASES,
    "ranges": ranges.CASES,
    "token ids": ids.TOKEN_IDS,
    "prompts": prompts.CASES,
    "messages": messages.CASES,
    "stop": stops.CASES,
    "tools": tools.CASES,
    "schemas": grammars.CASES,
    "regexes and grammars": grammars_regex.CASES,
    "media": media.CASES,
    "routes": routes.CASES,
    "headers": ids.HEADERS,
}
