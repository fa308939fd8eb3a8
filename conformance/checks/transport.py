"""HTTP itself: connections, methods, bodies in pieces, ids."""

from __future__ import annotations

import json

from conformance.registry import check, check_each
from conformance.target import CHAT, MESSAGES, Target, answers_on

CLOSE = "Connection: close"


def body_of(target: Target) -> bytes:
    return json.dumps({"model": target.model, "messages": MESSAGES, "max_completion_tokens": 2}).encode()


@check_each({"/v1/models": "/v1/models", "404": "/v1/nowhere"})
def an_id(target: Target, row: object) -> None:
    """Each answer has an x-request-id of its own:"""
    ids = {target.get(str(row)).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    assert None not in ids


@check
def the_clients_id(target: Target) -> None:
    """The client sees the id of its request."""
    assert target.chat(max_completion_tokens=1)._request_id


@check
def a_date(target: Target) -> None:
    """Answers have a date and a length."""
    reply = target.get("/v1/models")
    assert reply.headers["date"]
    assert int(reply.headers["content-length"]) == len(reply.body)


@check
def two_requests_on_a_connection(target: Target) -> None:
    """A connection is kept for a second request."""
    replies = target.exchange(target.head("GET", "/v1/models") + target.head("GET", "/v1/models", CLOSE))
    assert [reply.status for reply in replies] == [200, 200]


@check
def pipelined_requests(target: Target) -> None:
    """Requests that come at once are answered in their order."""
    paths = ("/v1/models", "/v1/nowhere", f"/v1/models/{target.model}")
    data = b"".join(target.head("GET", path) for path in paths[:2]) + target.head("GET", paths[2], CLOSE)
    assert [reply.status for reply in target.exchange(data)] == [200, 404, 200]


@check
def a_pipelined_post(target: Target) -> None:
    """A POST and a GET that come at once are both answered."""
    body = body_of(target)
    post = target.head("POST", CHAT, "Content-Type: application/json", f"Content-Length: {len(body)}") + body
    replies = target.exchange(post + target.head("GET", "/v1/models", CLOSE))
    assert [reply.status for reply in replies] == [200, 200]
    assert replies[0].json["object"] == "chat.completion"


@check
def a_body_in_chunks(target: Target) -> None:
    """A body with Transfer-Encoding: chunked."""
    head = target.head("POST", CHAT, "Content-Type: application/json", "Transfer-Encoding: chunked", CLOSE)
    body = body_of(target)
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:9], body[9:])) + b"0\r\n\r\n"
    (reply,) = target.exchange(head + chunks)
    assert reply.status == 200


@check
def a_body_byte_by_byte(target: Target) -> None:
    """A request that arrives byte by byte."""
    body = body_of(target)
    data = target.head("POST", CHAT, "Content-Type: application/json", f"Content-Length: {len(body)}", CLOSE) + body
    with target.connected() as connection:
        for byte in data:
            connection.send(bytes([byte]))
        (reply,) = answers_on(connection)
    assert reply.status == 200


@check
def an_expectation(target: Target) -> None:
    """Expect: 100-continue is answered before the body comes."""
    body = body_of(target)
    lines = ("Content-Type: application/json", f"Content-Length: {len(body)}", "Expect: 100-continue", CLOSE)
    with target.connected() as connection:
        connection.sendall(target.head("POST", CHAT, *lines))
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        connection.sendall(body)
        (reply,) = answers_on(connection)
    assert reply.status == 200


@check
def a_head(target: Target) -> None:
    """HEAD is GET without the body."""
    reply = target.request("HEAD", "/v1/models")
    assert reply.status == 200, reply.status
    assert reply.body == b""


@check
def options(target: Target) -> None:
    """OPTIONS without CORS is answered, with Allow."""
    reply = target.request("OPTIONS", CHAT)
    assert reply.status in (200, 204, 405), reply.status
    assert "POST" in reply.headers["allow"]


@check
def a_trailing_slash(target: Target) -> None:
    """A trailing slash is 404 or 307, never 500."""
    assert target.post(CHAT + "/", {"messages": MESSAGES}).status in (307, 308, 404)


@check
def an_unknown_method(target: Target) -> None:
    """A method that HTTP does not know is 400, 405 or 501, with an error object."""
    (reply,) = target.exchange(target.head("BREW", "/v1/models", CLOSE))
    assert reply.status in (400, 405, 501), reply.status
    assert reply.error


@check
def a_charset(target: Target) -> None:
    """Content-Type with charset=utf-8 is JSON."""
    reply = target.post(CHAT, body_of(target), **{"Content-Type": "application/json; charset=utf-8"})
    assert reply.status == 200, reply.status


@check
def a_query_is_no_part_of_the_path(target: Target) -> None:
    """A query that nobody asked for does no harm (api-version, as Azure's clients send)."""
    assert target.get("/v1/models?api-version=2025-01-01").status == 200
