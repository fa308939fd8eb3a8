"""What happened since the last SchedulerOutput, collected until the next one."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.messages import (
    AdmittedSequence,
    AppendedTokens,
    ForkedSequence,
    SequenceEnd,
    SequenceLogprobs,
    SequenceStart,
    SequenceVector,
)


@dataclass
class WorkerChanges:
    """For the worker: differences of its persistent rows."""

    forked: list[ForkedSequence] = field(default_factory=list)
    # by row, in order
    released: dict[int, None] = field(default_factory=dict)
    admitted: list[AdmittedSequence] = field(default_factory=list)
    progress: dict[int, int] = field(default_factory=dict)
    appended: dict[int, list[AppendedTokens]] = field(default_factory=dict)

    def fork(self, fork: ForkedSequence) -> None:
        """Forks come first at the worker. A row that was freed since the last step is overwritten, not released."""
        assert fork.parent_row not in self.appended, "the worker forks before it appends"
        self.forked.append(fork)
        self.released.pop(fork.row, None)

    def append(self, appended: AppendedTokens) -> None:
        self.appended.setdefault(appended.row, []).append(appended)

    def release(self, row: int) -> None:
        """The row is given back; what was still to be said about it is void."""
        num_admitted = len(self.admitted)
        self.admitted = [sequence for sequence in self.admitted if sequence.row != row]
        if len(self.admitted) == num_admitted:  # else the worker has not heard of the sequence
            self.released[row] = None
        self.progress.pop(row, None)
        self.appended.pop(row, None)


@dataclass
class ClientEvents:
    """For the client: sequences that began, grew by a choice of the core, or ended."""

    starts: list[SequenceStart] = field(default_factory=list)
    # (sequence_id, token_id) of outputs whose tokens the core chose, in order
    tokens: list[tuple[int, int]] = field(default_factory=list)
    logprobs: list[SequenceLogprobs] = field(default_factory=list)
    ends: list[SequenceEnd] = field(default_factory=list)
    vectors: list[SequenceVector] = field(default_factory=list)
