"""One further process of a server, as the first one holds it: from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

from quire.engine_client.child_process import ChildProcess
from quire.engine_core.launch_document import encode_document
from quire.interfaces.gateway.processes.channel import Channel
from quire.interfaces.gateway.processes.document import ProcessDocument

_PROGRAM = "quire.interfaces.gateway.processes.member"


class Process:
    def __init__(self, number: int, document: ProcessDocument) -> None:
        """Blocks until it has been started."""
        self.number = number
        self.seat = document.seat
        self.is_loaded = False
        self.is_attached = False
        # where it waits for the engine, until both have met
        self.folder: str | None = None
        # given by whoever starts it
        self.channel: Channel
        self.child = ChildProcess(encode_document(document), [], document.descriptors, program=_PROGRAM)

    async def wait_end(self) -> str:
        """How it ended. To be waited for once."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self.child.end_descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self.child.end_descriptor)
        return self.child.how_it_ended()

    def kill(self) -> None:
        """At once, and all that it has started."""
        if not self.child.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)
