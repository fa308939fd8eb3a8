"""Table 4.1 of the thesis: every behaviour is a value of num_computed_tokens and num_total_tokens. One test a row."""

from __future__ import annotations

from quire.engine_core.executor.checking_model import expected_tokens
from quire.engine_core.request import Sequence
from quire.messages import ExtendRequest
from quire.testing.core import CoreUnderTest

PROMPT = list(range(10, 21))


def numbers(core: CoreUnderTest) -> tuple[int, int]:
    (sequence,) = core.scheduler.running.living_sequences()
    return sequence.num_computed_tokens, sequence.num_total_tokens


def last_grants(core: CoreUnderTest) -> list[int]:
    output = core.scheduler.schedule()
    assert output is not None
    core.scheduler.update_from_output(core.executor.execute(output).result())
    return list(output.num_tokens)


def test_prefill_computes_the_prompt_in_one_step_and_adds_one_token() -> None:
    core = CoreUnderTest()
    core.add(1, PROMPT, max_tokens=5)
    assert last_grants(core) == [len(PROMPT)]
    assert numbers(core) == (len(PROMPT), len(PROMPT) + 1)


def test_decode_is_a_grant_of_one() -> None:
    core = CoreUnderTest()
    core.add(1, PROMPT, max_tokens=5)
    core.step()
    for done in range(1, 4):
        assert last_grants(core) == [1]
        assert numbers(core) == (len(PROMPT) + done, len(PROMPT) + done + 1)


def test_number_of_passes_is_one_for_the_prompt_and_one_a_token() -> None:
    core = CoreUnderTest()
    core.add(1, PROMPT, max_tokens=7)
    core.run()
    assert core.scheduler.statistics()["num_steps_total"] == 7  # 2.1: the first token comes from the prompt's own pass


def test_preemption_sets_computed_to_zero_and_resumes_in_one_pass() -> None:
    core = CoreUnderTest(num_blocks=8, block_size=4, budget=64, prefix_caching=False)
    core.add(1, list(range(12)), max_tokens=8)
    core.add(2, list(range(20, 32)), max_tokens=8)
    resumed: list[int] = []
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
            assert victim.num_computed_tokens == 0
            assert not any(map(len, victim.block_tables))
        elif victim is not None and victim.num_computed_tokens and not resumed:
            resumed.append(victim.num_computed_tokens)
    assert resumed == [total_before]  # 4.4.3: prompt and output together, one pass
    assert core.scheduler.recovery.num_by_recompute == 1
    for number, start in ((1, 0), (2, 20)):
        expected = expected_tokens(list(range(start, start + 12)), 8, vocab_size=50)
        assert core.tokens[number << 10] == expected


def test_chunked_prefill_keeps_the_total_until_all_is_computed() -> None:
    core = CoreUnderTest(budget=4)
    core.add(1, PROMPT, max_tokens=2)
    seen = []
    for _ in range(3):
        last_grants(core)
        seen.append(numbers(core))
    assert seen == [(4, 11), (8, 11), (11, 12)]


def test_streaming_prefill_adds_to_the_total_and_samples_only_at_the_end() -> None:
    core = CoreUnderTest()
    core.add(1, PROMPT[:3], max_tokens=6, is_final=False)
    core.step()
    assert numbers(core) == (3, 3)
    core.core.extend(ExtendRequest(request_id=1, token_ids=PROMPT[3:8]))
    core.step()
    assert numbers(core) == (8, 8)
    assert not core.tokens
    core.core.extend(ExtendRequest(request_id=1, token_ids=PROMPT[8:], is_final=True))
    core.run()
    assert core.tokens[1 << 10] == expected_tokens(PROMPT, 6, vocab_size=50)


def test_streaming_prefill_may_end_without_another_token() -> None:
    core = CoreUnderTest()
    core.add(1, PROMPT, max_tokens=6, is_final=False)
    core.step()
    core.core.extend(ExtendRequest(request_id=1, token_ids=[], is_final=True))
    core.run()
    assert core.tokens[1 << 10] == expected_tokens(PROMPT, 6, vocab_size=50)


def test_prefix_caching_starts_at_the_cached_length() -> None:
    core = CoreUnderTest(block_size=4)
    core.add(1, PROMPT, max_tokens=1)
    core.run()
    core.add(2, [*PROMPT, 40, 41], max_tokens=2)
    assert last_grants(core) == [len(PROMPT) + 2 - 8]  # two full blocks of four are there
    assert numbers(core) == (len(PROMPT) + 2, len(PROMPT) + 3)


def test_prefix_caching_always_computes_one_token() -> None:
    core = CoreUnderTest(block_size=4)
    core.add(1, PROMPT[:8], max_tokens=1)
    core.run()
    core.add(2, PROMPT[:8], max_tokens=3)
    core.run()
    assert core.cached[2 << 10] == 4
    assert core.tokens[2 << 10] == expected_tokens(PROMPT[:8], 3, vocab_size=50)


def test_prefix_caching_with_chunks() -> None:
    core = CoreUnderTest(block_size=4, budget=3)
    core.add(1, PROMPT, max_tokens=1)
    core.run()
    core.add(2, PROMPT, max_tokens=2)
    assert [last_grants(core) for _ in range(2)] == [[3], [1]]
    assert core.scheduler.manager.num_hit_tokens == 8


def test_output_of_an_earlier_turn_is_a_prefix_of_the_next() -> None:
    core = CoreUnderTest(block_size=4)
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
    request = core.core.scheduler
    before = request.manager.num_hit_tokens
    from quire.messages import EngineRequest
    from quire.sampling_params import SamplingParams

    core.core.add(
        EngineRequest(request_id=2, prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=1), cache_salt="b")
    )
    core.run()
    assert request.manager.num_hit_tokens == before
