"""What is refused on arrival, and that nobody else notices."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.messages import AbortRequests, DecodingSpec, EngineRequest, ExtendRequest, Media, Tenancy, sequence_id_of
from quire.sampling_params import SamplingParams
from quire.testing.core import CoreUnderTest

PROMPT = [1, 2, 3]


@pytest.mark.parametrize(
    ("prompt", "sampling", "reason"),
    [
        ([], {}, "the prompt is empty"),
        (list(range(40)), {}, "maximum context length is 40 tokens. However, the prompt has 40 tokens"),
        (PROMPT, {"n": 5}, "n=5: at most max_num_seqs=4"),
        (
            PROMPT,
            {"n": 4, "max_tokens": 30},
            "4 x 33 tokens need up to 36 blocks of 4 tokens, the engine has 20. Lower max_tokens or n, or give",
        ),
    ],
)
def test_what_can_never_run_is_refused(prompt: list[int], sampling: dict[str, int], reason: str) -> None:
    core = CoreUnderTest(num_blocks=20, block_size=4, max_num_seqs=4, max_model_len=40)
    core.add(1, PROMPT, max_tokens=3)
    core.add(2, prompt, **sampling)
    core.add(3, PROMPT, max_tokens=3)
    core.run()
    refused = [end for end in core.ends.values() if end.finish_reason == "error"]
    assert {end.sequence_id for end in refused} == {sequence_id_of(2, index) for index in range(sampling.get("n", 1))}
    assert all(reason in (end.error or "") for end in refused), refused
    assert len(core.tokens[sequence_id_of(1, 0)]) == len(core.tokens[sequence_id_of(3, 0)]) == 3


def test_what_has_no_room_is_said_by_its_own_name() -> None:
    """Blocks are of one group of layers; the width of a search is not called n; of one sequence max_tokens is all."""
    groups = [KVGroup(("a",), 0), KVGroup(("b",), 0)]
    core = CoreUnderTest(num_blocks=20, block_size=4, max_num_seqs=4, max_model_len=64, groups=groups)
    core.add(1, PROMPT, max_tokens=50)
    core.add(2, PROMPT, max_tokens=50, request={"decoding": DecodingSpec(method="beam_search", args={"width": 2})})
    core.run()
    errors = [core.ends[sequence_id_of(number, 0)].error or "" for number in (1, 2)]
    assert all("blocks of 4 tokens in 2 groups of layers, the engine has 20." in error for error in errors), errors
    assert "Lower max_tokens, or" in errors[0]
    assert "Lower max_tokens or beam_width, or" in errors[1]


def image(start: int) -> Media:
    """Of two tokens, one beside the other."""
    return Media(
        start=start, length=2, pixels=b"", shape=[8, 3, 0], mean=[0.0] * 3, std=[1.0] * 3, grid=[1, 2, 4], merge_size=2,
        content_hash=b"",
    )  # fmt: skip


def at(start: int, time: int) -> Media:
    """Later frames of a video."""
    return msgspec.structs.replace(image(start), time=time)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"adapter": 3}, "not loaded any more"),
        ({"media": [image(2)]}, "outside of the prompt"),
        ({"media": [image(1), image(0)]}, "must follow each other"),
        ({"media": [at(0, 0)]}, "must follow its first ones"),
        ({"media": [image(0), at(3, 1)]}, "must follow its first ones"),
        ({"media": [image(0), at(2, -1)]}, "must follow its first ones"),
        ({"media": [image(0), at(2, 4)]}, "no further in time than in tokens"),
        ({"media": [image(0), at(2, 3), at(4, 6)]}, "no further in time than in tokens"),
        ({"media": [image(0), at(2, 3), image(4), at(6, 4)]}, "no further in time than in tokens"),
        ({"media": [image(0)], "keep": "a"}, "know tokens only"),
        ({"media": [image(0)], "is_final": False}, "Send it whole"),
        ({"media": [image(0)], "adapter": 3}, "an adapter"),
    ],
)
def test_unknown_adapters_and_media_are_refused(asked: dict[str, Any], words: str) -> None:
    core = CoreUnderTest()
    core.core.add(EngineRequest(request_id=1, prompt_token_ids=PROMPT, sampling=SamplingParams(), **asked))
    core.run()
    assert words in (core.ends[sequence_id_of(1, 0)].error or "")


def test_an_abort_frees_blocks_in_the_same_step() -> None:
    core = CoreUnderTest()
    core.add(1, PROMPT, n=3, max_tokens=50, temperature=1.0)
    core.add(2, PROMPT, max_tokens=50)
    for _ in range(4):
        core.step()
    core.core.abort(AbortRequests(sequence_ids=[sequence_id_of(1, 1)]))
    core.step()
    assert core.ends[sequence_id_of(1, 1)].finish_reason == "abort"
    assert len(core.scheduler.running.living_sequences()) == 3
    core.core.abort(AbortRequests(request_ids=[1, 2, 77]))
    core.step()
    assert core.pool.num_held == 0
    assert len(core.ends) == 4


def test_a_request_that_waits_with_n_ends_once_for_each_sequence() -> None:
    core = CoreUnderTest(max_num_seqs=4)
    core.add(1, PROMPT, n=4, max_tokens=9, temperature=1.0)
    core.add(2, PROMPT, n=2, max_tokens=9, temperature=1.0)
    core.step()
    core.core.abort(AbortRequests(request_ids=[2]))
    core.step()
    assert {end for end in core.ends if end >> 10 == 2} == {sequence_id_of(2, 0), sequence_id_of(2, 1)}


def test_one_failing_row_ends_one_request() -> None:
    core = CoreUnderTest()
    core.add(1, PROMPT, max_tokens=9)
    core.add(2, [4, 5], max_tokens=9)
    core.step()
    core.executor.failing_rows[0] = "the logits are not finite"
    core.run()
    assert core.ends[sequence_id_of(1, 0)].error == "the logits are not finite"
    assert core.ends[sequence_id_of(2, 0)].finish_reason == "length"
    assert len(core.tokens[sequence_id_of(2, 0)]) == 9


def test_stop_tokens_end_a_sequence_and_min_tokens_holds_them_back() -> None:
    plain = CoreUnderTest()
    plain.add(1, PROMPT, max_tokens=12)
    plain.run()
    tokens = plain.tokens[sequence_id_of(1, 0)]
    stop = tokens[4]
    core = CoreUnderTest()
    core.add(1, PROMPT, max_tokens=12, stop_token_ids=[stop])
    core.add(2, PROMPT, max_tokens=12, stop_token_ids=[stop], min_tokens=tokens.index(stop) + 2)
    core.run()
    assert core.tokens[sequence_id_of(1, 0)] == tokens[: tokens.index(stop) + 1]
    end = core.ends[sequence_id_of(1, 0)]
    assert (end.finish_reason, end.stop_reason) == ("stop", stop)
    assert len(core.tokens[sequence_id_of(2, 0)]) > tokens.index(stop) + 1


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [([50], {}), ([-1], {}), ([2**40], {}), ([1], {"stop_token_ids": [50]}), ([1], {"logit_bias": {2**50: 1.0}})],
)
def test_ids_outside_the_vocabulary_end_one_request(prompt: list[int], sampling: dict[str, object]) -> None:
    core = CoreUnderTest(vocab_size=50)
    core.add(1, PROMPT, max_tokens=3)
    core.add(2, prompt, max_tokens=3, **sampling)
    core.run()
    assert "must be between 0 and 49" in (core.ends[sequence_id_of(2, 0)].error or "")
    assert len(core.tokens[sequence_id_of(1, 0)]) == 3


def test_an_open_length_ends_where_pinned_prefixes_begin() -> None:
    core = CoreUnderTest(num_blocks=16, block_size=4, max_model_len=64)
    core.add(1, list(range(9)), max_tokens=1, request={"keep": "p"})
    core.run()
    core.core.control("pin_kept", {"handle": "p", "num_tokens": 8})
    core.add(2, [30, 31, 32], max_tokens=None)
    core.add(3, [30, 31, 32], max_tokens=61)
    core.run()
    assert core.ends[sequence_id_of(2, 0)].finish_reason == "length"
    assert len(core.tokens[sequence_id_of(2, 0)]) == 14 * 4 - 3
    assert "2 of them pinned" in (core.ends[sequence_id_of(3, 0)].error or "")


# more than half of the cache
PREFIX = [number % 47 for number in range(160)]


def behind_a_large_prefix() -> CoreUnderTest:
    core = CoreUnderTest(num_blocks=64, max_model_len=256, budget=64)
    core.add(1, PREFIX, max_tokens=1, request={"keep": "prefix"})
    core.run()
    core.scheduler.pin("prefix", len(PREFIX))
    return core


def test_an_open_length_does_not_count_a_pinned_prefix_twice() -> None:
    core = behind_a_large_prefix()
    core.add(2, [*PREFIX, *[9] * 20], max_tokens=None)
    core.run()
    assert len(core.tokens[sequence_id_of(2, 0)]) == 256 - 180


@pytest.mark.parametrize("tenant", [None, Tenancy(name="a", cache_scope="a")])
@pytest.mark.parametrize("is_stepped", [False, True])
@pytest.mark.parametrize("pieces", [(0, 180), (1, 179), (160, 20), (2, 100, 78), (20, 160)])
def test_a_prompt_in_pieces_does_not_count_a_pinned_prefix_twice(
    pieces: tuple[int, ...], is_stepped: bool, tenant: Tenancy | None
) -> None:
    """Unless it began before the prefix was there to be seen, and computed it by itself."""
    core, rest = behind_a_large_prefix(), [*PREFIX, *[9] * 20]
    for number, length in enumerate(pieces):
        piece, rest = rest[:length], rest[length:]
        if number:
            core.core.extend(ExtendRequest(request_id=2, token_ids=piece, is_final=not rest))
        else:
            core.add(2, piece, max_tokens=60, is_final=False, request={"tenant": tenant})
        if is_stepped:
            core.step()
            core.step()
    core.run()
    end = core.ends[sequence_id_of(2, 0)]
    if is_stepped and 0 < pieces[0] < len(PREFIX):
        assert end.error is not None
        assert end.error.startswith("KV cache")
    else:
        assert (end.finish_reason, end.error) == ("length", None)
        assert len(core.tokens[sequence_id_of(2, 0)]) == 60
    core.scheduler.check_invariants()


def test_a_piece_that_is_too_long_is_written_nowhere() -> None:
    core = CoreUnderTest(num_blocks=256, max_model_len=64)
    core.add(1, [1, 2, 3], max_tokens=None, is_final=False)
    core.step()
    core.core.extend(ExtendRequest(request_id=1, token_ids=[5] * 1_000, is_final=True))
    core.run()
    error = core.ends[sequence_id_of(1, 0)].error
    assert error is not None
    assert "maximum context length is 64 tokens" in error


def test_an_open_length_is_found_in_a_few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest that fits in whole blocks less than the model's length, also where thousands of them are too much."""
    core = CoreUnderTest(num_blocks=1000, block_size=4, max_num_seqs=8, max_model_len=32_770)
    estimates = core.manager.estimates
    asked: list[int] = []
    most_blocks = estimates.most_blocks

    def counted(num_tokens: int, *others: int) -> int:
        asked.append(num_tokens)
        return most_blocks(num_tokens, *others)

    monkeypatch.setattr(estimates, "most_blocks", counted)
    for n, longest in ((1, 3998), (8, 498)):  # each a whole number of blocks less than 32,770
        core.add(n, PROMPT, n=n, max_tokens=None, temperature=1.0)
        assert core.scheduler.lifecycle.requests[n].max_total == longest
    assert len(asked) < 40
