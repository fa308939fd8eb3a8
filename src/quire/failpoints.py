"""Named places where a fault can be switched on, to see what becomes of it. Off unless QUIRE_FAIL names one.

    QUIRE_FAIL="point:action[:probability[:seed[:name=value ...]]][,...]"

The environment is read once, when this module is imported, and child processes inherit it. Nothing that comes with a
request can switch a failpoint on: there is no other way in but `arm`, which tests call. A point costs one look at a
module's variable while it is off. docs/failpoints.md has the actions.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from quire.errors import OptionError, suggestion

VARIABLE = "QUIRE_FAIL"

# Every point, the file that it stands in, and what happens there. A test holds the table against the source.
POINTS: dict[str, tuple[str, str]] = {
    "start_process": ("engine_core/process.py", "the core's process has read its configuration"),
    "start_load": ("engine_core/launch.py", "the model is about to be loaded"),
    "start_measure": ("engine_core/launch.py", "the model is there; memory is about to be measured"),
    "start_allocate": ("engine_core/launch.py", "the KV cache is about to be allocated"),
    "start_ready": ("engine_core/launch.py", "all parts stand; the core is about to say that it is ready"),
    "in_tokenise": ("renderer/tokenizer.py", "a text is about to become tokens"),
    "receive_request": ("engine_core/driver.py", "the core has taken a new request; sees its id"),
    "before_schedule": ("engine_core/engine_core.py", "a step is about to be decided"),
    "after_allocate": (
        "engine_core/kv_cache_manager/manager.py",
        "a sequence has got its blocks; sees its request's id",
    ),
    "before_execute": ("engine_core/engine_core.py", "a decided step is about to go to the worker"),
    "in_forward": ("worker/step_computation.py", "the model is about to compute a batch; sees the batch's token ids"),
    "rank_step": ("engine_core/executor/rank_process.py", "a further rank is about to compute a step"),
    "before_sample": ("worker/step_computation.py", "a batch was computed; sees all token ids of its rows"),
    "nan_row": ("worker/sampler/sampler.py", "a row's logits are there; sees all token ids of the row"),
    "in_grammar_compile": ("structured_output/grammar.py", "a grammar is about to be compiled"),
    "before_send": ("engine_core/process.py", "a message is about to be sent to the client"),
    "in_detokenise": ("renderer/text_stream.py", "tokens are about to become text; sees their ids"),
    "end_asked": ("engine_core/process.py", "the core's process was told to end"),
    "end_last_messages": ("engine_core/process.py", "its last messages were sent"),
    "end_worker": ("engine_core/engine_core.py", "the worker is about to let go of model and cache"),
    "end_exit": ("engine_core/process.py", "the core's process is about to exit"),
}
# Points whose caller can do the wrong thing by itself, if `failpoint` answers True.
CAN_CORRUPT = ("nan_row", "rank_step")

ACTIONS = ("raise", "hang", "exit", "kill9", "slow", "corrupt", "oom")
EXIT_STATUS = 13

Seen = Container[int] | Callable[[], Container[int]]
logger = logging.getLogger(__name__)


class InjectedFaultError(RuntimeError):
    """What the action `raise` raises: an error that nobody expects, so it is none of Quire's own."""


@dataclass
class Fault:
    """One entry of QUIRE_FAIL, and how often it was passed and fired in this process."""

    point: str
    action: str
    probability: float = 1.0
    seed: int = 0
    # so many passes go by first; then it fires at most so often
    after: int = 0
    count: int | None = None
    # only where the point sees this number: a token id or the id of a request
    when: int | None = None
    seconds: float = 0.05
    num_passed: int = 0
    num_fired: int = 0
    random: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.point}:{self.seed}")

    def fires(self, seen: Seen) -> bool:
        if self.when is not None and self.when not in (seen() if callable(seen) else seen):
            return False
        self.num_passed += 1
        is_due = self.num_passed > self.after and (self.count is None or self.num_fired < self.count)
        if not is_due or self.random.random() >= self.probability:
            return False
        self.num_fired += 1
        return True


_armed: dict[str, list[Fault]] | None = None


def failpoint(point: str, seen: Seen = ()) -> bool:
    """A place where something may go wrong on purpose. True: the caller is to do the wrong thing itself."""
    if _armed is None:
        return False
    return _pass(point, seen)


def any_is_armed() -> bool:
    return _armed is not None


def is_armed(point: str) -> bool:
    """For a caller that has to look at many things to say what the point sees."""
    return _armed is not None and point in _armed


def arm(text: str) -> list[Fault]:
    """Instead of whatever was armed before; an empty text switches everything off. For tests, and once at import."""
    global _armed
    faults = [_parsed(entry.strip()) for entry in text.split(",") if entry.strip()]
    by_point: dict[str, list[Fault]] = {}
    for fault in faults:
        by_point.setdefault(fault.point, []).append(fault)
    _armed = by_point or None
    return faults


def _pass(point: str, seen: Seen) -> bool:
    if point not in POINTS:
        raise KeyError(f"failpoint({point!r}) is not in the table POINTS of quire/failpoints.py.")
    is_corrupt = False
    for fault in (_armed or {}).get(point, ()):
        if fault.fires(seen):
            is_corrupt |= _act(fault)
    return is_corrupt


def _act(fault: Fault) -> bool:
    match fault.action:
        case "raise":
            raise InjectedFaultError(f"failpoint {fault.point}: raised on purpose.")
        case "oom":
            raise MemoryError(f"failpoint {fault.point}: out of memory on purpose.")
        case "hang":
            while True:
                time.sleep(3600)
        case "slow":
            time.sleep(fault.seconds)
        case "exit":
            sys.stderr.flush()
            os._exit(EXIT_STATUS)
        case "kill9":
            os.kill(os.getpid(), signal.SIGKILL)
    return fault.action == "corrupt"


def _parsed(entry: str) -> Fault:
    words = entry.split(":")
    named = dict(word.split("=", 1) for word in words if "=" in word)
    plain = [word for word in words if "=" not in word]
    if not 2 <= len(plain) <= 4:
        raise OptionError(f"{VARIABLE}={entry}: an entry is point:action:probability:seed, the last two optional.")
    point, action = plain[:2]
    if point not in POINTS:
        raise OptionError(f"{VARIABLE}={entry}: there is no failpoint {point!r}.{suggestion(point, POINTS)}")
    allowed = [name for name in ACTIONS if name != "corrupt" or point in CAN_CORRUPT]
    if action not in allowed:
        raise OptionError(f"{VARIABLE}={entry}: {point} can {', '.join(allowed)}, not {action!r}.")
    kinds: dict[str, Callable[[str], float]] = {"after": int, "count": int, "when": int, "seconds": float}
    unknown = sorted(set(named) - set(kinds))
    if unknown:
        raise OptionError(f"{VARIABLE}={entry}: {unknown[0]} is none of {', '.join(kinds)}.")
    try:
        probability = float(plain[2]) if len(plain) > 2 else 1.0
        seed = int(plain[3]) if len(plain) > 3 else 0
        options = {name: kinds[name](value) for name, value in named.items()}
    except ValueError as error:
        raise OptionError(f"{VARIABLE}={entry}: {error}.") from None
    if not 0 <= probability <= 1:
        raise OptionError(f"{VARIABLE}={entry}: a probability is from 0 to 1.")
    return Fault(point, action, probability, seed, **options)  # type: ignore[arg-type]


if arm(os.environ.get(VARIABLE, "")):
    logger.warning("failpoints are armed: %s=%s", VARIABLE, os.environ[VARIABLE])
