"""Several engine cores behind one link: each request goes to one of them, chosen by routing/.

    client  ---->  ReplicaLink  ---->  link to core 0, a process with its own workers and KV cache
                        |       ---->  link to core 1
                     Router

For its client it is one engine. Owns the links, and who has which request, handle and call. A core that dies takes
along only what it had: requests of which nothing has come yet go to another one, the others end with an error. When
the last one dies, the engine is dead. Whoever supervises it starts another in the place of the dead one
(`replicas.start`), brings it to where the others are (`replica.NUMBER.OPERATION`), and lets it serve
(`replicas.serve`).

Several processes may have such a link to the same cores, each with a router of its own. It counts the requests of its
process alone: what each spreads evenly is spread evenly in sum. What the cores hold all of them hear from the cores.
The process that has not started them is told of a loss (`replicas.lose`).
"""

from __future__ import annotations

import itertools
import logging
import os
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.chain_hashes import ChainHasher, public_name
from quire.engine_client.replica_calls import OF_A_HANDLE, OF_THE_FIRST, ONE, FannedCall
from quire.errors import EngineDeadError
from quire.messages import (
    AbortRequests,
    CacheChanged,
    ControlCall,
    ControlReply,
    EngineFailed,
    EngineOutputs,
    EngineReady,
    EngineRequest,
    ExtendRequest,
    PermitTokens,
    SequenceEnd,
    SequenceStart,
    ToClient,
    ToCore,
    sequence_id_of,
    split_sequence_id,
    split_sequence_ids,
)
from quire.routing import Choice, Router

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.engine_client.engine_process import EngineProcess
    from quire.engine_client.link import Link

logger = logging.getLogger(__name__)
OpenCopy = Callable[["EngineConfig"], "Link"]


@dataclass(frozen=True, slots=True)
class Loss:
    """A core that has died while others go on."""

    replica: int
    reason: str
    process: EngineProcess | None


@dataclass
class _Copy:
    """One core."""

    number: int
    link: Link
    ready: EngineReady | None = None
    # takes requests
    is_serving: bool = False
    # the call that waits for its start
    start_call: int | None = None
    # what it has said of its cache, until it serves
    told: list[CacheChanged] = field(default_factory=list)


@dataclass
class _Flight:
    """A request that is with a core."""

    replica: int
    # what another core would have to be sent; None once something has come
    messages: list[ToCore] | None
    # names of its prompt's blocks
    blocks: list[int]
    open_outputs: set[int]
    is_started: set[int] = field(default_factory=set)
    # the handle under which it is to be kept, if nothing is there yet
    new_handle: str | None = None
    can_move: bool = True
    is_aborted: bool = False


