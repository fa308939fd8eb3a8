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
)


@dataclass
class WorkerChanges:
    """For the worker: differences of its persistent rows."""

    forked: list[ForkedSequence] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    admitted: list[AdmittedSequence] = field(default_factory=list)
    progress: list[tuple[int, int]] = field(default_factory=list)
    appended: list[AppendedTokens] = field(default_factory=list)

    def fork(self, fork: ForkedSequence) -> None:
        """Forks come first at the worker. A row that was freed since the last step is overwritten, not released."""
        self.forked.append(fork)
        if fork.row in self.released:
            self.released.remove(fork.row)

    def release(self, row: int) -> None:
        """The row is given back; what was still to be said about it is void."""
        self.released.append(row)
        self.progress = [entry for entry in self.progress if entry[0] != row]
        self.appended = [entry for entry in self.appended if entry.row != row]


@dataclass
class ClientEvents:
    """For the client: sequences that began, grew by a choice of the core, or ended."""

    starts: list[SequenceStart] = field(default_factory=list)
    # (sequence_id, token_id) of outputs whose tokens the core chose, in order
    tokens: list[tuple[int, int]] = field(default_factory=list)
    logprobs: list[SequenceLogprobs] = field(default_factory=list)
    ends: list[SequenceEnd] = field(default_factory=list)
