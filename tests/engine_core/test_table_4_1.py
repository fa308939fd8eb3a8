"""Table 4.1 of the thesis: every behaviour is a value of num_computed_tokens and num_total_tokens. One test a row.

Each row is shown synchronously and asynchronously (4.6.1). The two numbers follow from the decision alone, so after a
decision they are the same in both; what differs is how many tokens are known: asynchronously the token of the step in
flight is promised, not known.
"""

from __future__ import annotations

import pytest

from quire.engine_core.request import Sequence
from quire.kv_connectors.memory.store import PrefixStore
from quire.messages import ExtendRequest, KVTransfer, SchedulerOutput
from quire.testing.core import CoreUnderTest
from quire.testing.simulator.checking_model import expected_tokens
from quire.testing.simulator.executor import SimulatedDrafts

PROMPT = list(range(10, 21))
RIGHT = SimulatedDrafts(acceptance=1.0, shortfall=0.0)
WRONG = SimulatedDrafts(acceptance=0.0, shortfall=0.0)

in_both_ways = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


class Watched(CoreUnderTest):
    """Remembers what each decision granted, and the numbers as the decision left them."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.grants: list[list[int]] = []
        self.decided: list[tuple[int, int]] = []
        self.executor.observers.append(self._watch)

    def _watch(self, output: SchedulerOutput) -> None:
        self.grants.append(output.num_tokens.tolist())
        sequences = self.scheduler.running.living_sequences()
        self.decided += [(one.num_computed_tokens, one.num_total_tokens) for one in sequences[:1]]

    def take(self) -> list[int]:
        """One step; what it granted."""
        self.step()
        return self.grants[-1]


def numbers(core: CoreUnderTest) -> tuple[int, int, int]:
    """(computed, total, known) of the only sequence."""
    (sequence,) = core.scheduler.running.living_sequences()
    return sequence.num_computed_tokens, sequence.num_total_tokens, sequence.num_known_tokens


# ---- prefill and decode


@in_both_ways
def test_prefill_computes_the_prompt_in_one_step_and_adds_one_token(is_async: bool) -> None:
    core = Watched(is_async=is_async)
    core.add(1, PROMPT, max_tokens=5)
    assert core.take() == [11]
    assert numbers(core) == (11, 12, 11 if is_async else 12)


@in_both_ways
def test_decode_is_a_grant_of_one(is_async: bool) -> None:
    core = Watched(is_async=is_async)
    core.add(1, PROMPT, max_tokens=6)
    core.step()
    for done in range(1, 4):
        assert core.take() == [1]
        assert numbers(core) == (11 + done, 12 + done, 12 + done - is_async)


@pytest.mark.parametrize(("is_async", "ignore_eos", "num_steps"), [(False, True, 7), (True, True, 7), (True, False, 5)])
def test_number_of_passes_is_one_for_the_prompt_and_one_a_token(
    is_async: bool, ignore_eos: bool, num_steps: int
) -> None:
    """2.1: the first token comes from the prompt's own pass. The last one is never computed, also in flight."""
    core = CoreUnderTest(is_async=is_async)
    expected = expected_tokens(PROMPT, 7, vocab_size=50)
    core.add(1, PROMPT, max_tokens=7, ignore_eos=ignore_eos, request={"eos_token_ids": [expected[3]]})
    core.run()
    # 4.6.1: where a stop token ends it, the step behind it was decided already
    assert core.scheduler.statistics()["num_steps_total"] == num_steps
    assert core.tokens[1 << 10] == expected if ignore_eos else expected[:4]


# ---- preemption


@in_both_ways
def test_preemption_sets_computed_to_zero_and_resumes_in_one_pass(is_async: bool) -> None:
    core = Watched(num_blocks=8, block_size=4, budget=64, prefix_caching=False, is_async=is_async)
    core.add(1, list(range(12)), max_tokens=8)
    core.add(2, list(range(20, 32)), max_tokens=8)
    resumed: list[tuple[int, int]] = []
    total_before = 0
    victim: Sequence | None = None
    while core.core.has_work:
        core.step()
        preempted = [
            request for request in core.scheduler.lifecycle.requests.values() if request.status.value == "preempted"
        ]
        if preempted and victim is None:
            (victim,) = preempted[0].sequences.values()
            total_before = victim.num_total_tokens
            assert (victim.num_computed_tokens, total_before) == (0, 17)
            # it gave way before the step that was to compute its 17th token; the results of its last one are there
            assert victim.num_known_tokens == 17
            assert not any(map(len, victim.block_tables))
        elif victim is not None and victim.num_computed_tokens and not resumed:
            resumed.append((victim.num_computed_tokens, victim.num_total_tokens))
    assert resumed == [(17, 18)]  # 4.4.3: prompt and output together, one pass
    assert core.scheduler.recovery.num_by_recompute == 1
    for number, start in ((1, 0), (2, 20)):
        expected = expected_tokens(list(range(start, start + 12)), 8, vocab_size=50)
        assert core.tokens[number << 10] == expected


