"""Garbage on the socket between a server and its engine, in both directions, beside the messages that belong there.

A frame follows from its number alone. Some are no messages at all, some were one once, some are messages of the other
direction, and some are whole messages about requests that nobody knows; none names a request that runs.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import zmq

from quire.message_encoding import encode
from quire.messages import (
    AbortRequests,
    ControlCall,
    ControlReply,
    EngineOutputs,
    EngineRequest,
    ExtendRequest,
    Message,
    SequenceEnd,
    SequenceStart,
    int_array,
    sequence_id_of,
)
from quire.sampling_params import SamplingParams

# how many frames each side sends in all
VARIABLE = "PACED_NOISE"
# a request comes seldom, a step often
_A_REQUEST, _A_STEP = 20, 2
_NOBODYS = 2**40


def to_core(seed: int) -> bytes:
    """What the engine's end of the socket gets."""
    return _frame(seed, _messages_to_core, _messages_to_client)


def to_client(seed: int) -> bytes:
    """What the server's end gets."""
    return _frame(seed, _messages_to_client, _messages_to_core)


def _messages_to_core(seed: int) -> list[Message]:
    number = _NOBODYS + seed
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    return [
        AbortRequests(request_ids=[number], sequence_ids=[sequence_id_of(number, 3)]),
        ExtendRequest(request_id=number, token_ids=[1, 2], is_final=True),
        ControlCall(call_id=number, name="echo", args={"a": [None, 1.5, "x"]}),
        EngineRequest(request_id=number, prompt_token_ids=[seed % 900, -1, 2**40], sampling=sampling),
    ]


def _messages_to_client(seed: int) -> list[Message]:
    one, other = sequence_id_of(_NOBODYS + seed, 0), sequence_id_of(_NOBODYS + seed, 1)
    return [
        EngineOutputs(
            step=seed,
            sequence_ids=int_array([one, other, one]),
            token_ids=int_array([seed, -5]),
            starts=[SequenceStart(one, -1)],
            ends=[SequenceEnd(other, "stop")],
        ),
        ControlReply(call_id=_NOBODYS + seed, result={"x": [1]}),
    ]


def _frame(seed: int, own: Callable[[int], list[Message]], others: Callable[[int], list[Message]]) -> bytes:
    random_ = random.Random(seed)
    message = encode(random_.choice(own(seed)))
    match seed % 6:
        case 0:
            return random_.randbytes(random_.randrange(3000))
        case 1:
            return _with_errors(message, random_)
        case 2:
            return message[: random_.randrange(len(message))]
        case 3:
            return encode(random_.choice(others(seed)))
        case 4:
            return random_.choice((b"\x91", b"\x81\xa1x", b"\xdd\xff\xff\xff\xff")) * random_.randrange(1, 50_000)
        case _:
            return message


def _with_errors(message: bytes, random_: random.Random) -> bytes:
    changed = bytearray(message)
    for _ in range(random_.randint(1, 4)):
        changed[random_.randrange(len(changed))] = random_.randrange(256)
    return bytes(changed)


class _Source:
    """So many frames, then it says that it is dry."""

    def __init__(self, make: Callable[[int], bytes], whither: str) -> None:
        self._make = make
        self._whither = whither
        self._most = int(os.environ.get(VARIABLE, "0"))
        self._seeds: Iterator[int] = count()
        self._num_sent = 0

    def frames(self, most: int) -> list[bytes]:
        if self._num_sent >= self._most:
            return []
        found = [self._make(seed) for seed in islice(self._seeds, most)]
        self._num_sent += len(found)
        if self._num_sent >= self._most:
            print(f"{self._num_sent} frames of noise went to the {self._whither}", file=sys.stderr, flush=True)
        return found


def noisy(link: Any) -> Any:
    """The server's end of the socket, which sends noise before its messages if the environment says so."""
    if VARIABLE not in os.environ:
        return link
    source, send = _Source(to_core, "core"), link.send

    def send_with_noise(message: Message) -> None:
        with contextlib.suppress(zmq.Again):  # there is nobody yet, or nobody any more
            for frame in source.frames(_A_REQUEST):
                link._socket.send(frame, zmq.NOBLOCK)
        send(message)

    link.send = send_with_noise
    return link


def make_noise_in_the_core() -> None:
    """The same for the engine's end; in its process."""
    from quire.engine_core.process import CoreSocket

    source, send = _Source(to_client, "server"), CoreSocket.send

    def send_with_noise(self: CoreSocket, message: Message) -> None:
        for frame in source.frames(_A_STEP):
            self._socket.send(frame)
        send(self, message)

    CoreSocket.send = send_with_noise  # type: ignore[method-assign]
