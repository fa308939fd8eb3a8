"""What a client may send to /v1/batches."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.interfaces.gateway.files.answers import checked_lifetime
from quire.interfaces.server.wire.errors import invalid
from quire.interfaces.server.wire.field_rules import FieldRules, check_metadata

_WINDOW = re.compile(r"([1-9][0-9]{0,3})([mhd])")
_SECONDS = {"m": 60, "h": 3_600, "d": 86_400}
_LONGEST_WINDOW = 30 * 86_400


class BatchRequest(msgspec.Struct, kw_only=True):
    """POST /v1/batches."""

    input_file_id: Annotated[str, Meta(description="a file of purpose batch")]
    endpoint: Annotated[str, Meta(description="where all its lines go, such as /v1/chat/completions")]
    completion_window: Annotated[
        str, Meta(description='"24h", or another number of minutes, hours or days: 30m, 7d; at most 30 days')
    ]
    metadata: Annotated[dict[str, Any] | None, Meta(description="notes of the client: up to 16 short strings")] = None
    output_expires_after: Annotated[
        dict[str, Any] | None, Meta(description='{"anchor": "created_at", "seconds": N}: when its results are deleted')
    ] = None

    def window_seconds(self) -> int:
        found = _WINDOW.fullmatch(self.completion_window)
        seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
        if not 0 < seconds <= _LONGEST_WINDOW:
            shown = repr(self.completion_window[:20])
            raise invalid(
                f"completion_window={shown}: must be such as 24h, 30m or 7d, at most 30d.", "completion_window"
            )
        return seconds

    def output_lifetime(self) -> int | None:
        asked = self.output_expires_after
        if asked is None:
            return None
        anchor = asked.get("anchor")
        seconds = asked.get("seconds")
        if type(seconds) is not int or (anchor is not None and not isinstance(anchor, str)):
            raise invalid("output_expires_after.seconds: must be a whole number.", "output_expires_after")
        return checked_lifetime(anchor, seconds, "output_expires_after")

    def check(self, endpoints: tuple[str, ...]) -> None:
        """All of it, before anything is made."""
        if self.endpoint not in endpoints:
            text = f"endpoint={self.endpoint[:80]!r}: must be one of {', '.join(endpoints)}."
            raise invalid(text, "endpoint")
        self.window_seconds()
        self.output_lifetime()
        check_metadata(self.metadata)


RULES = FieldRules(BatchRequest, {})
