"""What the largest step of a model takes, kept beside its packed weights for later starts with the same options.

    <cache folder>/packed/<digest>.costs      JSON: digest of options, processor and kernels -> Kept

Memory is the same at every start. Times are those of the quicker of the first starts: other work on the machine makes
any of them longer, and nothing that is computed depends on them. Called by `Worker`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import msgspec
import torch

from quire.config import WorkerConfig
from quire.worker.capacity import StepCost
from quire.worker.kernels import cpu
from quire.worker.kernels.cpu.tuning import processor

_logger = logging.getLogger(__name__)
# that measure
NUM_STARTS = 2
# sets of options of one model
MOST_KEPT = 32
# of a whole file, which has some hundred bytes for each set
_MOST_BYTES = 1 << 20
# of bytes and of seconds
_MOST = 1 << 50


class Kept(msgspec.Struct):
    """What so many starts have measured."""

    num_starts: int
    cost: StepCost


def kept_cost(file: Path, config: WorkerConfig, measure: Callable[[], StepCost]) -> StepCost:
    """As earlier starts have measured it, or this one."""
    key = _key(config)
    kept_by_key = _read(file)
    kept = kept_by_key.pop(key, None)
    if kept is not None and kept.num_starts >= NUM_STARTS:
        return kept.cost
    cost = measure()
    if kept is not None:
        cost = replace(
            cost,
            seconds_per_token=min(cost.seconds_per_token, kept.cost.seconds_per_token),
            seconds_per_step=min(cost.seconds_per_step, kept.cost.seconds_per_step),
            seconds_per_pair=min(cost.seconds_per_pair, kept.cost.seconds_per_pair),
        )
    latest = list(kept_by_key.items())[-MOST_KEPT + 1 :]
    _write(file, {**dict(latest), key: Kept(1 if kept is None else kept.num_starts + 1, cost)})
    return cost


def _key(config: WorkerConfig) -> str:
    """Of all that a cost may depend on beside the weights, whose file has a name for each checkpoint and form; and of
    what was measured."""
    measured = [field.name for field in fields(StepCost)]
    facts = [processor(), torch.__version__, cpu.statistics(), config, measured]
    return hashlib.sha256(msgspec.json.encode(facts, enc_hook=str)).hexdigest()[:32]


def _read(file: Path) -> dict[str, Kept]:
    try:
        with file.open("rb") as opened:
            content = opened.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
        kept_by_key = msgspec.json.decode(content, type=dict[str, Kept])
        for kept in kept_by_key.values():
            _check(kept.cost)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        _logger.warning("%s is of no use and will be written anew: %s", file, error)
        return {}
    return kept_by_key


def _check(cost: StepCost) -> None:
    """A number that no step has would give the cache memory that is not there, or end every start."""
    for name, value in vars(cost).items():
        if not isinstance(value, str) and not 0 <= value < _MOST:
            raise ValueError(f"{name}={str(value)[:40]} is no size of a step")


def _write(file: Path, kept_by_key: dict[str, Kept]) -> None:
    """Whoever looks sees the whole file or none. A start does not fail over what makes the next one faster."""
    # Packed weights that are just being written are at the name without "costs".
    part = file.with_suffix(f".costs.{os.getpid()}.part")
    try:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(kept_by_key), indent=1))
        part.replace(file)
    except OSError as error:
        _logger.info("what a step takes is not kept for the next start: %s", error)
        with contextlib.suppress(OSError):
            part.unlink()
