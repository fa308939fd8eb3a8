"""JSON and HTTP that are broken, or right and meant to hurt."""

from __future__ import annotations

from .case import CHAT, COMPLETIONS, JSON, Case

GOOD = b'{"prompt":"Hi","max_tokens":2}'


def _body(name: str, body: bytes, *, allowed: tuple[int, ...] = (400,), path: str = COMPLETIONS) -> Case:
    return Case(name, path, body, allowed=allowed)


def _typed(content_type: str | None, *, extra: dict[str, str] | None = None) -> Case:
    headers = {} if content_type is None else {"Content-Type": content_type}
    return Case(
        f"content type {content_type!r} {extra or ''}", body=GOOD, headers=headers | (extra or {}), allowed=(415,)
    )


def _raw(name: str, request: bytes, *, allowed: tuple[int, ...] = (400,)) -> Case:
    return Case(name, raw=request, allowed=allowed)


def _head(*lines: bytes, path: bytes = b"/v1/completions", method: bytes = b"POST") -> bytes:
    return b"\r\n".join([method + b" " + path + b" HTTP/1.1", *lines]) + b"\r\n\r\n"


_NOT_JSON = {
    "empty body": b"", "null": b"null", "a list": b"[]", "a string": b'"x"', "a number": b"1", "true": b"true",
    "trailing comma": b'{"prompt":"Hi",}', "single quotes": b"{'prompt':'Hi'}", "no quotes": b"{prompt:1}",
    "comment": b'{"prompt":"Hi"/* x */}', "two objects": GOOD + GOOD, "rest behind it": GOOD + b"x",
    "cut off": GOOD[:-1], "cut off in a string": GOOD[:12], "only an opening": b"{", "only a closing": b"}",
    "NaN": b'{"prompt":"Hi","temperature":NaN}', "Infinity": b'{"prompt":"Hi","temperature":Infinity}',
    "-Infinity": b'{"prompt":"Hi","temperature":-Infinity}', "hexadecimal": b'{"prompt":"Hi","max_tokens":0x2}',
    "leading zero": b'{"prompt":"Hi","max_tokens":02}', "plus sign": b'{"prompt":"Hi","max_tokens":+2}',
    "point without digits": b'{"prompt":"Hi","temperature":1.}', "UTF-16": GOOD.decode().encode("utf-16"),
    "UTF-32": GOOD.decode().encode("utf-32"), "Latin-1": b'{"prompt":"\xfc"}', "a lone byte": b'{"prompt":"\xff"}',
    "overlong UTF-8": b'{"prompt":"\xc0\xaf"}', "a surrogate in UTF-8": b'{"prompt":"\xed\xa0\x80"}',
    "half a character": b'{"prompt":"\xe2\x82"}', "a lone high surrogate": b'{"prompt":"\\ud800"}',
    "a lone low surrogate": b'{"prompt":"\\udc00x"}', "surrogates in the wrong order": b'{"prompt":"\\udc00\\ud800"}',
    "unknown escape": b'{"prompt":"\\x41"}', "short escape": b'{"prompt":"\\u12"}',
    "raw newline in a string": b'{"prompt":"a\nb"}', "raw NUL in a string": b'{"prompt":"a\x00b"}',
    "NUL behind it": GOOD + b"\x00", "byte order mark": b"\xef\xbb\xbf" + GOOD, "a form": b"prompt=Hi&max_tokens=2",
    "XML": b"<prompt>Hi</prompt>", "a pickle": b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00\x8c\x01x\x94.",
    "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03", "control characters": bytes(range(1, 32)),
    "nested lists": b"[" * 100_000, "nested objects": b'{"prompt":' * 50_000,
    "nested inside a field": b'{"prompt":"Hi","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a number of 100,000 digits": b'{"prompt":"Hi","max_tokens":' + b"9" * 100_000 + b"}",
    "an exponent out of range": b'{"prompt":"Hi","temperature":1e999}',
    "an exponent of 1,000 digits": b'{"prompt":"Hi","temperature":1e' + b"9" * 1000 + b"}",
}  # fmt: skip

CASES = [
    *(_body(name, body) for name, body in _NOT_JSON.items()),
    *(
        _typed(content_type)
        for content_type in (
            None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
            "application/xml", "application/json; charset=utf-16", "application/jsonx", "application/octet-stream",
        )
    ),
    *(_typed("application/json", extra={"Content-Encoding": coding}) for coding in ("gzip", "br", "deflate", "zstd")),
    Case("body of 33 MiB", COMPLETIONS, b'{"prompt":"' + b"x" * (33 * 2**20) + b'"}', allowed=(413,)),
    Case("declared 10 GiB", raw=_head(b"Host: x", b"Content-Type: application/json", b"Content-Length: 10737418240"),
         allowed=(413,)),
    Case("header of 70 KiB", body=GOOD, headers=JSON | {"X-Long": "x" * 70_000}, allowed=(400, 431)),
    Case("101 headers", body=GOOD, headers=JSON | {f"X-{n}": "1" for n in range(101)}, allowed=(431,)),
    _raw("no version", b"POST /v1/completions\r\n\r\n", allowed=(400, 415)),
    _raw("HTTP/9.9", b"POST /v1/completions HTTP/9.9\r\nHost: x\r\n\r\n"),
    _raw("not HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 64),
    _raw("negative length", _head(b"Host: x", b"Content-Type: application/json", b"Content-Length: -1")),
    _raw("length that is no number", _head(b"Host: x", b"Content-Type: application/json", b"Content-Length: two")),
    _raw("two lengths", _head(b"Host: x", b"Content-Type: application/json", b"Content-Length: 5", b"Content-Length: 6")
         + b"12345"),
    _raw("chunk size that is no number",
         _head(b"Host: x", b"Content-Type: application/json", b"Transfer-Encoding: chunked") + b"zz\r\nabc\r\n"),
    _raw("length and chunks",
         _head(b"Host: x", b"Content-Type: application/json", b"Content-Length: 4", b"Transfer-Encoding: chunked")
         + b"0\r\n\r\n"),
    _raw("no Host", _head(b"Content-Type: application/json", b"Content-Length: %d" % len(GOOD)) + GOOD),
    _raw("two Hosts",
         _head(b"Host: x", b"Host: x", b"Content-Type: application/json", b"Content-Length: %d" % len(GOOD)) + GOOD),
    _raw("header without a colon", _head(b"Host: x", b"nonsense")),
    _raw("NUL in a header", _head(b"Host: x", b"X-A: a\x00b", b"Content-Length: 0")),
    _body("duplicate keys, both wrong", b'{"prompt":"Hi","max_tokens":"x","max_tokens":"y"}'),
    _body("an empty chat", b"{}", path=CHAT),
    _body("an empty completion", b"{}"),
    _body("a prompt under another name", b'{"promt":"Hi"}'),
    _body("misspelt field", b'{"prompt":"Hi","max_token":2}'),
    _body("misspelt form", b'{"prompt":"Hi","response_fromat":{"type":"json_object"}}'),
]  # fmt: skip
