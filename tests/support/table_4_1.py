"""Which behaviours of table 4.1 a core has shown: by request, and side by side in one step.

Read off the decisions: a grant from a number on, a total, and what a message to the worker says. The scheduler knows no
such words; here is where they are given their meaning.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from quire.engine_core.request import Request, Sequence, Status
from quire.kv_connectors.connector import STEP_DATA, StepTransfers
from quire.messages import SchedulerOutput
from quire.testing.core import CoreUnderTest

PREFILL = "prefill"
DECODE = "decode"
PREEMPTION = "preemption"
CHUNKED = "chunked prefill"
STREAMING = "streaming prefill"
PREFIX = "prefix caching"
DISAGGREGATION = "prefill disaggregation"
SPECULATION = "speculative decoding"
BEHAVIOURS = (PREFILL, DECODE, PREEMPTION, CHUNKED, STREAMING, PREFIX, DISAGGREGATION, SPECULATION)

# Of one prompt that is computed in one step these have not computed a part of it before; and what was sampled elsewhere
# has come whole. So they are seen beside each other.
SIDE_BY_SIDE = (
    frozenset({PREFILL, CHUNKED}),
    frozenset({PREFILL, PREFIX}),
    frozenset({PREFILL, DISAGGREGATION}),
    frozenset({STREAMING, DISAGGREGATION}),
)


class Behaviours:
    """Watches decisions from the first step on."""

    def __init__(self, core: CoreUnderTest) -> None:
        self.by_request: dict[int, set[str]] = defaultdict(set)
        self._num_steps: Counter[frozenset[str]] = Counter()
        self._core = core
        core.executor.observers.append(self._watch)

    def count(self, one: str, other: str) -> int:
        """Requests that have shown both; or steps, where one request cannot."""
        pair = frozenset({one, other})
        if pair in SIDE_BY_SIDE:
            return self._num_steps[pair]
        return sum(pair <= shown for shown in self.by_request.values())

    def _watch(self, output: SchedulerOutput) -> None:
        in_step: dict[int, set[str]] = defaultdict(set)
        running = self._core.scheduler.running
        for row, granted in zip(output.rows.tolist(), output.num_tokens.tolist(), strict=True):
            sequence = running.sequence_at(row)
            in_step[sequence.request.request_id] |= self._of_grant(sequence, granted)
        transfers: StepTransfers = output.step_data.get(STEP_DATA, StepTransfers())
        # by the first block that is filled from elsewhere: how many blocks before it were here
        num_here = {load.blocks[0][0]: load.first_block for load in transfers.loads}
        for admitted in output.admitted:
            sequence = running.sequence_at(admitted.row)
            blocks = sequence.block_tables[0].blocks.tolist()
            fetched = next((block for block in blocks if block in num_here), None)
            shown = in_step[sequence.request.request_id]
            shown |= {DISAGGREGATION} if fetched is not None else set()
            shown |= {PREFIX} if admitted.num_computed_tokens and (fetched is None or num_here[fetched]) else set()
        for appended in output.appended:
            request = running.sequence_at(appended.row).request
            if appended.token_ids and not request.message.is_final:
                in_step[request.request_id].add(STREAMING)
        for request in self._core.scheduler.lifecycle.requests.values():
            if request.status is Status.PREEMPTED:
                in_step[request.request_id].add(PREEMPTION)
        for number, shown in in_step.items():
            self.by_request[number] |= shown
        seen = set().union(*in_step.values())
        self._num_steps.update(pair for pair in SIDE_BY_SIDE if pair <= seen)

    def _of_grant(self, sequence: Sequence, granted: int) -> set[str]:
        request: Request = sequence.request
        worker = self._core.executor.rows
        end = sequence.num_computed_tokens
        if sequence.row < len(worker.num_drafts) and worker.is_used[sequence.row] and worker.num_drafts[sequence.row]:
            return {SPECULATION}
        if end == granted and end >= request.num_prompt_tokens:
            return {PREFILL}
        if end < request.num_prompt_tokens:
            return {CHUNKED}
        return {DECODE} if granted == 1 and end > request.num_prompt_tokens else set()
