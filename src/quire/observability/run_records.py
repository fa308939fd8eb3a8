"""What a log of a run holds (run_log.py): inputs of an engine core, its decisions, and what others told it.

A core has no clock and draws no numbers, so it decides the same when it is given the same in the same order. Calls
of `step` are delimited by `Settled`; what stands before it came out of the call, or was asked within it. Times are
seconds since the log began.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from quire.config import EngineConfig
from quire.message_encoding import decode_array, encode_array
from quire.messages import EngineReady, SchedulerOutput, StepOutput, ToCore, WorkerCapacity

FORMAT = 1


class Record(msgspec.Struct, kw_only=True, array_like=True, tag=True, frozen=True):
    """Root of all records."""

    at: float


class Header(Record, tag="header", frozen=True):
    """What the core is built from, what ran it, and what may be asked of the log."""

    format: int
    # of Quire
    version: str
    # when it was, as a person reads it
    date: str
    config: EngineConfig
    # names its weights
    model: str
    # of this machine and of what Quire stands on: tokens need not be the same elsewhere
    machine: dict[str, str]
    # tokens, texts and images were replaced: decisions can be replayed, the model cannot
    is_redacted: bool = False


class Measured(Record, tag="measured", frozen=True):
    capacity: WorkerCapacity


class Ready(Record, tag="ready", frozen=True):
    """The core stands; what it was told at the start lies before."""

    ready: EngineReady


class Received(Record, tag="in", frozen=True):
    """A message, as it is handed to the core."""

    message: ToCore


class Failed(Record, tag="fail", frozen=True):
    """A request that the core could not take ends."""

    request_id: int
    reason: str
    num_outputs: int


class Decided(Record, tag="decided", frozen=True):
    """A step that goes to the workers: SchedulerOutput without what its requests have said already."""

    step: int
    # (parent, row, sequence, tokens, computed ones)
    forked: list[tuple[int, int, int, int, int]]
    released: list[int]
    # (row, sequence, tokens, computed ones, adapter)
    admitted: list[tuple[int, int, int, int, int]]
    progress: list[tuple[int, int]]
    # (row, tokens, whether the input is final)
    appended: list[tuple[int, list[int], bool]]
    # rows whose choices are restricted otherwise from now on
    masked: list[int]
    block_writes: np.ndarray
    swapped_out: np.ndarray
    swapped_in: np.ndarray
    block_copies: np.ndarray
    rows: np.ndarray
    num_tokens: np.ndarray
    # of step_data what is columns of numbers
    data: dict[str, np.ndarray]

    @classmethod
    def of(cls, decision: SchedulerOutput, at: float) -> Decided:
        return cls(
            at=at,
            step=decision.step,
            forked=[
                (fork.parent_row, fork.row, fork.sequence_id, fork.num_total_tokens, fork.num_computed_tokens)
                for fork in decision.forked
            ],
            released=decision.released,
            admitted=[
                (new.row, new.sequence_id, len(new.token_ids), new.num_computed_tokens, new.adapter)
                for new in decision.admitted
            ],
            progress=decision.progress,
            appended=[(more.row, more.token_ids, more.is_final) for more in decision.appended],
            masked=list(decision.masked),
            block_writes=decision.block_writes,
            swapped_out=decision.swapped_out,
            swapped_in=decision.swapped_in,
            block_copies=decision.block_copies,
            rows=decision.rows,
            num_tokens=decision.num_tokens,
            data={name: value for name, value in decision.step_data.items() if isinstance(value, np.ndarray)},
        )


class Answered(Record, tag="answered", frozen=True):
    """The results of a step."""

    answer: StepOutput


class StepFailed(Record, tag="failed", frozen=True):
    """A step failed as a whole."""

    kind: str
    reason: str


class Told(Record, tag="told", frozen=True):
    """The answer of somebody outside, a worker or a connector, to a question of the core."""

    question: str
    answer: Any = None
    # the class of an error, and what it says
    kind: str = ""
    reason: str = ""


class Settled(Record, tag="settled", frozen=True):
    """A call of `step` has returned."""


class Died(Record, tag="died", frozen=True):
    """A call of `step` raised, and the engine has ended."""

    kind: str
    reason: str


class Closed(Record, tag="closed", frozen=True):
    """Nothing more follows. No reason: the engine ended in good order."""

    reason: str = ""


RunRecord: TypeAlias = (
    Header | Measured | Ready | Received | Failed | Decided | Answered | StepFailed | Told | Settled | Died | Closed
)


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        # most columns of most steps are empty
        return encode_array(value) if value.size else (value.shape[0] if value.ndim == 2 else 0, b"")
    if isinstance(value, Path):
        return str(value)
    if callable(value):
        # a logits processor of this process: decisions need its name alone
        return {"name": getattr(value, "__qualname__", type(value).__qualname__)}
    return encode_array(value)


def _decode(kind: type, value: Any) -> Any:
    return Path(value) if issubclass(kind, Path) else decode_array(kind, value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode)
_decoder = msgspec.msgpack.Decoder(RunRecord, dec_hook=_decode)


def encode_record(record: RunRecord) -> bytes:
    return _encoder.encode(record)


def decode_record(data: bytes) -> RunRecord:
    """Raises msgspec.DecodeError for what no record of this version looks like."""
    record: RunRecord = _decoder.decode(data)
    return record