class ReplicaLink:
    def __init__(self, config: EngineConfig, open_copy: OpenCopy, attached: Iterable[int] | None = None) -> None:
        """Starts all of them at once. `attached`: those that somebody else has started, and that serve now."""
        self._config = config
        self._open_copy = open_copy
        self._is_owner = attached is None
        self._hash_key = config.prefix_hash_key or os.urandom(32)
        self._namer = BlockNamer(config.block_size, self._hash_key)
        self._router = Router(config.routing_policy, config.block_size)
        self._selector = selectors.DefaultSelector()
        # What was sent, until the blocks of the prompts before it have names. Meanwhile the selector has a file that is
        # always readable, so that whoever waits for it comes back in the next turn.
        self._inbox: deque[ToCore] = deque()
        self._bell = _readable_file()
        self._is_ringing = False
        self._copies: dict[int, _Copy] = {}
        self._flights: dict[int, _Flight] = {}
        # which core keeps what
        self._handles: dict[str, int] = {}
        self._call_ids = itertools.count()
        self._calls: dict[int, tuple[int, FannedCall]] = {}
        self._last_adapter = 0
        # of cores: number and reason, as its owner tells
        self._ends: list[tuple[int, str]] = []
        # made here
        self._answers: list[ToClient] = []
        self._tell_loss: Callable[[Loss], None] = lambda loss: None
        # what the client was told of all of them
        self._as_one: EngineReady | None = None
        self._is_over = False
        self._is_closed = False
        # of dead ones, until others take their places: whoever looks into a death reads what they left
        self._remains: dict[int, Link] = {}
        self._num_retried = 0
        self._num_lost = 0
        try:
            for number in range(config.data_parallel_size) if attached is None else attached:
                self._open(number)
        except BaseException:
            self.close()
            raise

    def _open(self, number: int) -> _Copy:
        copy = _Copy(number, self._open_copy(self._config.of_replica(number, self._hash_key)))
        self._copies[number] = copy
        for descriptor in copy.link.descriptors():
            self._selector.register(descriptor, selectors.EVENT_READ)
        return copy

    # ------------------------------------------------------------------------------------------ as a link

    @property
    def processes(self) -> tuple[EngineProcess, ...]:
        return tuple(process for copy in self._copies.values() for process in copy.link.processes)

    def watch_losses(self, tell: Callable[[Loss], None]) -> None:
        self._tell_loss = tell

    def keep_back_while(self, is_patient: Callable[[], bool]) -> None: ...

    def descriptors(self) -> tuple[int, ...]:
        # of the selector itself: cores come and go, and whoever watches this one need not know
        return () if self._is_closed else (self._selector.fileno(),)

    def send(self, *messages: ToCore) -> None:
        if self._is_over:
            return
        self._inbox.extend(messages)
        self._send_on()

    def receive(self, timeout: float | None = None) -> list[ToClient]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._is_over:
            messages = self._received()
            if messages or self._is_over:
                return messages
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            self._selector.select(left)
        return []

    def close(self) -> None:
        self._is_over = True
        if self._is_closed:
            return
        self._is_closed = True
        for link in (*(copy.link for copy in self._copies.values()), *self._remains.values()):
            link.close()
        self._selector.close()
        os.close(self._bell)

    def statistics(self) -> dict[str, float]:
        total = {
            "num_requests_retried_total": float(self._num_retried),
            "num_kept_handles": float(len(self._handles)),
        }
        # processes add up what they say
        if self._is_owner:
            total["num_replicas"] = float(self._config.data_parallel_size)
            total["num_replicas_serving"] = float(len(self._router))
            total["num_replicas_lost_total"] = float(self._num_lost)
        for copy in self._copies.values():
            for name, value in copy.link.statistics().items():
                total[name] = total.get(name, 0.0) + value
        for replica in self._router.replicas():
            prefix = f"replica_{replica.number}"
            total[f"{prefix}_sequences"] = replica.num_sequences
            total[f"{prefix}_waiting_tokens"] = replica.num_waiting_tokens
        return total

    # ------------------------------------------------------------------------------------------ requests

    def _send_on(self) -> None:
        """What has come in, in its order, as far as this turn's share of names goes."""
        while self._inbox:
            message = self._inbox[0]
            if self._ends and isinstance(message, ControlCall) and message.name == "replicas.start":
                # the one in whose place it comes is dealt with first
                break
            blocks = self._names_of(message) if isinstance(message, EngineRequest) else []
            if blocks is None:
                break
            # before it is dealt with: one that raises must not come again
            self._inbox.popleft()
            match message:
                case EngineRequest():
                    self._send_request(message, blocks)
                case ExtendRequest() | PermitTokens():
                    self._extend(message)
                case AbortRequests():
                    self._abort(message)
                case ControlCall():
                    self._control(message)
        self._ring(bool(self._inbox))

    def _ring(self, is_ringing: bool) -> None:
        if is_ringing == self._is_ringing:
            return
        self._is_ringing = is_ringing
        if is_ringing:
            self._selector.register(self._bell, selectors.EVENT_READ)
        else:
            self._selector.unregister(self._bell)

    def _names_of(self, request: EngineRequest) -> list[int] | None:
        # what goes on from kept tokens begins with tokens that are not here
        if request.continues is not None or not self._config.enable_prefix_caching:
            return []
        return self._namer.names_of(request)

    def _send_request(self, request: EngineRequest, blocks: list[int]) -> None:
        outputs = set(range(request.sampling.n))
        number = self._handles.get(request.continues) if request.continues is not None else None
        flight = _Flight(-1, [request], blocks, outputs, can_move=request.continues is None)
        if request.continues is not None and number is None:
            self._fail(request.request_id, flight, "what it goes on from was lost with its replica")
            return
        self._flights[request.request_id] = flight
        self._place(request.request_id, flight, number)

    def _place(self, request_id: int, flight: _Flight, number: int | None = None) -> None:
        """Chooses a core, unless it is given, and sends what the request consists of so far."""
        assert flight.messages is not None
        request = flight.messages[0]
        assert isinstance(request, EngineRequest)
        num_tokens = len(request.prompt_token_ids)
        choice = self._router.choose(flight.blocks, num_tokens, request.sampling.n)
        if number is not None and number != choice.replica:
            choice = Choice(number, 0)
        self._router.begin(request_id, choice, flight.blocks, num_tokens, request.sampling.n)
        flight.replica = choice.replica
        if request.keep is not None:
            if request.keep not in self._handles:
                flight.new_handle = request.keep
            self._handles[request.keep] = choice.replica
        self._copies[choice.replica].link.send(*flight.messages)

    def _extend(self, message: ExtendRequest | PermitTokens) -> None:
        flight = self._flights.get(message.request_id)
        if flight is None:
            return
        if flight.messages is not None:
            flight.messages.append(message)
        self._copies[flight.replica].link.send(message)

    def _abort(self, aborts: AbortRequests) -> None:
        parts: dict[int, AbortRequests] = {}
        for request_id in aborts.request_ids:
            if (flight := self._flights.get(request_id)) is not None:
                parts.setdefault(flight.replica, AbortRequests()).request_ids.append(request_id)
        for sequence_id in aborts.sequence_ids:
            if (flight := self._flights.get(split_sequence_id(sequence_id)[0])) is not None:
                parts.setdefault(flight.replica, AbortRequests()).sequence_ids.append(sequence_id)
        for number, part in parts.items():
            for request_id in part.request_ids:
                self._flights[request_id].is_aborted = True
            self._copies[number].link.send(part)

    # ------------------------------------------------------------------------------------------ management

    def _control(self, call: ControlCall) -> None:
        name, args = call.name, call.args
        if name == "replicas.start":
            self._start(call.call_id, args["number"])
        elif name == "replicas.lose":
            self._ends.append((args["number"], args["reason"]))
            self._answers.append(ControlReply(call_id=call.call_id, result=True))
        elif name == "replicas.serve":
            self._serve(self._copies[args["number"]])
            self._answers.append(ControlReply(call_id=call.call_id, result=True))
        elif name.startswith(ONE):
            number, _, name = name.removeprefix(ONE).partition(".")
            self._call(call.call_id, name, args, [int(number)])
        else:
            if name == "load_adapter":
                # the same number everywhere, also where a core has come later
                self._last_adapter += 1
                args = {**args, "number": self._last_adapter}
            numbers = self._whom(name, args)
            into = args.get("into") if name == "fork_kept" else None
            new_handle = into if into not in self._handles else None
            if new_handle is not None:
                # from now on: who no longer waits for the answer may release it
                self._handles[new_handle] = numbers[0]
            self._call(call.call_id, name, args, numbers, new_handle)

    def _whom(self, name: str, args: dict[str, Any]) -> list[int]:
        serving = [copy.number for copy in self._copies.values() if copy.is_serving] or [min(self._copies)]
        if name not in OF_A_HANDLE:
            return serving[:1] if name in OF_THE_FIRST else serving
        handle = args.get(OF_A_HANDLE[name], "")
        # of a handle that nobody keeps the first one says so
        number = self._handles.get(handle, serving[0])
        if name == "release_kept":
            self._handles.pop(handle, None)
        return [number]

    def _call(
        self, call_id: int, name: str, args: dict[str, Any], numbers: list[int], new_handle: str | None = None
    ) -> None:
        fanned = FannedCall(call_id, name, set(numbers), new_handle)
        for number in numbers:
            copy = self._copies.get(number)
            if copy is None:
                fanned.lose(number)
                continue
            own = next(self._call_ids)
            self._calls[own] = (number, fanned)
            copy.link.send(ControlCall(call_id=own, name=name, args=args))
        self._answer(fanned)

    def _answer(self, fanned: FannedCall) -> None:
        reply = fanned.reply()
        if reply is not None:
            self._answers.append(reply)

    def _start(self, call_id: int, number: int) -> None:
        """A core in the place of one that has died; answered when it has loaded."""
        if number in self._copies:
            self._answers.append(ControlReply(call_id=call_id, error=f"replica {number} runs already."))
            return
        if (link := self._remains.pop(number, None)) is not None:
            link.close()
        self._open(number).start_call = call_id

    def _serve(self, copy: _Copy) -> None:
        assert copy.ready is not None
        assert self._as_one is not None
        copy.is_serving = True
        # They are alike. What each has measured, while others started beside it, is mostly noise, and would send most
        # requests to the one that was disturbed least.
        self._router.add(
            copy.number,
            seconds_per_token=self._as_one.seconds_per_token,
            seconds_per_step=self._as_one.seconds_per_step,
        )
        for change in copy.told:
            self._learn(copy, change)
        copy.told.clear()

    def _learn(self, copy: _Copy, change: CacheChanged) -> None:
        if change.is_cleared:
            self._router.cleared(copy.number)
        self._router.removed(copy.number, change.removed)
        self._router.stored(copy.number, change.stored)

    # ------------------------------------------------------------------------------------------ what comes

    def _received(self) -> list[ToClient]:
        self._namer.begin_turn()
        self._send_on()
        messages = self._answers
        self._answers = []
        for copy in list(self._copies.values()):
            for message in (*copy.link.receive(0), *self._end_of(copy)):
                self._take(copy, message, messages)
                if self._is_over:
                    return messages
                if self._copies.get(copy.number) is not copy:
                    break
        self._ends.clear()
        # what was made meanwhile
        messages += self._answers
        self._answers = []
        return messages

    def _end_of(self, copy: _Copy) -> list[EngineFailed]:
        """One that somebody else has seen; it may have told of it itself."""
        ends = [reason for number, reason in self._ends if number == copy.number]
        return [EngineFailed(kind=EngineDeadError.__name__, error=reason) for reason in ends]

    def _take(self, copy: _Copy, message: ToClient, messages: list[ToClient]) -> None:
        match message:
            case EngineOutputs():
                self._follow(copy, message)
                messages.append(message)
            case CacheChanged():
                if copy.is_serving:
                    self._learn(copy, message)
                else:
                    copy.told.append(message)
            case ControlReply():
                number, fanned = self._calls.pop(message.call_id)
                fanned.take(number, message)
                if message.error is not None and fanned.new_handle is not None:
                    self._handles.pop(fanned.new_handle, None)
                self._answer(fanned)
            case EngineReady():
                self._is_ready(copy, message, messages)
            case EngineFailed():
                self._lost(copy, message, messages)

    def _follow(self, copy: _Copy, outputs: EngineOutputs) -> None:
        """Keeps count of what has come."""
        request_ids, _indices = split_sequence_ids(outputs.sequence_ids)
        has_come = {*request_ids, *(split_sequence_id(entry.sequence_id)[0] for entry in outputs.prompt_logprobs)}
        for request_id in has_come:
            flight = self._flights.get(request_id)
            if flight is not None and flight.messages is not None:
                flight.messages = None
                self._router.first_token(request_id)
        starts: list[SequenceStart] = []
        for start in outputs.starts:
            request_id, index = split_sequence_id(start.sequence_id)
            flight = self._flights.get(request_id)
            # of one that was begun again the client has heard that it began
            if flight is None or index not in flight.is_started:
                starts.append(start)
            if flight is not None:
                flight.is_started.add(index)
        outputs.starts = starts
        for end in outputs.ends:
            request_id, index = split_sequence_id(end.sequence_id)
            flight = self._flights.get(request_id)
            if flight is not None:
                flight.messages = None
                flight.open_outputs.discard(index)
                if flight.new_handle is not None and not _is_kept(flight, end):
                    self._handles.pop(flight.new_handle, None)
                if not flight.open_outputs:
                    self._forget(request_id)

    def _forget(self, request_id: int) -> None:
        self._router.end(request_id)
        del self._flights[request_id]

    def _is_ready(self, copy: _Copy, ready: EngineReady, messages: list[ToClient]) -> None:
        copy.ready = ready
        if copy.start_call is not None:
            messages.append(ControlReply(call_id=copy.start_call, result=True))
            copy.start_call = None
            return
        all_ready = [one.ready for one in self._copies.values() if one.ready is not None]
        if self._as_one is not None or len(all_ready) < len(self._copies):
            return
        self._as_one = _as_one(all_ready)
        for one in self._copies.values():
            self._serve(one)
        messages.append(self._as_one)

    # ------------------------------------------------------------------------------------------ losses

    def _lost(self, copy: _Copy, failure: EngineFailed, messages: list[ToClient]) -> None:
        # before the start, what is wrong with one is wrong with all
        is_last = not any(one.is_serving for one in self._copies.values() if one is not copy)
        if is_last or self._as_one is None:
            self._is_over = True
            messages.append(failure)
            return
        self._give_up(copy)
        if copy.start_call is not None:
            messages.append(ControlReply(call_id=copy.start_call, error=failure.error))
            return
        self._num_lost += 1
        logger.error("replica %d died: %s", copy.number, failure.error)
        self._move_or_fail(copy.number, failure.error)
        for own, (number, fanned) in list(self._calls.items()):
            if number == copy.number:
                del self._calls[own]
                fanned.lose(number)
                self._answer(fanned)
        self._tell_loss(Loss(copy.number, failure.error, next(iter(copy.link.processes), None)))

    def _give_up(self, copy: _Copy) -> None:
        del self._copies[copy.number]
        for descriptor in copy.link.descriptors():
            self._selector.unregister(descriptor)
        self._remains[copy.number] = copy.link
        self._router.remove(copy.number)
        self._handles = {handle: number for handle, number in self._handles.items() if number != copy.number}

    def _move_or_fail(self, number: int, reason: str) -> None:
        for request_id, flight in list(self._flights.items()):
            if flight.replica != number:
                continue
            if flight.is_aborted:
                del self._flights[request_id]
                self._answers.append(_ended(request_id, flight, "abort"))
            elif flight.messages is not None and flight.can_move:
                # once: what has killed this one would kill all of them in turn
                flight.can_move = False
                self._num_retried += 1
                self._place(request_id, flight)
            else:
                del self._flights[request_id]
                self._fail(request_id, flight, f"replica {number} of the engine died: {reason}")

    def _fail(self, request_id: int, flight: _Flight, reason: str) -> None:
        self._answers.append(_ended(request_id, flight, "error", reason))


