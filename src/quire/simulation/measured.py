"""Steps that were measured on this machine, as `quire bench steps` writes them: a device for simulations.

Beside the steps the file has what a worker measured before the first one, because memory and recovery depend on it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire.config import EngineConfig
from quire.engine_core.executor.modelled import StepWork
from quire.errors import OptionError
from quire.messages import EngineRequest, WorkerCapacity
from quire.sampling_params import SamplingParams
from quire.simulation.costs.table import TableCosts

if TYPE_CHECKING:
    from quire.simulation.recorded_run import RecordedRun


# of a file, which has some hundred for each step
_MOST_BYTES = 1 << 28
_MOST_SECONDS = 100_000
# of any other amount: bytes, blocks, tokens, pairs
_MOST_AMOUNT = 1 << 44


class MeasuredSteps(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Of one model on one machine."""

    model: str
    capacity: WorkerCapacity
    swap_seconds_per_block: float
    # amounts by the names of StepWork
    works: list[dict[str, float]]
    seconds: list[float]

    @classmethod
    def of(cls, run: RecordedRun, config: EngineConfig) -> MeasuredSteps:
        return cls(
            model=config.served_model_name,
            capacity=run.capacity,
            swap_seconds_per_block=run.control.get("measure_swap", 0.0),
            works=[asdict(work) for work in run.works],
            seconds=run.seconds,
        )

    def costs(self) -> TableCosts:
        return TableCosts.fit([_work_of(amounts) for amounts in self.works], self.seconds)

    def write(self, path: Path) -> None:
        try:
            path.write_bytes(msgspec.json.encode(self))
        except OSError as error:
            raise OptionError(f"{path}: cannot be written ({error.strerror}).") from error

    @classmethod
    def read(cls, path: Path) -> MeasuredSteps:
        """OptionError for what is no such file, or has not enough in it."""
        try:
            with path.open("rb") as file:
                measured = msgspec.json.decode(file.read(_MOST_BYTES), type=cls)
        except (msgspec.DecodeError, OSError, RecursionError) as error:
            raise OptionError(f"device={path}: no measured steps ({error}). Make some: quire bench steps.") from None
        if len(measured.works) != len(measured.seconds) or not measured.works:
            raise OptionError(f"device={path}: there must be as many steps as seconds, and at least one.")
        measured._check(path)
        return measured

    def _check(self, path: Path) -> None:
        """What no step can have would end a simulation somewhere, or let it say anything."""
        if not all(0 < seconds < _MOST_SECONDS for seconds in self.seconds):
            raise OptionError(f"device={path}: a step must take more than 0 and less than {_MOST_SECONDS:,} seconds.")
        capacity = self.capacity
        amounts = [(name, amount) for work in self.works for name, amount in work.items()]
        amounts += {
            "swap_seconds_per_block": self.swap_seconds_per_block,
            "available_bytes": capacity.available_bytes,
            "host_bytes": capacity.host_bytes,
            "seconds_per_token": capacity.seconds_per_token,
            "seconds_per_step": capacity.seconds_per_step,
            "seconds_per_pair": capacity.seconds_per_pair,
        }.items()
        for name, amount in amounts:
            if not 0 <= amount < _MOST_AMOUNT:
                raise OptionError(f"device={path}: {name}={str(amount)[:40]} is no amount.")


def _work_of(amounts: dict[str, float]) -> StepWork:
    kinds = {field.name: int if field.type == "int" else float for field in fields(StepWork)}
    known: dict[str, Any] = {name: kinds[name](amount) for name, amount in amounts.items() if name in kinds}
    return StepWork(**known)


def load_to_measure(config: EngineConfig, num_rounds: int, seed: int = 0) -> Iterator[tuple[float, EngineRequest]]:
    """Requests that lead to steps of all sizes: prompts alone and many at once, few and many sequences, short and long
    contexts. A round begins when the one before it has ended."""
    pick = random.Random(seed)
    vocab_size, longest = config.facts.vocab_size, config.max_model_len
    number = 0
    for round_number in range(num_rounds):
        num_requests = 1 << pick.randrange(0, max(1, min(config.max_num_seqs, 64).bit_length()))
        most_prompt = max(
            2, int(min(longest - 2, 2 * config.max_num_batched_tokens) * pick.choice([0.02, 0.1, 0.4, 1]))
        )
        for _ in range(num_requests):
            prompt_length = pick.randrange(1, most_prompt)
            output_length = pick.randrange(1, max(2, min(longest - prompt_length, 40)))
            yield (
                1e6 * round_number,
                EngineRequest(
                    request_id=number,
                    prompt_token_ids=[pick.randrange(vocab_size) for _ in range(prompt_length)],
                    sampling=SamplingParams(max_tokens=output_length, ignore_eos=True, temperature=0.0),
                    seed=number,
                ),
            )
            number += 1