# ---- chunks


@in_both_ways
def test_chunked_prefill_keeps_the_total_until_all_is_computed(is_async: bool) -> None:
    core = Watched(budget=4, is_async=is_async)
    core.add(1, PROMPT, max_tokens=3)
    for _ in range(3):
        core.step()
    assert core.grants == [[4], [4], [3]]
    assert core.decided == [(4, 11), (8, 11), (11, 12)]


# ---- streamed input


@in_both_ways
def test_streaming_prefill_adds_to_the_total_and_samples_only_at_the_end(is_async: bool) -> None:
    core = Watched(is_async=is_async)
    core.add(1, PROMPT[:3], max_tokens=6, is_final=False)
    core.step()
    assert numbers(core) == (3, 3, 3)
    core.core.extend(ExtendRequest(request_id=1, token_ids=PROMPT[3:8]))
    core.step()
    assert numbers(core) == (8, 8, 8)
    assert not core.tokens
    core.core.extend(ExtendRequest(request_id=1, token_ids=PROMPT[8:], is_final=True))
    core.step()
    assert numbers(core) == (11, 12, 11 if is_async else 12)
    assert core.grants == [[3], [5], [3]]
    core.run()
    assert core.tokens[1 << 10] == expected_tokens(PROMPT, 6, vocab_size=50)


@in_both_ways
def test_streaming_prefill_may_end_without_another_token(is_async: bool) -> None:
    core = Watched(is_async=is_async)
    core.add(1, PROMPT, max_tokens=6, is_final=False)
    core.step()
    core.core.extend(ExtendRequest(request_id=1, token_ids=[], is_final=True))
    core.run()
    assert core.grants[:2] == [[11], [1]]  # the last token once more: nothing was sampled from it
    assert core.tokens[1 << 10] == expected_tokens(PROMPT, 6, vocab_size=50)


# ---- prefix caching


@in_both_ways
def test_prefix_caching_starts_at_the_cached_length(is_async: bool) -> None:
    core = Watched(block_size=4, is_async=is_async)
    core.add(1, PROMPT, max_tokens=1)
    core.run()
    core.add(2, [*PROMPT, 40, 41], max_tokens=3)
    assert core.take() == [len(PROMPT) + 2 - 8]  # two full blocks of four are there
    assert numbers(core) == (13, 14, 13 if is_async else 14)


@in_both_ways
def test_prefix_caching_always_computes_one_token(is_async: bool) -> None:
    core = CoreUnderTest(block_size=4, is_async=is_async)
    core.add(1, PROMPT[:8], max_tokens=1)
    core.run()
    core.add(2, PROMPT[:8], max_tokens=3)
    core.run()
    assert core.cached[2 << 10] == 4
    assert core.tokens[2 << 10] == expected_tokens(PROMPT[:8], 3, vocab_size=50)


@in_both_ways
def test_prefix_caching_with_chunks(is_async: bool) -> None:
    core = Watched(block_size=4, budget=3, is_async=is_async)
    core.add(1, PROMPT, max_tokens=1)
    core.run()
    core.grants.clear()
    core.add(2, [*PROMPT, 40], max_tokens=2)
    core.run()
    assert core.grants == [[3], [1], [1]]
    assert core.scheduler.manager.num_hit_tokens == 8


@in_both_ways
def test_output_of_an_earlier_turn_is_a_prefix_of_the_next(is_async: bool) -> None:
    core = CoreUnderTest(block_size=4, is_async=is_async)
    core.add(1, PROMPT, max_tokens=10)
    core.run()
    conversation = [*PROMPT, *core.tokens[1 << 10], 3, 4]
    core.add(2, conversation, max_tokens=2)
    core.run()
    assert core.cached[2 << 10] == 20  # 20 of the 21 tokens computed so far fill blocks


