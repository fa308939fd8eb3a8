"""The process of an engine core: reads its configuration, builds the core, then carries messages until it is ended.

Owns the core's sockets and the process's signals. It is started by the engine client and never by hand. The last thing
it says is why it ends, unless it was asked to. It dies with its parent, whatever the parent dies of.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

import zmq

from quire.engine_core.driver import CoreDriver, failure_at_start
from quire.engine_core.executor.torch_library import load_torch_library
from quire.engine_core.further_clients import FurtherClients
from quire.engine_core.launch_document import LaunchDocument
from quire.engine_core.pulse import PulseWriter
from quire.engine_core.unread_frames import answer_to_no_message
from quire.failpoints import failpoint
from quire.message_encoding import decode_to_core, encode
from quire.messages import AbortRequests, EngineFailed, EngineOutputs, Message, ToClient, split_sequence_id
from quire.observability.background_log import BackgroundHandler
from quire.observability.logging import line_formatter
from quire.observability.step_times import NoStepTimes
from quire.processes.arrivals import Arrivals
from quire.processes.documents import read_document
from quire.processes.parent_watch import die_with_parent, watch_parent

# Time for the last message to reach a parent that is there.
_LINGER_MILLISECONDS = 1000
# Its socket listens already: only a machine that stands still takes longer.
_MEETING_MILLISECONDS = 5000
logger = logging.getLogger(__name__)


class Signals:
    """SIGTERM and SIGINT ask for an orderly end, which comes after the running step; they wake a sleeping poll.

    Made when the core stands: until then there is nothing to put in order, and a signal ends the process at once.
    """

    def __init__(self) -> None:
        self.is_end_asked = False
        self.descriptor, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_end_asked = True


class CoreSocket:
    """The core's end of the socket. A frame that is no message is logged, and answered if it says whom it is for."""

    def __init__(self, endpoint: str, pulse: PulseWriter) -> None:
        self._pulse = pulse
        self.times = NoStepTimes()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = _LINGER_MILLISECONDS
        self._meeting = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self.arrivals = Arrivals()
        self.arrivals.watch(self._socket.fileno())
        self.further = FurtherClients(self._context, self._poller, self.arrivals)

    def has_met_its_parent(self) -> bool:
        """Waits for it. ZeroMQ's threads of both sides do it, whatever the parent is busy with."""
        has_met = bool(self._meeting.poll(_MEETING_MILLISECONDS))
        self._socket.disable_monitor()
        self._meeting.close(0)
        return has_met

    def watch(self, descriptor: int) -> None:
        """`wait` also returns when there is something to read here."""
        self._poller.register(descriptor, zmq.POLLIN)
        self.arrivals.watch(descriptor)

    def wait(self, seconds: float | None) -> None:
        """Until something has arrived, at most so long; this alone counts as rest."""
        self._pulse.rests()
        self._poller.poll(None if seconds is None else int(seconds * 1000) + 1)
        self._pulse.wakes()

    def send(self, message: Message) -> None:
        frame = encode(message)
        self._socket.send(frame)
        self.times.sent("clients", len(frame))

    def deliver(self, message: ToClient) -> None:
        """To the client that it is for."""
        if self.further.clients:
            self.further.send(message, self.send)
        else:
            self.send(message)

    def hand_to(self, driver: CoreDriver) -> bool:
        """Everything that has arrived. Whether there was anything."""
        self.times.begin()
        has_come = False
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            has_come = True
            self._pulse.receives()
            self._take(frame, driver)
            self._pulse.has_done()
        if self.further.clients:
            # not counted as received: the pulse is compared with what the first client has sent
            has_come |= self.further.hand_to(driver, self._pulse.has_done)
        self.times.ends("receive")
        return has_come

    def _take(self, frame: bytes, driver: CoreDriver) -> None:
        try:
            message = decode_to_core(frame)
        except Exception as error:
            # Any: bytes from elsewhere may also exhaust the decoder's recursion or its memory.
            self._refuse(frame, error, driver)
        else:
            driver.handle(message)

    def _refuse(self, frame: bytes, error: Exception, driver: CoreDriver) -> None:
        answer = answer_to_no_message(frame, error)
        what = "dropped" if answer is None else "answered with an error"
        logger.warning("%s a frame of %d bytes that is no message: %s", what, len(frame), error)
        if answer is None:
            return
        self.send(answer)
        if isinstance(answer, EngineOutputs):
            # It may be running, if the frame was to extend it. Its reader has heard the last of it.
            driver.handle(AbortRequests(request_ids=[split_sequence_id(answer.ends[0].sequence_id)[0]]))

    def close(self) -> None:
        self.arrivals.close()
        self.further.close()
        self._socket.close()
        self._context.term()


