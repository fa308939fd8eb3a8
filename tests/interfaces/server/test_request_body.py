"""From bytes to a struct, without a server."""

import gc
from contextlib import nullcontext

import msgspec
import pytest

from quire.interfaces.server.request_body import parse_request
from quire.interfaces.server.wire.errors import ApiError
from quire.interfaces.server.wire.field_rules import FieldRules


class Body(msgspec.Struct):
    prompt: list[object]


RULES = FieldRules(Body, {})
MANY_LISTS = b'{"prompt": [' + b"[]," * 100_000 + b"[]]}"


@pytest.mark.parametrize("data", [MANY_LISTS, MANY_LISTS[:-1]], ids=["good", "not JSON"])
def test_nothing_is_collected_while_a_long_body_is_parsed(data):
    seen = []

    def collected(phase, _):
        seen.append(gc.isenabled())

    gc.callbacks.append(collected)
    try:
        with nullcontext() if data is MANY_LISTS else pytest.raises(ApiError):
            assert len(parse_request(data, Body, RULES).prompt) == 100_001
    finally:
        gc.callbacks.remove(collected)
    # that of the moment after, perhaps
    assert len(seen) <= 2
    assert gc.isenabled()


def test_who_has_no_collector_gets_none():
    gc.disable()
    try:
        parse_request(MANY_LISTS, Body, RULES)
        assert not gc.isenabled()
    finally:
        gc.enable()
