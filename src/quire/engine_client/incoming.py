"""Messages from a socket, decoded strictly: a frame that is none is counted and dropped, and the first one logged."""

from __future__ import annotations

import logging

import zmq

from quire.message_encoding import decode_to_client
from quire.messages import ToClient

logger = logging.getLogger(__name__)


class Incoming:
    """What a core says."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._num_garbage_frames = 0

    def take(self) -> list[ToClient]:
        """All that is there; does not wait."""
        messages: list[ToClient] = []
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(decode_to_client(frame))
            except Exception as error:
                # Any: bytes from elsewhere may also exhaust the decoder's recursion or its memory.
                self._count(frame, error)

    def statistics(self) -> dict[str, float]:
        return {"garbage_frames_dropped": self._num_garbage_frames}

    def _count(self, frame: bytes, error: Exception) -> None:
        self._num_garbage_frames += 1
        if self._num_garbage_frames == 1:
            text = "dropped a frame of %d bytes that is no message (%s); others will be counted only"
            logger.warning(text, len(frame), error)
