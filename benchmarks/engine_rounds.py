"""An engine in steady decode, driven step by step; and one engine in two ways: what async_scheduling.py compares."""

from __future__ import annotations

import gc
import random
import time
from typing import Any

from quire.config import EngineOptions, resolve
from quire.engine_core.engine_core import EngineCore
from quire.engine_core.launch import build_engine_core
from quire.message_encoding import encode
from quire.messages import AbortRequests, EngineOutputs, EngineRequest
from quire.sampling_params import SamplingParams

PROMPT_TOKENS = 32


class SteadyEngine:
    """A core with a real worker, driven as its process would drive it: step, then encode what came out."""

    def __init__(self, model: str, *, is_async: bool | None, **options: Any) -> None:
        config, _ = resolve(EngineOptions(model=model, async_scheduling=is_async, device="cpu", **options))
        self.core: EngineCore = build_engine_core(config)
        self._vocab_size = config.facts.vocab_size
        self._num_requests = 0

    def fill(self, num_sequences: int) -> None:
        """So many sequences that never end, all of them past their prompts."""
        pick = random.Random(num_sequences)
        sampling = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True)
        first = self._num_requests
        for _ in range(num_sequences):
            prompt = [pick.randrange(self._vocab_size) for _ in range(PROMPT_TOKENS)]
            self.core.add(EngineRequest(request_id=self._num_requests, prompt_token_ids=prompt, sampling=sampling))
            self._num_requests += 1
        begun: set[int] = set()
        while len(begun) < self._num_requests - first:
            begun.update(self.core.step().sequence_ids.tolist())
        self.round(4)

    def empty(self) -> None:
        """All of them end, also those that never would."""
        self.core.abort(AbortRequests(request_ids=list(range(self._num_requests))))
        while self.core.has_work:
            self.core.step()

    def round(self, num_steps: int) -> tuple[float, float]:
        """Wall and CPU seconds of so many steps, to the end of the last: nothing runs on while others have a turn.

        With steps in flight a round begins with one that is done already and waits for its own last one, so it is
        charged for a start and an end that a longer run would not have.
        """
        gc.collect()
        gc.disable()
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            self.step()
        self.core.control("worker.ping", {})  # steps and controls are done in the order in which they were asked for
        times = time.perf_counter() - start, time.process_time() - cpu
        gc.enable()
        return times

    def step(self) -> EngineOutputs:
        outputs = self.core.step()
        encode(outputs)
        return outputs


class Way:
    """One engine, with steps decided ahead or not. Both ways share weights and cache: where these lie in memory matters
    more than what is compared (two engines of one kind differ by 5 to 9 %)."""

    def __init__(self, engine: SteadyEngine, *, is_ahead: bool) -> None:
        self.engine = engine
        self._is_ahead = is_ahead

    @property
    def core(self) -> EngineCore:
        return self.engine.core

    def take_over(self) -> None:
        """Settles what the other way has left in flight."""
        core, executor = self.core, self.core.executor
        while core._in_flight:
            core.scheduler.update_from_output(core._in_flight.popleft().result())
        core._depth = int(self._is_ahead)
        if self._is_ahead and executor._thread is None:  # type: ignore[attr-defined]
            executor.run_ahead()  # type: ignore[attr-defined]
        elif not self._is_ahead and executor._thread is not None:  # type: ignore[attr-defined]
            executor._thread.end()  # type: ignore[attr-defined]
            executor._thread = None  # type: ignore[attr-defined]

    def round(self, num_steps: int) -> tuple[float, float]:
        self.take_over()
        self.engine.step()  # a thread that is new, and a step in flight to begin with, done already
        self.core.control("worker.ping", {})
        return self.engine.round(num_steps)

    def step(self) -> EngineOutputs:
        return self.engine.step()
