"""What clients heard, and whether it was right.

A request ends exactly once: with its whole right text, or with a documented error, and that only if a fault was on
while it ran. What it heard before an error is a beginning of the right text: anything else is another request's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# codes of the errors that a fault may cause
FAULT_CODES = ("engine_restarted", "service_unavailable")
FINISHED, FAILED, REFUSED, BROKEN = "finished", "failed", "refused", "broken"


@dataclass
class Record:
    """One request: `end` is finished, failed (an error, after a start), refused (503), or broken (no end was heard)."""

    prompt: str
    began: float
    ended: float = 0.0
    text: str = ""
    end: str = BROKEN
    code: str | None = None
    num_ends: int = 0


@dataclass
class History:
    """All records of a run, the right answers, and when faults were on."""

    right: dict[str, str] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    faults: list[tuple[float, float]] = field(default_factory=list)
    # the server itself was ended: connections may just break then
    may_break: bool = False
    # codes of the errors that are documented for what is done to the server
    codes: tuple[str, ...] = FAULT_CODES

    def counts(self) -> dict[str, int]:
        ends = [record.end for record in self.records]
        return {end: ends.count(end) for end in (FINISHED, FAILED, REFUSED, BROKEN)}

    def mistakes(self) -> list[str]:
        """What must not have been, each with its request."""
        return [f"{record.end} {record.prompt!r}: {why}" for record in self.records if (why := self._mistake(record))]

    def _mistake(self, record: Record) -> str | None:
        right = self.right[record.prompt]
        if record.end == FINISHED and record.text != right:
            return f"wrong text {record.text[:80]!r}"
        if not right.startswith(record.text):
            return f"what was heard is no beginning of the right text: {record.text[:80]!r}"
        if record.num_ends > 1:
            return f"it ended {record.num_ends} times"
        if record.end == BROKEN and not self.may_break:
            return "neither an end nor an error was heard"
        if record.end in (FAILED, REFUSED) and not self._was_in_a_fault(record):
            return f"error {record.code} without a fault"
        if record.end in (FAILED, REFUSED) and record.code not in self.codes:
            return f"error {record.code!r} is not documented for faults"
        return None

    def _was_in_a_fault(self, record: Record) -> bool:
        return any(record.began <= end and begin <= record.ended for begin, end in self.faults)
