"""Files and batches through the official client."""

from __future__ import annotations

import json
import time
from typing import Any

import openai

from conformance.registry import Skip, check
from conformance.target import CHAT, MESSAGES, Target

_SECONDS = 60.0


def uploaded(target: Target, content: bytes) -> Any:
    try:
        return target.client.files.create(file=("lines.jsonl", content), purpose="batch")
    except (openai.NotFoundError, openai.BadRequestError) as error:
        raise Skip("the server keeps no files") from error


def lines_of(target: Target, **fields: Any) -> bytes:
    body = {"model": target.model, "messages": MESSAGES, "max_completion_tokens": 4, "temperature": 0, **fields}
    requests = [{"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": body} for number in range(3)]
    return "\n".join(json.dumps(request) for request in requests).encode()


@check
def a_file(target: Target) -> None:
    """A file is uploaded, listed, retrieved, read and deleted."""
    content = lines_of(target)
    file = uploaded(target, content)
    assert file.object == "file"
    assert (file.bytes, file.filename, file.purpose) == (len(content), "lines.jsonl", "batch")
    assert file.id in {one.id for one in target.client.files.list()}
    assert target.client.files.retrieve(file.id).created_at == file.created_at
    assert target.client.files.content(file.id).read() == content
    assert target.client.files.delete(file.id).deleted
    try:
        target.client.files.retrieve(file.id)
    except openai.NotFoundError:
        return
    raise AssertionError("it is still there")


@check
def a_batch(target: Target) -> None:
    """A batch is made and ends; its output has an answer for each line."""
    file = uploaded(target, lines_of(target))
    fields = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    batch = target.client.batches.create(**fields, metadata={"a": "b"})
    assert batch.object == "batch"
    assert batch.metadata == {"a": "b"}
    deadline = time.monotonic() + _SECONDS
    while batch.status not in {"completed", "failed", "expired", "cancelled"} and time.monotonic() < deadline:
        time.sleep(0.1)
        batch = target.client.batches.retrieve(batch.id)
    assert batch.status == "completed", batch.status
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (3, 3, 0)
    lines = [json.loads(line) for line in target.client.files.content(batch.output_file_id).text.splitlines()]
    assert {line["custom_id"] for line in lines} == {"r0", "r1", "r2"}
    assert all(line["response"]["status_code"] == 200 for line in lines)
    assert lines[0]["response"]["body"]["object"] == "chat.completion"
    assert batch.id in {one.id for one in target.client.batches.list()}


@check
def a_batch_without_its_file(target: Target) -> None:
    """A batch of a file that is not there is refused."""
    uploaded(target, lines_of(target))
    try:
        target.client.batches.create(input_file_id="file-none", endpoint=CHAT, completion_window="24h")
    except openai.APIStatusError as error:
        assert error.status_code in {400, 404}, error.status_code
    else:
        raise AssertionError("no error")
