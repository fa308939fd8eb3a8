"""Paths and methods that there are not."""

from __future__ import annotations

from .case import JSON, Case

_BODY = b'{"prompt":"Hi","max_tokens":2}'
_PATHS = [
    "/v1", "/v1/", "/v2/completions", "/v1/completions/", "/v1/complete", "/V1/completions", "/v1//completions",
    "//v1/completions", "/v1/./completions", "/v1/../v1/completions", "/v1%252fcompletions", "/v1/completions%00",
    "/v1/completions;a=b", "/v1\\completions", "/completions", "/generate", "/pooling", "/rerank",
    "/v1/engines", "/v1/fine_tuning/jobs", "/v1/images/generations", "/v1/audio/speech", "/v1/moderations",
    "/collective_rpc", "/reset_prefix_cache", "/pause", "/update_weights", "/abort_requests",
    "/server_info", "/start_profile", "/load_lora_adapter", "/docs", "/redoc", "/admin", "/.env", "/.git/config",
    "/etc/passwd", "/static/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/" + "x" * 5000,
]  # fmt: skip
_METHODS = [
    ("GET", "/v1/completions"), ("PUT", "/v1/completions"), ("DELETE", "/v1/completions"), ("PATCH", "/v1/completions"),
    ("GET", "/v1/chat/completions"), ("PUT", "/v1/chat/completions"), ("POST", "/v1/models"), ("DELETE", "/v1/models"),
    ("PUT", "/tokenize"), ("GET", "/detokenize"), ("POST", "/health"), ("POST", "/metrics"), ("DELETE", "/metrics"),
    ("POST", "/openapi.json"), ("TRACE", "/v1/completions"), ("FOO", "/v1/completions"), ("DELETE", "/health"),
]  # fmt: skip

CASES: list[Case] = [
    *(Case(f"POST {path[:60]}", path, _BODY, allowed=(404, 405, 400)) for path in _PATHS),
    *(
        Case(f"{method} {path}", path, _BODY if method != "TRACE" else b"", method, JSON, allowed=(405, 400))
        for method, path in _METHODS
    ),
]
