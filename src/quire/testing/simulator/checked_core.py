"""A core on the simulated executor whose every answer is held against what it must be, at the step in which it comes.

Whoever drives it (a random workload, a Hypothesis machine, a person at a prompt) only adds, extends, aborts and steps;
a broken rule is an AssertionError. The numbers I1 to I20 are those of docs/simulator.md. Those that the core checks
itself after each step (I1, I2, I3, I8) are not repeated here.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from dataclasses import dataclass

from quire.messages import (
    AbortRequests,
    EngineOutputs,
    EngineRequest,
    ExtendRequest,
    SchedulerOutput,
    SequenceEnd,
    SequenceStart,
    sequence_id_of,
    split_sequence_id,
)
from quire.testing.core import CoreUnderTest
from quire.testing.simulator.decision_checks import DecisionChecks
from quire.testing.simulator.executor import READS_HOLE
from quire.testing.simulator.kept_plans import KeptPlans
from quire.testing.simulator.number_checks import NumberChecks
from quire.testing.simulator.plans import Plan

# Steps in which nothing happens although something could, before that counts as standing still (I9).
_MOST_EMPTY_STEPS = 3
# Counting every slot takes as long as a step; what is kept changes seldom.
_STEPS_BETWEEN_ACCOUNTS = 50
_STEPS_BETWEEN_REPORTS = 4


@dataclass(frozen=True)
class FailingRow:
    """A row that was made to fail in a step; what it computes belongs to the plan unless it changes hands."""

    step: int
    row: int
    plan: Plan
    left_at: int


class CheckedCore:
    """Plans of the living requests, and how much of each has arrived."""

    def __init__(self, core: CoreUnderTest) -> None:
        self.core = core
        self.plans: dict[int, Plan] = {}
        self.kept = KeptPlans(core)
        self.decisions = DecisionChecks(core)
        self._numbers = NumberChecks(core)
        self.counts: Counter[str] = Counter()
        # prompts and outputs of requests that have ended: what a conversation would go on from
        self.recent: deque[list[int]] = deque(maxlen=2)
        self._num_received: defaultdict[int, int] = defaultdict(int)
        self._open_outputs: dict[int, set[int]] = {}
        # outputs whose "abort" must come with the next step
        self._due_ends: list[int] = []
        self._plans_by_salt: dict[str, list[Plan]] = defaultdict(list)
        self._num_empty_steps = 0
        self._failing: int | None = None
        self._failures: list[FailingRow] = []
        core.executor.observers.append(self._choose_failing_row)

    # ------------------------------------------------------------------------------------------ what a driver does

    def add(self, request: EngineRequest, rest_of_prompt: list[int] | None = None) -> Plan:
        """`rest_of_prompt` follows by `extend`, if the request is not final."""
        kept = self.kept.tokens_of(request.continues)
        unsent = list(rest_of_prompt or [])
        num_prompt = len(request.prompt_token_ids) - (request.transfer.num_output_tokens if request.transfer else 0)
        plan = Plan(
            request,
            [*(kept or []), *request.prompt_token_ids[:num_prompt], *unsent],
            self.core.executor.vocab_size,
            self.core.max_model_len,
            request.prompt_token_ids[num_prompt:],
            unsent,
            must_fail=request.continues is not None and kept is None,
        )
        plan.must_fail |= self._never_fits(plan) or not self.kept.may_keep(plan)
        plan.may_be_refused = not self._surely_fits(plan)
        number = request.request_id
        is_repeated = number in self.plans
        self.core.core.add(request)
        if not is_repeated:  # I5: a repeated id gets the outputs of the first
            self.counts["requests"] += 1
            self.counts["kept sequences continued"] += kept is not None
            self.plans[number] = plan
            self._open_outputs[number] = set(range(plan.num_outputs))
            self._plans_by_salt[request.cache_salt].append(plan)
        return plan

    def extend(self, number: int, count: int | None = None) -> None:
        """The next `count` tokens of an open prompt; without a count all that is left, which ends it."""
        plan = self.plans[number]
        plan.is_complete = count is None
        plan.may_be_refused |= not self._surely_fits(plan)
        count = len(plan.unsent) if count is None else count
        tokens, plan.unsent = plan.unsent[:count], plan.unsent[count:]
        self.core.core.extend(ExtendRequest(request_id=number, token_ids=tokens, is_final=plan.is_complete))
        self.counts["extensions"] += 1

    def abort(self, number: int, index: int | None = None) -> None:
        """The whole request, or one of its outputs; unknown ones and a second time are no mistake."""
        self._keep_what_is_there(number, index)
        if index is None:
            self.core.core.abort(AbortRequests(request_ids=[number]))
        else:
            self.core.core.abort(AbortRequests(sequence_ids=[sequence_id_of(number, index)]))
        plan = self.plans.get(number)
        if plan is None:
            return
        given_up = set(self._open_outputs[number])
        if index is not None and (plan.has_output or plan.request.decoding):
            given_up &= {index}
        elif index is not None and index > 0:
            given_up = set()  # it is forked from the first one, later
        for one in sorted(given_up):
            self._due_ends.append(sequence_id_of(number, one))
            self._close(number, one)
        self.counts["aborts"] += 1
        self.counts["aborted in flight"] += self.core.is_async and self.decisions.is_in_flight(number)

    def fail_row(self, pick: int) -> None:
        """One of the rows that the next step computes fails in it."""
        self._failing = pick

    # ------------------------------------------------------------------------------------------ one step

    def step(self) -> EngineOutputs:
        num_steps = self.core.executor.work.num_steps
        outputs = self.core.core.step()
        has_run = self.core.executor.work.num_steps > num_steps
        ends = self._without_due_ends(outputs.ends)
        for start in outputs.starts:
            self._check_start(start)
        self._check_tokens(outputs)
        for end in ends:
            self._check_end(end)
        self._check_failures(outputs.step)
        self._check_tables()
        self._check_liveness(has_run or outputs.step > 0)
        self._numbers.check(self.plans)
        if self.kept.by_handle and self.core.executor.work.num_steps % _STEPS_BETWEEN_REPORTS == 0:
            self.kept.check()
        if has_run:
            self.core.poison_free_blocks()
            if self.core.executor.work.num_steps % _STEPS_BETWEEN_ACCOUNTS == 0:
                self.check_account()
        return outputs

    def drain(self, max_steps: int = 3000) -> None:
        """Everything that was begun is brought to its end (I9), handles are released, and nothing is held (I11)."""
        for number in [number for number, plan in self.plans.items() if plan.is_open]:
            self.extend(number)
        for _ in range(max_steps):
            if not self.core.core.has_work:
                break
            self.step()
        assert not self.core.core.has_work, f"still at work after {max_steps} steps"  # I9
        assert not self.plans, f"requests {sorted(self.plans)} never ended"  # I5, I9
        self.kept.check()
        for handle in list(self.kept.by_handle):
            self.kept.release(handle)
        self.core.assert_empty()  # I11, I20

    # ------------------------------------------------------------------------------------------ checks of outputs

    def _check_start(self, start: SequenceStart) -> None:
        number, _ = split_sequence_id(start.sequence_id)
        plan = self.plans[number]
        assert not plan.has_started, f"request {number} starts twice"
        plan.has_started = True
        cached = start.num_cached_tokens
        transfer = plan.request.transfer
        # I15: at least one token is computed, and what is found are whole blocks, unless a handle has kept the rest or
        # a state stands where an answer ended
        assert 0 <= cached < max(1, len(plan.prompt) + len(plan.given)), f"request {number}: {cached} cached tokens"
        if transfer is not None and transfer.fetch is not None:
            self.counts["prefixes fetched"] += cached > 0
            self.counts["outputs continued"] += bool(plan.given)
            return  # how much of it is there is up to the connector
        if not (self.kept.by_handle or plan.request.continues is not None or self.core.manager.num_state_blocks):
            assert cached % self.core.manager.block_size == 0, f"request {number}: {cached} cached tokens"
        if cached:
            self.counts["prefix hits"] += 1
            self.counts["ends of answers found"] += self._is_end_of_answer(plan, cached)
            assert self._was_seen(plan, cached), f"request {number}: {cached} tokens of another tenant"  # I17

    def _is_end_of_answer(self, plan: Plan, cached: int) -> bool:
        """Neither whole blocks, nor a handle's, nor a pinned prefix: a state stands where an answer ended."""
        pinned = {len(one.tokens) for one in self.kept.by_handle.values() if one.is_pinned}
        is_whole = cached % self.core.manager.block_size == 0
        return not is_whole and plan.request.continues is None and cached not in pinned

    def _keep_what_is_there(self, number: int, index: int | None) -> None:
        """One output that is given up (its text has met a stop string) is kept as far as it came."""
        plan = self.plans.get(number)
        if plan is None or plan.request.keep is None or index != 0:
            return
        if number in self.core.scheduler.lifecycle.requests:  # it was not refused
            sent = plan.prompt[: len(plan.prompt) - len(plan.unsent)]
            received = self._num_received[sequence_id_of(number, 0)]
            output = plan.outcomes[0].tokens[:received] if received else []
            self.kept.keep(plan.request.keep, [*sent, *plan.given, *output], plan.request.cache_salt)

    def _was_seen(self, plan: Plan, count: int) -> bool:
        """Whether somebody with the same salt can have computed the first `count` tokens of this prompt."""
        wanted = plan.prompt[:count]
        others = (other for other in self._plans_by_salt[plan.request.cache_salt] if other is not plan)
        return any(_may_have_computed(other, wanted) for other in others) or self._is_kept(plan, wanted)

    def _is_kept(self, plan: Plan, wanted: list[int]) -> bool:
        kept = self.kept.by_handle.values()
        return any(one.salt == plan.request.cache_salt and one.tokens[: len(wanted)] == wanted for one in kept)

    def _check_tokens(self, outputs: EngineOutputs) -> None:
        """I6, I12: each token in its turn is the one that the model says, whatever the scheduler did."""
        new: defaultdict[int, int] = defaultdict(int)
        for sequence_id, token in zip(outputs.sequence_ids.tolist(), outputs.token_ids.tolist(), strict=True):
            number, index = split_sequence_id(sequence_id)
            # I5, I14
            assert index in self._open_outputs.get(number, ()), f"request {number}: a token of what has ended"
            plan = self.plans[number]
            expected = plan.outcomes[index].tokens
            position = self._num_received[sequence_id] + new[sequence_id]
            new[sequence_id] += 1
            plan.has_output = True
            assert position < len(expected), f"request {number}, output {index}: a token more than there are"
            assert token == expected[position], (
                f"request {number}, output {index}: token {position} is {token}, not {expected[position]}"
            )
        self._check_logprobs(outputs, new)
        for sequence_id, count in new.items():
            self._num_received[sequence_id] += count

    def _check_logprobs(self, outputs: EngineOutputs, new: dict[int, int]) -> None:
        """Every token of a beam comes with what it cost."""
        listed: dict[int, list[float]] = defaultdict(list)
        for entry in outputs.logprobs:
            listed[entry.sequence_id] += [position.logprobs[0] for position in entry.positions]
        for sequence_id, count in new.items():
            number, index = split_sequence_id(sequence_id)
            costs = self.plans[number].outcomes[index].logprobs
            if costs:
                start = self._num_received[sequence_id]
                pairs = zip(listed[sequence_id], costs[start : start + count], strict=True)
                assert all(math.isclose(a, b, abs_tol=1e-9) for a, b in pairs), "log-probabilities of a beam"

    def _check_end(self, end: SequenceEnd) -> None:
        """I5: once, with the one reason that fits."""
        number, index = split_sequence_id(end.sequence_id)
        assert index in self._open_outputs.get(number, ()), f"request {number}, output {index}: ended twice"
        plan = self.plans[number]
        assert 0 <= end.num_accepted_tokens <= end.num_drafted_tokens
        if end.finish_reason == "error":
            may_fail = plan.may_fail or end.error == READS_HOLE
            assert may_fail or plan.must_fail or plan.may_be_refused, f"request {number}: {end.error}"
            # I9: the core's way out when nobody can run, which must not be needed
            assert "more blocks are needed" not in (end.error or ""), f"request {number}: {end.error}"
            self.counts["failures" if may_fail else "refusals"] += 1
        else:
            outcome = plan.outcomes[index]
            assert not plan.must_fail, f"request {number}: must have been refused"  # I10
            assert self._num_received[end.sequence_id] == len(outcome.tokens), f"request {number}: ended too early"
            assert (end.finish_reason, end.stop_reason) == (outcome.finish_reason, outcome.stop_reason)
            tokens = [*plan.prompt, *plan.given, *outcome.tokens]
            self.recent.append(tokens)
            if index == 0 and plan.request.keep is not None:
                self.kept.keep(plan.request.keep, tokens, plan.request.cache_salt)
        self._close(number, index)

    def _without_due_ends(self, ends: list[SequenceEnd]) -> list[SequenceEnd]:
        """I13: what was aborted ends with the next step; an id may be used again at once."""
        if not self._due_ends:
            return ends
        others = []
        for end in ends:
            # refused before it was aborted
            if end.sequence_id in self._due_ends and end.finish_reason in {"abort", "error"}:
                self._due_ends.remove(end.sequence_id)
            else:
                others.append(end)
        assert not self._due_ends, f"aborted, but not ended: {self._due_ends}"
        return others

    def _close(self, number: int, index: int) -> None:
        self._open_outputs[number].discard(index)
        self._num_received.pop(sequence_id_of(number, index), None)
        if not self._open_outputs[number]:
            del self.plans[number], self._open_outputs[number]

    # ------------------------------------------------------------------------------------------ checks of the state

    def _check_tables(self) -> None:
        """I5: the core remembers exactly the requests that have not ended."""
        assert self.core.scheduler.lifecycle.requests.keys() == self.plans.keys(), "requests live on, or were lost"

    def check_account(self) -> None:
        """I20: every slot is accounted for, once."""
        memory = self.core.scheduler.memory()
        assert sum(memory["slots"].values()) == memory["num_blocks"] * memory["block_size"], memory["slots"]
        assert sum(memory["host_slots"].values()) == memory["num_host_blocks"] * memory["block_size"]
        assert min(memory["slots"].values()) >= 0, memory["slots"]

    def _check_liveness(self, has_run: bool) -> None:
        """I9: the core stops only when everybody waits for input."""
        if has_run or all(plan.is_open for plan in self.plans.values()):
            self._num_empty_steps = 0
            return
        self._num_empty_steps += 1
        assert self._num_empty_steps <= _MOST_EMPTY_STEPS, "nothing runs although something could"

    def _choose_failing_row(self, decided: SchedulerOutput) -> None:
        """Chosen when nothing can change its owner any more."""
        for failure in self._failures:
            # it computed nothing in its step, because it had failed already, and is somebody else's by now
            if self.core.rows.left_at[failure.row] > failure.left_at:
                self.core.executor.failing_rows.pop(failure.row, None)
        if self._failing is None or not len(decided.rows):
            return
        row = int(decided.rows[self._failing % len(decided.rows)])
        self._failing = None
        plan = self.plans[self.core.scheduler.running.sequence_at(row).request.request_id]
        self.core.executor.failing_rows[row] = "a failure that was asked for"
        self._failures.append(FailingRow(decided.step, row, plan, int(self.core.rows.left_at[row])))
        plan.may_fail = True

    def _check_failures(self, step: int) -> None:
        """Once the results of the step are here, the request is gone; with one exception."""
        for failure in [one for one in self._failures if one.step <= step]:
            self._failures.remove(failure)
            was_skipped = self.core.executor.failing_rows.pop(failure.row, None) is not None
            has_left = bool(self.core.rows.left_at[failure.row] > failure.left_at)
            lives_on = any(plan is failure.plan for plan in self.plans.values())
            assert was_skipped or has_left or not lives_on, "a request goes on although one of its rows has failed"

    def _never_fits(self, plan: Plan) -> bool:
        """I10: such a request must be refused, and not wait for ever."""
        is_empty = plan.request.is_final and not plan.prompt
        too_long = len(plan.prompt) >= self.core.max_model_len
        return is_empty or too_long or plan.num_sequences > self.core.rows.num_rows

    def _surely_fits(self, plan: Plan) -> bool:
        """Such a request must not be refused: without sharing anything it fits beside what is pinned."""
        block_size = self.core.manager.block_size
        prefixes = [one for one in self.kept.by_handle.values() if one.is_pinned]
        pinned = sum(-(-len(one.tokens) // block_size) for one in prefixes)
        of_one = -(-(len(plan.prompt) + plan.max_tokens) // block_size)
        num_groups = sum(not group.num_state_blocks for group in self.core.manager.groups)
        of_states = (plan.num_sequences + len(prefixes)) * self.core.manager.num_state_blocks
        return (plan.num_sequences * of_one + pinned) * num_groups + of_states <= self.core.pool.num_blocks


def _may_have_computed(other: Plan, wanted: list[int]) -> bool:
    """Whether a request's prompt and outputs begin like this. What beams tried and dropped is not known."""
    prompt = other.prompt
    if prompt[: len(wanted)] != wanted[: len(prompt)]:
        return False
    rest = wanted[len(prompt) :]
    if not rest or other.request.decoding:
        return True
    outputs = ([*other.given, *outcome.tokens] for outcome in other.outcomes) if not other.must_fail else ()
    return any(output[: len(rest)] == rest for output in outputs)
