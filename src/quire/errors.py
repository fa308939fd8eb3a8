"""The tree of exceptions. A user's mistake is a UserError and is shown without a traceback.

QuireError
├── UserError                 what was asked cannot be done; the message says what would work
│   ├── OptionError           an unknown option, or a value out of its bounds
│   ├── ModelError            a checkpoint that is missing, corrupt or of an unknown kind
│   ├── CapacityError         memory that does not suffice for what was asked
│   └── RequestError          one request is invalid; nothing else is affected
│       └── ContextLengthError
└── EngineError               the engine's own trouble
    ├── RequestFailedError    one request failed while it ran
    └── EngineDeadError       the engine is gone; every request in flight is lost
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

# of another library's message in one of ours
_LONGEST_LINE = 240


class QuireError(Exception):
    """Root of everything that Quire raises on purpose."""


class UserError(QuireError, ValueError):
    """What was asked cannot be done."""


class OptionError(UserError):
    """An unknown option, or a value outside its bounds."""


class ModelError(UserError):
    """A checkpoint that is missing, corrupt or of an unknown kind."""


class CapacityError(UserError):
    """Memory that does not suffice for what was asked."""


class RequestError(UserError):
    """One request is invalid. `param` names the field, `code` is machine-readable."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """Prompt and output together exceed what the model or the memory can hold. `num_prompt_tokens`: where they were
    counted."""

    def __init__(self, message: str, *, param: str | None = None, num_prompt_tokens: int | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")
        self.num_prompt_tokens = num_prompt_tokens


class EngineError(QuireError, RuntimeError):
    """The engine's own trouble."""


class RequestFailedError(EngineError):
    """One request failed while it ran; the others go on."""


class EngineDeadError(EngineError):
    """The engine is gone, and with it every request in flight."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """A closing phrase for an unknown name: ` Did you mean "x"?`, or nothing."""
    candidates = difflib.get_close_matches(name, list(known), n=5, cutoff=0.6)
    close = [candidate for candidate in candidates if _is_meant(name, candidate)]
    return f' Did you mean "{close[0]}"?' if close else ""


def _is_meant(name: str, candidate: str) -> bool:
    """Words that both begin with, such as enable or max, say nothing: --enable-lora is no --enable-prefix-caching."""
    ours = re.split(r"[-_]", candidate)
    theirs = re.split(r"[-_]", name)
    while len(ours) > 1 and len(theirs) > 1 and ours[0] == theirs[0]:
        ours = ours[1:]
        theirs = theirs[1:]
    return difflib.SequenceMatcher(None, "-".join(theirs), "-".join(ours)).ratio() >= 0.6


def one_line(error: BaseException) -> str:
    """Another library's message inside of ours: its lines as one, cut where it becomes a report."""
    text = " ".join(str(error).split()) or "no reason given"
    return text if len(text) <= _LONGEST_LINE else text[:_LONGEST_LINE] + "..."