def serve(driver: CoreDriver, link: CoreSocket, signals: Signals, pulse: PulseWriter) -> None:
    """The loop: messages in, a step, messages out. Sleeps when there is no work."""
    driver.core.watch_steps(pulse.begins)
    driver.core.watch_arrivals(link.arrivals.descriptor)
    for descriptor in driver.core.loss_descriptors():
        link.watch(descriptor)
    link.further.serve(driver)
    link.times = driver.times
    pulse.serves()
    while not signals.is_end_asked and not driver.is_dead:
        _send_all(driver, link)
        seconds = driver.tend()
        if not driver.has_work:
            link.wait(seconds)
        if link.hand_to(driver):
            link.arrivals.hurry(driver.step)
        else:
            driver.step()
        pulse.has_done()
    failpoint("end_asked")
    _send_all(driver, link)
    failpoint("end_last_messages")
    driver.shutdown()


def _send_all(driver: CoreDriver, link: CoreSocket) -> None:
    link.times.begin()
    for message in driver.take():
        failpoint("before_send")
        link.deliver(message)
    link.times.ends("deliver")


def run(document: LaunchDocument, core: str | None) -> int:
    """Builds the core and serves it; the exit status."""
    pulse = PulseWriter(document.pulse_descriptor)
    link = CoreSocket(document.endpoint, pulse)
    if link.has_met_its_parent():
        # Nothing is left to be cleaned up, so from here on the process need not be awake to end.
        shutil.rmtree(document.folder, ignore_errors=True)
        die_with_parent()
    try:
        failpoint("start_process")
        driver = CoreDriver.build(document.config, core)
    except Exception as error:
        failure = failure_at_start(error)
        if failure.kind == "EngineError":
            logger.error("the engine core could not be built", exc_info=error)
        link.send(failure)
        link.close()
        return 1
    signals = Signals()
    link.watch(signals.descriptor)
    die_with_parent()
    try:
        serve(driver, link, signals, pulse)
    except Exception as error:
        logger.exception("the loop of the engine core failed")
        last_word = f"The engine failed: {type(error).__name__}: {error}."
        link.deliver(EngineFailed(kind="EngineDeadError", error=last_word))
        driver.is_dead = True
    link.close()
    return 1 if driver.is_dead and not signals.is_end_asked else 0


def main() -> NoReturn:
    parser = argparse.ArgumentParser(prog="quire.engine_core.process", description="started by the engine client")
    parser.add_argument("--core", help='builder of the core, as "module:function"')
    arguments = parser.parse_args()
    log = BackgroundHandler(sys.stderr)
    log.setFormatter(line_formatter())
    logging.basicConfig(level=logging.WARNING, handlers=[log])
    document = read_document(sys.stdin.buffer, LaunchDocument)
    if arguments.core is None and document.config.worker.grid.size == 1:
        # Ranks have processes of their own; another core is somebody's own, and may have no worker.
        threading.Thread(target=load_torch_library, name="quire-torch-library", daemon=True).start()
    # of libraries only what is wrong; of ours as much as whoever started this wants
    logging.getLogger("quire").setLevel(document.log_level)
    watch_parent(document.folder)
    status = run(document, arguments.core)
    log.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    failpoint("end_exit")
    # Threads of libraries and destructors of gigabytes have no say in how long the end takes.
    os._exit(status)


if __name__ == "__main__":
    main()
