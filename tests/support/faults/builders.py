"""Cores for a server that is to be broken: what each of them does wrong, in the engine's own process."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.faults.noise import make_noise_in_the_core
from tests.support.faults.paced_core import follow_clock, hang

from quire.config import EngineConfig
from quire.engine_core.engine_core import EngineCore
from quire.engine_core.kv_cache_manager.capacity import CachePlan
from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.engine_core.launch import make_scheduler
from quire.messages import EngineOutputs, EngineReady, StepOutput
from quire.testing.simulator.executor import SimulatedExecutor

MAX_MODEL_LEN = 8192
_NUM_BLOCKS = 8192
_STEP_SECONDS = 0.003
_GROUP = KVGroup(("layer",))


class PacedExecutor(SimulatedExecutor):
    """With the operations of a worker that a server calls for the forms of answers; it does not follow any form."""

    def control(self, name: str, args: dict[str, Any]) -> Any:
        match name:
            case "open_vocabulary":
                return None
            case "prepare_form":
                return True
            case "statistics":
                return {"num_compiled_grammars": 1}
            case _:
                return super().control(name, args)


class PacedCore(EngineCore):
    """Hangs for good in native code that holds the interpreter, once the file that PACED_HANG names is there."""

    def __init__(self, config: EngineConfig) -> None:
        follow_clock()
        plan = CachePlan([_GROUP], _NUM_BLOCKS, MAX_MODEL_LEN, "a cache without contents")
        ready = EngineReady(
            max_model_len=plan.max_model_len,
            max_num_seqs=config.max_num_seqs,
            num_blocks=plan.num_blocks,
            block_size=config.block_size,
            report=["a core without a model"],
        )
        executor = PacedExecutor(plan.groups, plan.num_blocks, config.block_size, config.facts.vocab_size)
        super().__init__(make_scheduler(config, plan), executor, ready)
        self._hang = Path(os.environ.get("PACED_HANG", "/nowhere"))
        self._seconds = float(os.environ.get("PACED_STEP_SECONDS", _STEP_SECONDS))

    def step(self) -> EngineOutputs:
        time.sleep(self._seconds)
        hang(self._hang)
        return super().step()


def build(config: EngineConfig) -> PacedCore:
    return PacedCore(config)


def build_in_kernel(config: EngineConfig) -> PacedCore:
    """Loads for ever, and holds the interpreter meanwhile."""
    print("building in a kernel", file=sys.stderr, flush=True)
    ctypes.PyDLL(None).sleep(600)
    return PacedCore(config)


def build_slowly(config: EngineConfig) -> PacedCore:
    print("building slowly", file=sys.stderr, flush=True)
    time.sleep(600)
    return PacedCore(config)


def build_noisy(config: EngineConfig) -> PacedCore:
    """Beside each message it sends garbage."""
    make_noise_in_the_core()
    return PacedCore(config)


class RepeatingCore(PacedCore):
    """Its worker answers each step again at once, once more a step later, and then a step that nobody asked for."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._last: list[StepOutput] = []
        settle = self.scheduler.update_from_output

        def update_from_output(output: StepOutput) -> EngineOutputs:
            result = settle(output)
            for unasked in (*self._last, output, StepOutput(step=output.step + 10**6, rows=output.rows)):
                again = settle(unasked)
                assert not len(again.token_ids), "a token that nobody waits for"
                result.ends += again.ends
                result.starts += again.starts
            self._last = [output]
            return result

        self.scheduler.update_from_output = update_from_output  # type: ignore[method-assign]


def build_repeating(config: EngineConfig) -> RepeatingCore:
    return RepeatingCore(config)


def build_short_of_memory(config: EngineConfig) -> EngineCore:
    """The real core on its model. When there is a file that SHORT_OF_MEMORY names, with a number n in it, the n-th
    operation of torch from then on finds no memory, once; then the file is gone."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from quire.engine_core.launch import build_engine_core

    core, file = build_engine_core(config), Path(os.environ["SHORT_OF_MEMORY"])

    class NthFails(TorchDispatchMode):
        num_left = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.num_left -= 1
            if self.num_left == 0:
                file.unlink()
                raise torch.OutOfMemoryError("no memory, on purpose")
            return function(*args, **(kwargs or {}))

    mode, worker = NthFails(), core.executor.worker  # type: ignore[attr-defined]
    execute = worker.execute
    with mode:
        torch.zeros(1)  # the first time it loads much that has nothing to do with a step

    def execute_in_mode(output: Any) -> Any:
        if mode.num_left <= 0 and file.exists():
            mode.num_left = int(file.read_text(encoding="utf-8"))
        if mode.num_left <= 0:
            return execute(output)
        with mode:
            return execute(output)

    worker.execute = execute_in_mode
    return core
