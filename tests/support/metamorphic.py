"""Metamorphic equality (I12): the same requests give the same tokens, whatever the engine does with its memory.

A case is a few random requests with the steps in which they arrive. A setting is a way to run them: prefix cache or
not, chunks, block size, how much memory there is and what happens when it runs out, and whether a request has the
engine to itself; and how the engine runs (engine_settings.py): policy, asynchronous scheduling, speculation.
`outputs_of` runs a case in a setting; all settings must agree. The core is checked token by token on the way
(checked_core.py), so that a difference shows at the step in which it arises.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.messages import DecodingSpec, EngineOutputs, EngineRequest, split_sequence_id
from quire.sampling_params import SamplingParams
from quire.simulation.costs.linear import LinearCosts
from quire.testing.core import FULL
from quire.testing.simulator.checked_core import CheckedCore
from quire.testing.simulator.checking_model import END_TOKEN
from quire.testing.simulator.engine_settings import PLAIN_ENGINE, EngineSettings
from quire.testing.simulator.plans import Plan

VOCAB = 50
_MAX_MODEL_LEN = 64
_WHOLE = 4096


@dataclass(frozen=True)
class Setting:
    """`memory` is ample, or what happens when it is short: recompute, swap or auto."""

    prefix_caching: bool
    chunk: int
    block_size: int
    memory: str
    is_alone: bool


PLAIN = Setting(prefix_caching=False, chunk=_WHOLE, block_size=16, memory="ample", is_alone=True)
SETTINGS = [
    Setting(*values)
    for values in itertools.product(
        [True, False], [1, 7, _WHOLE], [1, 8, 16], ["ample", "recompute", "swap", "auto"], [True, False]
    )
]


@dataclass(frozen=True)
class Arrival:
    """A request and the step before which it arrives; `rest` of its prompt follows in later steps."""

    step: int
    request: EngineRequest
    rest: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    """What is asked of the engine."""

    arrivals: tuple[Arrival, ...]
    windows: tuple[int, ...]


# by (request_id, output): tokens and how it ended
Outputs = dict[tuple[int, int], tuple[list[int], str, int | None]]


def random_case(seed: int) -> Case:
    """Three to six requests that begin alike: greedy, seeded, several outputs, beams, streamed input, stop tokens."""
    pick = random.Random(seed)
    stem = [pick.randrange(VOCAB) for _ in range(30)]
    arrivals = []
    for number in range(pick.randrange(3, 7)):
        prompt = stem[: pick.randrange(1, 28)] + [pick.randrange(VOCAB) for _ in range(pick.choice([0, 1, 4]))]
        num_sent = pick.randrange(len(prompt)) if pick.random() < 0.2 else len(prompt)
        request = EngineRequest(
            request_id=number,
            prompt_token_ids=prompt[:num_sent],
            seed=pick.randrange(1000),
            eos_token_ids=pick.choice([[], [END_TOKEN]]),
            priority=pick.choice([0, 0, 1]),
            cache_salt=pick.choice(["", "", "blue"]),
            is_final=num_sent == len(prompt),
            **_asked(pick),
        )
        arrivals.append(Arrival(pick.randrange(12), request, tuple(prompt[num_sent:])))
    windows = pick.choice([(0,), (0,), (0,), (0, 6)])
    return Case(tuple(sorted(arrivals, key=lambda one: one.step)), windows)


def _asked(pick: random.Random) -> dict[str, Any]:
    kind = pick.choice(["greedy", "seeded", "several", "beams"])
    count = {"several": pick.randrange(2, 4), "beams": pick.randrange(2, 5)}.get(kind, 1)
    sampling = SamplingParams(
        n=count,
        max_tokens=pick.randrange(1, 30 // count + 2),
        temperature=0.0 if kind in {"greedy", "beams"} else 1.0,
        stop_token_ids=pick.choice([[], [], [3]]),
    )
    if kind != "beams":
        return {"sampling": sampling}
    args = {"width": count, "early_stopping": pick.choice([True, False, "never"])}
    return {"sampling": sampling, "decoding": DecodingSpec(method="beam_search", args=args)}


def outputs_of(case: Case, setting: Setting, engine: EngineSettings = PLAIN_ENGINE) -> tuple[Outputs, int]:
    """What every output got, and how many requests had to give way on the way."""
    if not setting.is_alone:
        return _run(case, setting, engine)
    outputs: Outputs = {}
    num_preemptions = 0
    for arrival in case.arrivals:
        found, preempted = _run(replace(case, arrivals=(arrival,)), setting, engine)
        outputs |= found
        num_preemptions += preempted
    return outputs, num_preemptions


def _run(case: Case, setting: Setting, engine: EngineSettings) -> tuple[Outputs, int]:
    core = replace(engine, max_num_seqs=None).core(
        num_blocks=_num_blocks(case, setting),
        block_size=setting.block_size,
        budget=setting.chunk,
        max_num_seqs=16,
        max_model_len=_MAX_MODEL_LEN,
        groups=_groups(case),
        prefix_caching=setting.prefix_caching,
        num_host_blocks=0 if setting.memory in {"ample", "recompute"} else 1000,
        preemption_mode="auto" if setting.memory == "ample" else setting.memory,
        costs=LinearCosts(per_swapped_block=2e-5),
        vocab_size=VOCAB,
    )
    checked = CheckedCore(core)
    outputs: Outputs = {}
    arrivals = list(case.arrivals)
    for step in itertools.count():
        while arrivals and arrivals[0].step <= step:
            arrival = arrivals.pop(0)
            checked.add(arrival.request, list(arrival.rest))
        for number in [number for number, plan in checked.plans.items() if plan.is_open]:
            checked.extend(number, None if step % 3 == 0 else min(2, len(checked.plans[number].unsent)))
        _collect(checked.step(), outputs)
        if not arrivals and not checked.plans:
            break
    checked.drain()
    return outputs, int(core.core.statistics()["num_preemptions_total"])


def _collect(messages: EngineOutputs, outputs: Outputs) -> None:
    for sequence_id, token in zip(messages.sequence_ids.tolist(), messages.token_ids.tolist(), strict=True):
        outputs.setdefault(split_sequence_id(sequence_id), ([], "", None))[0].append(token)
    for end in messages.ends:
        assert end.error is None, end.error
        key = split_sequence_id(end.sequence_id)
        outputs[key] = (outputs[key][0], end.finish_reason, end.stop_reason)


def _groups(case: Case) -> list[KVGroup]:
    return [FULL] if case.windows == (0,) else [KVGroup((f"layer{i}",), one) for i, one in enumerate(case.windows)]


def _num_blocks(case: Case, setting: Setting) -> int:
    """Ample for all of them, or so few that the largest just fits without sharing."""
    needed = [_most_blocks(arrival, setting.block_size) for arrival in case.arrivals]
    count = sum(needed) + 16 if setting.memory == "ample" else max(needed) + 1
    return count * len(case.windows)


def _most_blocks(arrival: Arrival, block_size: int) -> int:
    plan = Plan(arrival.request, [*arrival.request.prompt_token_ids, *arrival.rest], VOCAB, _MAX_MODEL_LEN)
    return plan.num_sequences * -(-(len(plan.prompt) + plan.max_tokens) // block_size)