def test_a_salt_hides_the_cache_of_others() -> None:
    core = CoreUnderTest(block_size=4)
    core.add(1, PROMPT, max_tokens=1)
    core.run()
    before = core.manager.num_hit_tokens
    core.add(2, PROMPT, max_tokens=1, request={"cache_salt": "b"})
    core.run()
    assert core.manager.num_hit_tokens == before


def block_names_of(is_async: bool, num_steps: int) -> int:
    """X = [A, B, C] is computed at step 1 and generates D. Y = [A, B, C, D, ...] comes so many steps later."""
    core = CoreUnderTest(block_size=1, is_async=is_async, max_model_len=32)
    (token,) = expected_tokens(PROMPT[:3], 1, vocab_size=50)
    core.add(1, PROMPT[:3], max_tokens=8)
    for _ in range(num_steps):
        core.step()
    core.add(2, [*PROMPT[:3], token, 40, 41], max_tokens=1)
    core.run()
    return core.cached[2 << 10]


@pytest.mark.parametrize(
    ("is_async", "num_hits_by_step"),
    [
        (False, {1: 4, 2: 4}),
        # 4.6.1: Y is scheduled before D has come, so it hits the blocks of [A, B, C] only; one step later all four
        (True, {1: 3, 2: 4}),
    ],
)
def test_asynchronously_an_output_block_is_registered_one_step_later(
    is_async: bool, num_hits_by_step: dict[int, int]
) -> None:
    """The example of 4.6.1. X computes D in the step in which Y comes: what one step writes, all its rows may read."""
    assert {num_steps: block_names_of(is_async, num_steps) for num_steps in num_hits_by_step} == num_hits_by_step


# ---- prefill elsewhere


@in_both_ways
def test_prefill_elsewhere_starts_with_the_prompt_computed_and_its_first_token_there(is_async: bool) -> None:
    """4.4.4: computed <- L_prompt, total <- L_prompt + 1; then it decodes like any other."""
    store = PrefixStore()
    prefill, decode = Watched(store=store, is_async=is_async), Watched(store=store, is_async=is_async)
    prefill.add(1, PROMPT, max_tokens=1, request={"transfer": KVTransfer(store="a")})
    prefill.run()
    assert (prefill.grants, prefill.decided) == ([[11]], [(11, 11)])  # generation stops after the first token
    first = prefill.tokens[1 << 10]
    transfer = KVTransfer(fetch="a", num_fetch_tokens=11, num_output_tokens=1)
    decode.add(1, [*PROMPT, *first], max_tokens=6, request={"transfer": transfer})
    assert decode.take() == [1]
    # before the decision 11 of 12; a grant of 1 on top of it
    assert decode.decided == [(11 + 1, 12 + 1)]
    assert numbers(decode) == (12, 13, 12 if is_async else 13)
    decode.run()
    assert [*first, *decode.tokens[1 << 10]] == expected_tokens(PROMPT, 6, vocab_size=50)
    assert decode.executor.work.num_tokens == 5


@in_both_ways
def test_prefill_elsewhere_fetches_only_what_is_not_here(is_async: bool) -> None:
    store = PrefixStore()
    prefill, decode = Watched(store=store), Watched(store=store, is_async=is_async)
    prefill.add(1, PROMPT, max_tokens=1, request={"transfer": KVTransfer(store="a")})
    prefill.run()
    decode.add(1, PROMPT[:9], max_tokens=1)
    decode.run()
    transfer = KVTransfer(fetch="a", num_fetch_tokens=11, num_output_tokens=1)
    decode.add(2, [*PROMPT, *prefill.tokens[1 << 10]], max_tokens=3, request={"transfer": transfer})
    decode.run()
    # two of its three blocks are here; the third is the one that was moved
    assert decode.scheduler.statistics()["fetched_blocks_total"] == 1
    assert decode.grants == [[9], [1], [1]]
    assert decode.tokens[2 << 10] == expected_tokens(PROMPT, 3, vocab_size=50)[1:]


# ---- speculation


