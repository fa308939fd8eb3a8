"""Everything that names a place from which something could be fetched. Nothing is fetched."""

from __future__ import annotations

from typing import Any

from .case import Case, chat, shown

# {trap}: host and port of a server that nobody may ask
URLS = [
    "http://{trap}/", "http://127.0.0.1/", "http://localhost/", "http://[::1]/", "http://0.0.0.0/", "http://127.1/",
    "http://2130706433/", "http://0x7f000001/", "http://0177.0.0.1/", "http://[::ffff:127.0.0.1]/", "http://[fd00::1]/",
    "http://169.254.169.254/latest/meta-data/", "http://[fe80::1]/", "http://10.0.0.1/", "http://192.168.0.1/",
    "http://172.16.0.1/", "http://ok@127.0.0.1/", "http://ok\\@127.0.0.1/", "http://127.0.0.1#@ok/",
    "http://127.0.0.1%00.example.com/", "http://127\u30020\u30020\u30021/", "http://\u2460\u2461\u2466.0.0.1/",
    "https://{trap}/x.png", "HTTP://{trap}/", "http:{trap}/", "//{trap}/x", "http:///x", "http://", "http://{trap}:99999/",
    "file:///etc/passwd", "file://localhost/etc/passwd", "FILE:///proc/self/environ", "file:/etc/passwd",
    "/etc/passwd", "../../etc/passwd", "C:\\windows\\win.ini", "ftp://{trap}/x", "gopher://{trap}/_x", "dict://{trap}/x",
    "ldap://{trap}/", "jar:http://{trap}!/", "data:image/png;base64,", "data:image/png;base64,AAAA", "data:,x", "data:",
    "data:image/png;base64,@@@@", "data:text/html,<script>", "data:image/svg+xml,<svg/>",
    "data:image/gif;base64," + "A" * 500_000, "s3://bucket/key", "gs://bucket/key",
    "blob:http://{trap}/x", "about:blank",
    "javascript:alert(1)", "", " ", "\x00", "x" * 5000, "http://" + "a" * 5000 + "/", "http://{trap}/" + "../" * 1000,
]  # fmt: skip


def _part(kind: str, value: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, {"type": kind, kind: value}]}]


CASES: list[Case] = [
    *(chat(f"image {shown(url)}", messages=_part("image_url", {"url": url})) for url in URLS),
    *(chat(f"video {shown(url)}", messages=_part("video_url", {"url": url})) for url in URLS[:8]),
    *(chat(f"sound {shown(url)}", messages=_part("audio_url", {"url": url})) for url in URLS[:8]),
    *(
        chat(f"image {shown(value)}", messages=_part("image_url", value))
        for value in (None, 5, [], {}, {"url": None}, {"url": 5}, {"url": []}, "{trap}", {"detail": "high"})
    ),
    *(
        chat(f"sound {shown(value)}", messages=_part("input_audio", value))
        for value in ({"data": "AAAA", "format": "wav"}, {"data": "AAAA", "format": "opus"}, {}, None, "x")
    ),
]
