"""What crosses between the core and a rank: a step or a call, and what became of it, as MessagePack. No pickle.

core -> rank    ["step", SchedulerOutput, answers]     ["call", name, arguments]
rank -> core    ["step", digest or answer]             ["call", value]            ["error", kind, text]
                ["spilled", blocks], any number of them, before the answer to a step
both            ["fact", key, value] and ["joined"] before the first of them (joining.py)
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import socket
import threading
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from quire.kv_connectors.connector import STEP_DATA, StepTransfers
from quire.message_encoding import decode_array, encode_array
from quire.messages import SchedulerOutput, StepOutput

_DIGEST_BYTES = 8
_SPILLED_BYTES = 8 << 20


class RankMessage(msgspec.Struct, array_like=True, tag=True):
    """Root of what crosses."""


class RunStep(RankMessage):
    decision: SchedulerOutput
    # what the last stage of a pipeline said to earlier steps, since the last message
    answers: list[StepOutput] = []


class Call(RankMessage):
    name: str
    arguments: list[Any]


class StepDone(RankMessage):
    digest: bytes


class StepAnswer(RankMessage):
    """Of the rank that samples, where that is not rank 0."""

    output: StepOutput


class Spilled(RankMessage):
    """Of the first rank of a stage: its part of blocks that are kept elsewhere."""

    blocks: dict[bytes, bytes]


class CallDone(RankMessage):
    value: Any


class Fact(RankMessage):
    """Before ranks of several machines are joined: what one of them tells all."""

    key: str
    value: bytes


class Joined(RankMessage):
    """It has found those of all its groups."""


class Failed(RankMessage):
    # of an error of Quire's own, its class; else ""
    kind: str
    text: str


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_array)
_decoder = msgspec.msgpack.Decoder(
    RunStep | Call | StepDone | StepAnswer | Spilled | CallDone | Fact | Joined | Failed, dec_hook=decode_array
)


class Channel:
    """One end of the way between the core and a rank."""

    def __init__(self, descriptor: int, *, sends_beside: bool = False) -> None:
        """`sends_beside`: a thread sends, and this end receives meanwhile. Where both ends send what is longer than a
        socket holds, neither would receive before it has sent."""
        self._connection = Connection(descriptor)
        self._outbox: queue.SimpleQueue[bytes] | None = None
        if sends_beside:
            self._outbox = queue.SimpleQueue()
            threading.Thread(target=self._send_all, args=(self._outbox,), name="quire-rank-sender", daemon=True).start()

    def send(self, message: bytes) -> None:
        if self._outbox is None:
            self._connection.send_bytes(message)
        else:
            self._outbox.put(message)

    def _send_all(self, outbox: queue.SimpleQueue[bytes]) -> None:
        # OSError: the other end is gone, and whoever receives learns it
        with contextlib.suppress(OSError):
            while True:
                self._connection.send_bytes(outbox.get())

    def receive(self, seconds: float | None = None) -> RankMessage | None:
        """None: nothing came in time. EOFError: the other end is gone."""
        if not self._connection.poll(seconds):
            return None
        return decode_message(self._connection.recv_bytes())

    def close(self) -> None:
        self._connection.close()


def channel_pair() -> tuple[Channel, int]:
    """An end for the core, and the descriptor of the other one, which a rank inherits."""
    ours, theirs = socket.socketpair()
    return Channel(ours.detach()), theirs.detach()


def encode_message(message: RankMessage) -> bytes:
    return _encoder.encode(message)


def decode_message(data: bytes) -> RankMessage:
    message: RankMessage = _decoder.decode(data)
    return message


def encode_step(decision: SchedulerOutput, answers: list[StepOutput]) -> bytes:
    return _encoder.encode(RunStep(decision, answers))


def take_spilled(output: StepOutput) -> list[Spilled]:
    """What a step has spilled, taken out of its answer: a message may not be as long as all of it."""
    blocks = list(output.spilled.items())
    output.spilled = {}
    if not blocks:
        return []
    size = max(1, _SPILLED_BYTES // len(blocks[0][1]))
    return [Spilled(dict(blocks[start : start + size])) for start in range(0, len(blocks), size)]


def with_arrays(decision: SchedulerOutput) -> SchedulerOutput:
    """What of a decision has no type of its own, as it was before it crossed."""
    for name, value in decision.step_data.items():
        if isinstance(value, list) and len(value) == 2 and isinstance(value[1], bytes):
            decision.step_data[name] = decode_array(np.ndarray, value)
    if (transfers := decision.step_data.get(STEP_DATA)) is not None:
        decision.step_data[STEP_DATA] = msgspec.convert(transfers, StepTransfers)
    return decision


def digest_of(output: StepOutput) -> bytes:
    """Of everything that decides what comes next: ranks that differ in it have gone apart."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for column in (output.rows, output.token_ids, output.speculated, output.drafts):
        digest.update(np.ascontiguousarray(column, dtype=np.int64).tobytes())
    digest.update(repr(sorted(output.failures)).encode())
    return digest.digest()
