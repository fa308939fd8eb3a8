"""The link between a client and a core: messages one way, messages the other. These keep this protocol.

in_thread      the core has a thread of this process; LLM's, unless engine_process=True
socket_link    the core has a process, reached over a socket; AsyncLLM's, unless engine_process=False
attached_link  the core has a process that somebody else has started, and shares
replica_link   several cores, each behind a link of its own

The first message that comes is EngineReady, or EngineFailed if the core could not be built. Whatever kills the core
later is an EngineFailed too, made by the link itself if the core had no time to send one; nothing comes after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from quire import errors
from quire.messages import EngineFailed, ToClient, ToCore

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.engine_client.engine_process import EngineProcess
    from quire.engine_client.replica_link import Loss


class Link(Protocol):
    """Used by one thread at a time."""

    @property
    def processes(self) -> tuple[EngineProcess, ...]:
        """Of the core, if it has one of its own; of each, if there are several."""

    def send(self, *messages: ToCore) -> None:
        """In this order; a core in this process hears of all of them between the same two steps. Never blocks and never
        raises because of the other side; its death is reported by `receive`."""

    def receive(self, timeout: float | None = None) -> list[ToClient]:
        """What has arrived. Waits for it at most `timeout` seconds; None waits until something comes."""

    def keep_back_while(self, is_patient: Callable[[], bool]) -> None:
        """While it is true, outputs in which nothing ends may wait for those that come behind them. It is asked in the
        core's thread, and only a core in this process cares: waking its client there takes the interpreter from it."""

    def watch_losses(self, tell: Callable[[Loss], None]) -> None:
        """Has `tell` called when one of several cores has died and the others go on. Where there is one, never."""

    def descriptors(self) -> tuple[int, ...]:
        """Files that become readable when `receive(0)` is worth a call; empty if waiting must be done in `receive`."""

    def statistics(self) -> dict[str, float]: ...

    def close(self) -> None:
        """Ends the core and frees everything; may be called twice."""


def open_link(config: EngineConfig, *, in_own_process: bool, core: str | None = None) -> Link:
    """The link that an interface needs. `core` names another builder of a core, as "module:function"."""
    if config.data_parallel_size > 1:
        from quire.engine_client.replica_link import ReplicaLink
        from quire.engine_client.socket_link import SocketLink

        return ReplicaLink(config, lambda copy: SocketLink(copy, core=core))
    if in_own_process:
        from quire.engine_client.socket_link import SocketLink

        return SocketLink(config, core=core)
    from quire.engine_client.in_thread import InThreadLink
    from quire.engine_core.driver import CoreDriver

    return InThreadLink(lambda: CoreDriver.build(config, core))


def error_of(failure: EngineFailed) -> errors.QuireError:
    """The exception that stands for a failure: a user's mistake stays one, with the same text."""
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, errors.QuireError):
        return kind(failure.error)
    return errors.EngineDeadError(failure.error)