@in_both_ways
def test_right_drafts_add_all_of_them_and_one_token_more(is_async: bool) -> None:
    """4.4.4: total grows by L_draft + 1, so the next grant is L_draft + 1."""
    core = Watched(num_drafts=3, drafts=RIGHT, is_async=is_async)
    core.add(1, PROMPT, max_tokens=40)
    assert core.take() == [11]
    assert core.decided == [(11, 15)]
    for _ in range(2):
        assert core.take() == [4]
    assert core.decided[1:] == [(15, 19), (19, 23)]
    assert numbers(core) == (19, 23, 16 if is_async else 20)


@in_both_ways
def test_wrong_drafts_take_back_what_was_granted_for_them(is_async: bool) -> None:
    """4.4.4: computed <- computed + granted - L_rejected, total <- total + L_draft - L_rejected + 1."""
    core = Watched(num_drafts=3, drafts=WRONG, is_async=is_async)
    core.add(1, PROMPT, max_tokens=40)
    core.step()
    assert core.take() == [4]
    assert core.decided[-1] == (15, 19), "an upper bound, until the drafts were looked at"
    if is_async:
        # the results of the first step are here: three drafts were proposed, and nothing is known of them
        assert numbers(core) == (15, 19, 12)
        core.step()
        # Decided on top of the bound: computed 15 + 4, total 19 + 4. Then three of the first grant were rejected:
        # the worker was at 12 of 16, and 4 more are granted.
        assert core.decided[-1] == (19, 23)
        assert numbers(core) == (16, 20, 13)
    else:
        assert numbers(core) == (11 + 4 - 3, 12 + 3 - 3 + 1 + 3, 13)
    core.run()
    assert core.tokens[1 << 10] == expected_tokens(PROMPT, 40, vocab_size=50)


@in_both_ways
def test_a_long_draft_is_verified_in_chunks(is_async: bool) -> None:
    core = Watched(num_drafts=5, drafts=RIGHT, budget=2, is_async=is_async)
    core.add(1, PROMPT[:2], max_tokens=12)
    core.run()
    assert core.executor.work.num_partial_verifications > 0
    assert {count for (count,) in core.grants} <= {1, 2}
    assert core.tokens[1 << 10] == expected_tokens(PROMPT[:2], 12, vocab_size=50)


# ---- KV that another engine has computed


@in_both_ways
def test_disaggregated_prefill_begins_where_the_other_engine_ended(is_async: bool) -> None:
    """It arrives with num_computed = L_prompt and num_total = L_prompt + 1, and decoding goes on as ever."""
    store = PrefixStore()
    first = Watched(store=store, is_async=is_async)
    first.add(1, PROMPT, max_tokens=1, request={"transfer": KVTransfer(store="kv")})
    first.run()
    assert first.grants == [[11]]
    second = Watched(store=store, is_async=is_async)
    arrived: list[tuple[int, int]] = []
    second.executor.observers.append(
        lambda output: arrived.extend((one.num_computed_tokens, len(one.token_ids)) for one in output.admitted)
    )
    transfer = KVTransfer(fetch="kv", num_fetch_tokens=11, num_output_tokens=1)
    second.add(1, [*PROMPT, *first.tokens[1 << 10]], max_tokens=5, request={"transfer": transfer})
    assert second.take() == [1]
    assert arrived == [(11, 12)]
    assert numbers(second) == (12, 13, 12 if is_async else 13)
    second.run()
    assert second.grants == [[1]] * 4
    assert [*first.tokens[1 << 10], *second.tokens[1 << 10]] == expected_tokens(PROMPT, 5, vocab_size=50)


@in_both_ways
def test_disaggregated_prefill_moves_only_what_prefix_caching_has_not(is_async: bool) -> None:
    store = PrefixStore()
    first = CoreUnderTest(store=store, is_async=is_async)
    first.add(1, PROMPT, max_tokens=1, request={"transfer": KVTransfer(store="kv")})
    first.run()
    second = CoreUnderTest(store=store, is_async=is_async)
    second.add(1, PROMPT[:9], max_tokens=1)
    second.run()
    transfer = KVTransfer(fetch="kv", num_fetch_tokens=11, num_output_tokens=1)
    second.add(2, [*PROMPT, *first.tokens[1 << 10]], max_tokens=5, request={"transfer": transfer})
    second.step()
    assert second.cached[2 << 10] == 11
    statistics = second.core.statistics()
    assert (statistics["fetched_tokens_total"], statistics["fetched_blocks_total"]) == (11 - 8, 1)