def _is_kept(flight: _Flight, end: SequenceEnd) -> bool:
    """Whether the core keeps the tokens of a sequence that has ended so. A line that its reader broke off is kept; a
    request that was aborted, or that failed, is not."""
    return end.finish_reason != "error" and not (end.finish_reason == "abort" and flight.is_aborted)


def _ended(request_id: int, flight: _Flight, finish_reason: str, error: str | None = None) -> EngineOutputs:
    """Of one that had not begun a start comes before: else its error would be taken for a refusal."""
    not_begun = flight.open_outputs - flight.is_started
    return EngineOutputs(
        step=0,
        starts=[SequenceStart(sequence_id_of(request_id, index), 0) for index in sorted(not_begun)],
        ends=[
            SequenceEnd(sequence_id_of(request_id, index), finish_reason, error=error, is_lost=error is not None)
            for index in sorted(flight.open_outputs)
        ],
    )


def _readable_file() -> int:
    """A pipe that nobody will write to: reading it would not wait."""
    bell, other_end = os.pipe()
    os.close(other_end)
    return bell


def _as_one(ready: Iterable[EngineReady]) -> EngineReady:
    """What a client may count on: a request has the room of one."""
    every = list(ready)
    of_the_first = f"{len(every)} replicas; the lines above are those of the first"
    return EngineReady(
        max_model_len=min(one.max_model_len for one in every),
        max_num_seqs=min(one.max_num_seqs for one in every),
        num_blocks=sum(one.num_blocks for one in every),
        block_size=every[0].block_size,
        report=[*every[0].report, *([of_the_first] if every[0].report else [])],
        first_request_id=every[0].first_request_id,
        seconds_per_token=max(one.seconds_per_token for one in every),
        seconds_per_step=max(one.seconds_per_step for one in every),
    )


# About half a millisecond.
TOKENS_A_TURN = 8192


class BlockNamer:
    """The names of a prompt's blocks, one request at a time, a piece at a time: a prompt of a million tokens would hold
    the event loop for a tenth of a second, and all streams with it. Counts tokens, and knows no clock."""

    def __init__(self, block_size: int, key: bytes) -> None:
        self._hasher = ChainHasher(block_size, key)
        # of one turn of the loop
        self._most_blocks = max(1, TOKENS_A_TURN // block_size)
        self._num_left = self._most_blocks
        self._request: EngineRequest | None = None
        self._to_come: Iterator[bytes] = iter(())
        self._names: list[int] = []

    def begin_turn(self) -> None:
        self._num_left = self._most_blocks

    def names_of(self, request: EngineRequest) -> list[int] | None:
        """None: this turn has done its share. It goes on where it was when it is asked in the next one."""
        if request is not self._request:
            self._request = request
            self._to_come = self._hasher.names_of(request)
            self._names = []
        while self._num_left:
            name = next(self._to_come, None)
            if name is None:
                names = self._names
                self._request = None
                self._names = []
                return names
            self._names.append(public_name(name))
            self._num_left -= 1
        return None
