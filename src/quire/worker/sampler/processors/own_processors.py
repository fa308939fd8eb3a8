"""Logits processors that do not come with Quire (quire/logits_processors.py): functions over one row each.

One that raises, or answers with anything but logits of its row, fails that row alone, and so does one that takes too
long: one by name soon, a function of the program's own where it seems to hang (call_budget.py). What takes seconds is
told of by name, because all rows of the step wait for it.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quire.errors import RequestError, one_line
from quire.logits_processors import installed, name_and_args
from quire.messages import AdmittedSequence
from quire.worker.patience import uncounted
from quire.worker.row_table import RowTable
from quire.worker.sampler.processors.call_budget import Budget, ProgramBudget
from quire.worker.sampler.processors.processor import User

logger = logging.getLogger(__name__)

# A call that takes longer is told of, once in so long.
_LONG_SECONDS = 1.0
_SECONDS_BETWEEN_LINES = 60.0


class OwnProcessor:
    """One of a row, and how it is called."""

    def __init__(self, asked: Any, budget: Budget) -> None:
        """`budget`: of all samples of a request."""
        self._asked = asked
        self._budget = budget
        if callable(asked):
            self.name = getattr(asked, "__name__", type(asked).__name__)
            self._function: Callable[..., Any] = asked
        else:
            self.name, args = name_and_args(asked)
            made = installed()[self.name].load()
            self._function = budget.call(made, **args) if args or isinstance(made, type) else made
        self.takes_prompt = _num_parameters(self._function) == 3

    def of_child(self) -> OwnProcessor:
        """A sibling with nothing in common, where it can be had: what is made by name is made again, and a function
        that has something to keep says how by `clone`."""
        clone = getattr(self._asked, "clone", None)
        return OwnProcessor(self._budget.call(clone) if callable(clone) else self._asked, self._budget)

    def apply(self, prompt: list[int], output: list[int], logits_V: Tensor) -> None:
        args = (prompt, output, logits_V) if self.takes_prompt else (output, logits_V)
        answer = self._budget.call(self._function, *args)
        if answer is not None and answer is not logits_V:
            # else a single number would be that of every token
            if tuple(answer.shape) != tuple(logits_V.shape):
                raise ValueError(f"answered {list(answer.shape)} numbers, not the row's {list(logits_V.shape)}")
            logits_V.copy_(answer)


class OwnProcessors:
    """Those of each row, one after another."""

    def __init__(self, table: RowTable, reasons: dict[int, str], new_budget: Callable[[], Budget]) -> None:
        self._table = table
        self._reasons = reasons
        self._new_budget = new_budget
        # no line before this time
        self._silent_until = 0.0

    def state_of(self, sequence: AdmittedSequence) -> list[OwnProcessor] | None:
        asked = sequence.sampling.logits_processors
        return [self._made(processor) for processor in asked] if asked else None

    def _made(self, asked: Any) -> OwnProcessor:
        if callable(asked):
            return OwnProcessor(asked, ProgramBudget())
        with _faults_of(name_and_args(asked)[0]):
            return OwnProcessor(asked, self._new_budget())

    def state_of_child(self, parent: list[OwnProcessor]) -> list[OwnProcessor]:
        return [_child_of(processor) for processor in parent]

    def apply(self, logits_NV: Tensor, users: list[User[list[OwnProcessor]]]) -> None:
        for user in users:
            num_prompt = int(self._table.num_prompt[user.row])
            tokens = self._table.token_ids[user.row]
            prompt = tokens[:num_prompt].tolist() if any(processor.takes_prompt for processor in user.state) else []
            output = tokens[num_prompt : user.length].tolist()
            for processor in user.state:
                start = time.monotonic()
                try:
                    with uncounted():
                        processor.apply(prompt, output, logits_NV[user.position])
                except BaseException as error:  # no interrupt comes here: cores run in other threads, or take signals
                    logger.warning("logits processor %s failed", processor.name, exc_info=error)
                    self._reasons[user.row] = _said_of(processor.name, error)
                    logits_NV[user.position] = -torch.inf
                    break
                finally:
                    self._tell_time(processor.name, start, time.monotonic())

    def _tell_time(self, name: str, start: float, end: float) -> None:
        if end - start > _LONG_SECONDS and end >= self._silent_until:
            self._silent_until = end + _SECONDS_BETWEEN_LINES
            logger.warning(
                "logits processor %s took %.1f s of a step, in which all requests waited for it", name, end - start
            )


def _child_of(processor: OwnProcessor) -> OwnProcessor:
    with _faults_of(processor.name):
        return processor.of_child()


@contextmanager
def _faults_of(name: str) -> Iterator[None]:
    """What it raises ends its request, with its name."""
    try:
        yield
    except BaseException as error:
        raise RequestError(_said_of(name, error)) from error


def _said_of(name: str, error: BaseException) -> str:
    return f"logits processor {name}: {type(error).__name__}: {one_line(error)}"


def _num_parameters(function: Callable[..., Any]) -> int:
    try:
        return len(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return 2
