"""Whatever a log of a run may quote, however deep it lies; the rest of redaction is tested with replay."""

from __future__ import annotations

from typing import Any

import pytest

from quire.messages import ControlCall
from quire.observability.redaction import Redaction
from quire.observability.run_records import Received, Told, encode_record

SECRET = "Ann's letter"
REDACTION = Redaction(100, b"a secret")


def told(question: str, answer: Any) -> Any:
    record = REDACTION.of(Told(at=0.0, question=question, answer=answer))
    assert isinstance(record, Told)
    assert SECRET.encode() not in encode_record(record)
    return record.answer


@pytest.mark.parametrize(
    "value",
    [SECRET, [SECRET], [["x", [SECRET]]], {"a": {"b": [SECRET, 3]}}, (1, SECRET), SECRET.encode(), [SECRET.encode()]],
)
def test_arguments_are_exchanged_however_deep_they_lie(value: Any) -> None:
    call = ControlCall(call_id=0, name="something", args={"handles": value, "count": 3, "part": "steps"})
    record = REDACTION.of(Received(at=0.0, message=call))
    assert SECRET.encode() not in encode_record(record)
    assert isinstance(record, Received)
    assert isinstance(record.message, ControlCall)
    assert record.message.args["count"] == 3
    assert record.message.args["part"] == "steps"
    # equal ones stay equal
    assert REDACTION.of(Received(at=0.0, message=call)) == record


def test_answers_of_workers_keep_what_decides_alone() -> None:
    assert told("check_weights", f"{SECRET}: no such file") == "withheld"
    assert told("refuse", SECRET) == "withheld"
    state = told("adapter_state", {"state": "ready", "error": None, "content": SECRET})
    assert (state["state"], state["error"]) == ("ready", None)
    failed = told("adapter_state", {"state": "failed", "error": f"{SECRET} is no adapter", "content": ""})
    assert failed["error"] == "withheld"
    bytes.fromhex(told("digest_weights", SECRET))
    assert told("digest_weights", "one") != told("digest_weights", "another")
    assert told("measure_speculation", {"seconds_per_step": 0.5}) == {"seconds_per_step": 0.5}
    assert [told("arrived", [3, 4]), told("ask", True), told("find", None)] == [[3, 4], True, None]
