"""A batch as clients see it, and the ways from one state to the next."""

from __future__ import annotations

import enum
import secrets
from typing import Annotated

import msgspec

from quire.interfaces.gateway.batches.input_lines import LineError
from quire.interfaces.server.openai.responses import only


class Status(enum.StrEnum):
    """validating -> in_progress -> finalizing -> completed; failed from validating; cancelling -> cancelled and
    expired from all that are not over."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ENDED = frozenset({Status.COMPLETED, Status.FAILED, Status.EXPIRED, Status.CANCELLED})


class RequestCounts(msgspec.Struct):
    """Lines: all, answered with 200, answered otherwise or never run."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Errors(msgspec.Struct):
    """Why an input was refused as a whole."""

    data: list[LineError]
    object: Annotated[str, only("list")] = "list"


class _Cached(msgspec.Struct):
    cached_tokens: int = 0


class _Reasoning(msgspec.Struct):
    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct):
    """Tokens of all answers."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    input_tokens_details: _Cached = msgspec.field(default_factory=_Cached)
    output_tokens_details: _Reasoning = msgspec.field(default_factory=_Reasoning)


class Batch(msgspec.Struct, kw_only=True):
    """The object of the API; the storage keeps the same."""

    id: str
    object: Annotated[str, only("batch")] = "batch"
    endpoint: str
    errors: Errors | None = None
    input_file_id: str
    completion_window: str
    status: Status = Status.VALIDATING
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None
    model: str | None = None
    usage: BatchUsage | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def enter(self, status: Status, now: int) -> None:
        """The next state, with its time."""
        self.status = status
        setattr(self, f"{status.value}_at", now)


class BatchList(msgspec.Struct, kw_only=True):
    """A page of batches."""

    object: Annotated[str, only("list")] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch and what clients do not see of it."""

    batch: Batch
    tenant: str
    # the files that results are appended to; they become files of the API when the batch has ended
    good_file_id: str
    bad_file_id: str
    # seconds after which these are deleted
    output_expires_after: int | None = None


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(16)}"
