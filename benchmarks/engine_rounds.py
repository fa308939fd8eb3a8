"""Engines in steady decode, several alive in one process, that take turns: what async_scheduling.py compares."""

from __future__ import annotations

import gc
import random
import time
from typing import Any

from quire.config import EngineOptions, resolve
from quire.engine_core.engine_core import EngineCore
from quire.engine_core.launch import build_engine_core
from quire.messages import AbortRequests, EngineOutputs, EngineRequest, encode
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
