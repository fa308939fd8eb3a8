"""vLLM's engine process with nothing to compute: at each tick a token for every running request, as Quire's null core.

Real: the process, its start and handshake, the threads that receive and send, the encoder, the loop around the step.
Replaced: what EngineCore.__init__ sets up (model, cache, scheduler) and the step. Outputs are made when a request
comes, not when they are sent. Run by vLLM's own Python (vllm_null_server.py); it imports nothing of Quire.
"""

from __future__ import annotations

import json
import os
import queue
import time
from itertools import cycle
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine import core as vllm_core
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats

# Their own, kept before vllm_null_server.py puts `run` in its place.
_run = vllm_core.EngineCoreProc.run_engine_core


class NullRequest:
    """One stream: the tokens of tests.support.null_core.answer."""

    def __init__(self, request: Any, tokens: range) -> None:
        prompt, sampling = request.prompt_token_ids, request.sampling_params
        self.request_id, self.client_index = request.request_id, request.client_index
        self.left = max(1, request.max_tokens)
        start = sum(prompt) + len(prompt) + (sampling.seed or 0)
        self._tokens = [tokens[(start + number) % len(tokens)] for number in range(len(tokens))]
        self._outputs = cycle([EngineCoreOutput(self.request_id, [token]) for token in self._tokens])
        self._num_tokens = 0
        self._prefill = PrefillStats()
        self._prefill.set(len(prompt), 0, 0)

    def next(self) -> EngineCoreOutput:
        output = next(self._outputs)
        self.left -= 1
        if self._num_tokens == 0 or self.left == 0:
            # the first tells of the prompt, the last of the end
            output = EngineCoreOutput(
                self.request_id,
                output.new_token_ids,
                prefill_stats=self._prefill if self._num_tokens == 0 else None,
                finish_reason=FinishReason.LENGTH if self.left == 0 else None,
            )
        self._num_tokens += 1
        return output


class NullScheduler:
    """What the loop and the end of the process ask a scheduler."""

    def __init__(self, tokens: range) -> None:
        self._tokens = tokens
        self.running: dict[str, NullRequest] = {}

    def add_request(self, request: Any) -> None:
        self.running[request.request_id] = NullRequest(request, self._tokens)

    def finish_requests(self, request_ids: Any, status: Any) -> list[Any]:
        """vLLM's front end forgets a request when it aborts it; nothing is answered."""
        for request_id in list(self.running) if request_ids is None else request_ids:
            self.running.pop(request_id, None)
        return []

    def has_requests(self) -> bool:
        return bool(self.running)

    has_unfinished_requests = has_requests

    def get_num_unfinished_requests(self) -> int:
        return len(self.running)

    def get_kv_connector(self) -> None:
        return None

    def get_kv_event_publisher_config(self) -> None:
        return None

    def shutdown(self) -> None:
        self.running.clear()


class NullExecutor:
    supported_tasks = ("generate",)

    def reset_mm_cache(self) -> None: ...

    def shutdown(self) -> None: ...


class NullGrammars:
    def clear_backend(self) -> None: ...


class NullCore(vllm_core.EngineCore):
    """Sets what EngineCore.__init__ sets, without a model."""

    def __init__(self, vllm_config: Any, executor_class: Any, log_stats: bool, *_: Any, **__: Any) -> None:
        self.vllm_config, self.log_stats = vllm_config, log_stats
        vllm_config.cache_config.num_gpu_blocks = 2**20
        self.model_executor, self.structured_output_manager = NullExecutor(), NullGrammars()
        first, number = json.loads(os.environ["NULL_CORE_TOKENS"])
        self.scheduler = NullScheduler(range(first, first + number))
        self.mm_receiver_cache = self.request_block_hasher = self.batch_queue = None
        self.use_spec_decode = self.check_for_draft_tokens = self.async_scheduling = False
        self.is_pooling_model = self.is_mm_encoder_only = False
        self.step_fn = self.step
        self.aborts_queue: queue.Queue[list[str]] = queue.Queue()
        self._idle_state_callbacks: list[Any] = []
        self._weight_version = "default"
        self._pooler_config_logged = True
        self._pause = 1 / float(os.environ["QUIRE_NULL_STEPS_A_SECOND"])
        self._due = 0.0
        vllm_core.freeze_gc_heap()

    def step(self) -> tuple[dict[int, EngineCoreOutputs], bool]:
        self._wait()
        running = self.scheduler.running
        by_client: dict[int, list[EngineCoreOutput]] = {}
        ended = []
        for request in running.values():
            by_client.setdefault(request.client_index, []).append(request.next())
            if request.left == 0:
                ended.append(request.request_id)
        for request_id in ended:
            del running[request_id]
        outputs = {client: EngineCoreOutputs(outputs=made) for client, made in by_client.items()}
        self._attach_weight_version(outputs)
        if self.log_stats and outputs:
            next(iter(outputs.values())).scheduler_stats = SchedulerStats(num_running_reqs=len(running))
        return outputs, True

    def _wait(self) -> None:
        """As tests.support.null_core does: late steps are caught up with, up to eight."""
        now = time.monotonic()
        self._due = max(self._due + self._pause, now - 8 * self._pause)
        time.sleep(max(0.0, self._due - now))


class NullCoreProc(vllm_core.EngineCoreProc, NullCore):
    """EngineCoreProc's `super().__init__` finds NullCore's."""


def run(*args: Any, **kwargs: Any) -> None:
    """In the engine's process: their main function, which makes an object of the class of this name."""
    vllm_core.EngineCoreProc = NullCoreProc
    _run(*args, **kwargs)
