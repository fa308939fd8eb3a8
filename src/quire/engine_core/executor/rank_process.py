"""The process of a rank: a worker that computes its share of each layer, step by step as the core's own one does.

Started by `GroupExecutor` and never by hand. Owns nothing but its worker. It dies with its parent, whatever the parent
dies of.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import zmq

from quire.config import WorkerConfig
from quire.engine_core.executor.joining import RankFacts
from quire.engine_core.executor.keyed_channel import KeyedAddress, KeyedChannel, connected
from quire.engine_core.executor.placement import RankChannel
from quire.engine_core.executor.rank_channel import (
    Call,
    CallDone,
    Channel,
    Fact,
    Failed,
    Joined,
    RankMessage,
    RunStep,
    StepAnswer,
    StepDone,
    digest_of,
    encode_message,
    take_spilled,
    with_arrays,
)
from quire.engine_core.executor.shared_memory import SharedMeeting
from quire.errors import QuireError
from quire.failpoints import failpoint
from quire.observability.background_log import BackgroundHandler
from quire.observability.logging import line_formatter
from quire.processes.documents import read_document
from quire.processes.parent_watch import die_with_parent, watch_parent

if TYPE_CHECKING:
    from quire.worker.crossing import Facts
    from quire.worker.layers.ranks import Ranks
    from quire.worker.worker import Worker

logger = logging.getLogger(__name__)


class SharedBytes(msgspec.Struct):
    """Memory that a rank inherits."""

    descriptor: int
    num_bytes: int


class RankDocument(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a rank is told when it starts."""

    config: WorkerConfig
    # to the core: a descriptor, or where it is on another machine its address
    channel: int | KeyedAddress
    # where it meets the ranks of each of its groups, by direction
    memories: dict[str, SharedBytes]
    # the members of groups that have ranks on other machines, by direction
    crossings: dict[str, list[int]] = {}
    # the address of this machine where there are others; "": there are none
    host_ip: str = ""
    log_level: int = logging.WARNING


def ranks_around(
    config: WorkerConfig,
    meetings: dict[str, SharedMeeting],
    crossings: dict[str, list[int]],
    facts: Facts | None,
    host_ip: str,
) -> Ranks:
    """The groups of a rank, as it sees them. `facts`: by which it finds those on other machines."""
    import torch

    from quire.worker.crossing import StageCrossing, SumCrossing
    from quire.worker.kernels import relay_links, relay_sums
    from quire.worker.layers.ranks import Ranks

    shared = {name: torch.frombuffer(meeting.memory, dtype=torch.uint8) for name, meeting in meetings.items()}
    # in the same order everywhere: each waits for all members
    for direction, members in sorted(crossings.items()):
        assert facts is not None
        memory, rank = shared[direction], members.index(config.rank)
        if direction == "stage":
            relay_links(StageCrossing(memory, members, rank, facts, host_ip), memory)
        else:
            relay_sums(SumCrossing(memory, members, rank, facts, host_ip), memory, len(members))
    return Ranks.of(config, shared)


def serve(
    worker: Worker, channel: RankChannel, meetings: dict[str, SharedMeeting], *, answers_steps: bool = False
) -> None:
    """Until the core closes its end. `answers_steps`: this rank samples, and rank 0 does not."""
    while True:
        try:
            message = channel.receive()
            assert message is not None
            if isinstance(message, Fact):
                # it knew enough before
                continue
            for answer in _answers(worker, message, meetings, answers_steps):
                channel.send(encode_message(answer))
        except (EOFError, OSError):
            return


def _answers(
    worker: Worker, message: RankMessage, meetings: dict[str, SharedMeeting], answers_steps: bool
) -> list[RankMessage]:
    try:
        if isinstance(message, RunStep):
            is_corrupt = failpoint("rank_step")
            output = worker.execute(with_arrays(message.decision), message.answers)
            if any(meeting.is_aborted for meeting in meetings.values()):
                # what this one has computed means nothing
                return [Failed("", "another rank has gone away")]
            spilled = take_spilled(output)
            if answers_steps:
                return [*spilled, StepAnswer(output)]
            digest = digest_of(output)
            return [*spilled, StepDone(digest[::-1] if is_corrupt else digest)]
        assert isinstance(message, Call)
        return [CallDone(_call(worker, message.name, message.arguments))]
    except QuireError as error:
        _abort(meetings)
        return [Failed(type(error).__name__, str(error))]
    except Exception as error:
        # the others may be waiting for this rank inside the model
        _abort(meetings)
        logger.exception("a rank failed")
        return [Failed("", f"{type(error).__name__}: {error}")]


def _abort(meetings: dict[str, SharedMeeting]) -> None:
    for meeting in meetings.values():
        meeting.abort()


def _call(worker: Worker, name: str, arguments: list[Any]) -> Any:
    return msgspec.to_builtins(getattr(worker, name)(*arguments))


def _channel(told: int | KeyedAddress, config: WorkerConfig) -> RankChannel:
    if not isinstance(told, int):
        return KeyedChannel(connected(zmq.DEALER, told))
    # only stages of a pipeline answer what they have spilled
    return Channel(told, sends_beside=config.kv_connector is not None and config.grid.pipeline > 1)


def main() -> NoReturn:
    log = BackgroundHandler(sys.stderr)
    log.setFormatter(line_formatter())
    logging.basicConfig(level=logging.WARNING, handlers=[log])
    document = read_document(sys.stdin.buffer, RankDocument)
    logging.getLogger("quire").setLevel(document.log_level)
    watch_parent()
    die_with_parent()
    # it ends when the core says so
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = document.config
    channel = _channel(document.channel, config)
    meetings = {name: SharedMeeting(of.num_bytes, of.descriptor) for name, of in document.memories.items()}
    for meeting in meetings.values():
        meeting.close_descriptor()
    from quire.worker.worker import Worker

    facts = RankFacts(channel) if document.host_ip else None
    ranks = ranks_around(config, meetings, document.crossings, facts, document.host_ip)
    if facts is not None:
        channel.send(encode_message(Joined()))
    worker = Worker(config, ranks=ranks)
    answers_steps = config.grid.pipeline > 1 and config.rank == config.grid.first_of_last_stage
    serve(worker, channel, meetings, answers_steps=answers_steps)
    log.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
