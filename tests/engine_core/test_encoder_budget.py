"""The images of one request are encoded a few in a step, and the others of the step do not wait for them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quire.engine_core.scheduler.constraints import ChunkAlignment, Constraint, EncoderBudget
from quire.messages import Media, SchedulerOutput, Tenancy
from quire.testing.core import CoreUnderTest

LENGTH = 4


def image(start: int, name: int, length: int = LENGTH) -> Media:
    return Media(
        start=start, length=length, pixels=b"", shape=[length, 1, 0], mean=[0.0], std=[1.0], grid=[1, length, 1],
        merge_size=1, content_hash=bytes([name]),
    )  # fmt: skip


class Steps:
    """A core with an encoder budget, and which images each of its steps touches."""

    def __init__(self, num_tokens: int, *more: Constraint, **options: object) -> None:
        self.core = CoreUnderTest(constraints=[EncoderBudget(num_tokens), *more], **options)
        self.touched: list[set[bytes]] = []
        self.rows: list[set[int]] = []
        self.core.executor.observers.append(self._see)

    def _see(self, output: SchedulerOutput) -> None:
        rows = self.core.rows
        touched: set[bytes] = set()
        for row, count in zip(output.rows.tolist(), output.num_tokens.tolist(), strict=True):
            end = int(rows.num_computed[row])
            images = rows.media.get(row, [])
            touched |= {one.content_hash for one in images if one.start < end and one.end > end - count}
        self.touched.append(touched)
        self.rows.append({sequence_id >> 10 for sequence_id in rows.sequence_id[output.rows].tolist()})

    def add(self, request_id: int, names: Sequence[int], length: int = LENGTH, **more: object) -> None:
        """A prompt of one token before each image, and one at the end."""
        media = [image(number * (length + 1) + 1, name, length) for number, name in enumerate(names)]
        self.core.add(request_id, [7] * (len(names) * (length + 1) + 1), request={"media": media}, max_tokens=2, **more)

    def numbers(self) -> list[int]:
        return [len(touched) for touched in self.touched if touched]


def test_many_images_of_one_request_take_several_steps() -> None:
    steps = Steps(2 * LENGTH)
    steps.add(0, [1, 2, 3, 4, 5])
    steps.core.run()
    assert steps.numbers() == [2, 2, 1]
    assert steps.core.ends[0].finish_reason == "length"


@pytest.mark.parametrize("policy", ["fifo", "srtf", "two_level"])
def test_others_are_served_in_each_of_these_steps(policy: str) -> None:
    steps = Steps(LENGTH, policy=policy)
    steps.add(0, range(1, 9))
    steps.core.step()
    steps.core.add(1, [1, 2, 3], max_tokens=5)
    steps.core.run()
    assert steps.numbers() == [1] * 8
    with_text = [number for number, rows in enumerate(steps.rows) if 1 in rows]
    assert with_text == list(range(1, 6)), "from the next step on, a token in each"


def test_an_image_beyond_the_budget_has_a_step_of_its_own() -> None:
    steps = Steps(3)
    steps.add(0, [1, 2], length=20)
    steps.add(1, [3])
    steps.core.run()
    assert steps.numbers() == [1, 1, 1]
    assert {end.finish_reason for end in steps.core.ends.values()} == {"length"}


def test_the_work_of_a_step_has_the_whole_image_that_it_begins() -> None:
    steps = Steps(100, budget=6)
    works: list[int] = []
    steps.core.core.watch_steps(lambda decision, work: works.append(work))
    steps.add(0, [1], length=20)
    steps.core.run()
    assert works == [6 + 20, 6 + 20, 6 + 20, 4 + 20, 1]
    steps.core.add(1, [7, 7, 7], max_tokens=1)
    steps.core.run()
    assert works[5:] == [3]


def test_equal_images_count_once() -> None:
    steps = Steps(LENGTH)
    steps.add(0, [1, 1, 1])
    steps.add(1, [1])
    steps.core.run()
    assert steps.touched[0] == {b"\x01"}
    assert steps.rows[0] == {0, 1}
    assert len(steps.touched[0]) == 1
    assert steps.numbers() == [1], "all in the first step"


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("options", [{}, {"budget": 6}, {"budget": 3}, {"num_blocks": 17, "prefix_caching": False}])
def test_no_step_has_more_however_small_its_chunks(options: dict[str, int], is_async: bool) -> None:
    """Few blocks: requests give way and compute their images again."""
    steps = Steps(2 * LENGTH, ChunkAlignment(3), is_async=is_async, max_num_seqs=4, **options)
    for number in range(6):
        steps.add(number, range(10 * number, 10 * number + 1 + number % 4))
    steps.core.run()
    assert max(steps.numbers()) <= 2
    assert {end.finish_reason for end in steps.core.ends.values()} == {"length"}
    steps.core.assert_empty()
    assert not steps.core.rows.media


def test_a_prefix_that_ends_within_an_image_counts_it() -> None:
    """Many requests that go on in the middle of images of their own do not bring all of them into one step."""
    steps = Steps(8, block_size=4)
    for number in range(4):
        steps.add(number, [number], length=8)
    steps.core.run()
    before = len(steps.touched)
    for number in range(4):
        steps.core.add(10 + number, [7] * 9 + [9], request={"media": [image(1, number, 8)]}, max_tokens=1)
    steps.core.run()
    assert all(steps.core.cached[(10 + number) << 10] == 8 for number in range(4))
    assert [len(touched) for touched in steps.touched[before:]] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "other",
    [
        {"cache_salt": "b"},
        {"cache_salt": ""},
        {"cache_salt": "a", "tenant": Tenancy(name="b", cache_scope="secret of b")},
        {"cache_salt": "", "tenant": Tenancy(name="a", cache_scope="a")},
    ],
)
def test_equal_images_of_those_who_share_no_cache_are_others(other: dict[str, object]) -> None:
    """Otherwise the time of an answer would say that somebody else has shown this image."""
    steps = Steps(3 * LENGTH)
    asked = [{"cache_salt": "a"}, {"cache_salt": "a"}, other]
    for number, more in enumerate(asked):
        steps.core.add(number, [7] * 6, request={"media": [image(1, 1)], **more}, max_tokens=2)
    sent: list[Media] = []
    steps.core.executor.observers.append(lambda output: sent.extend(one.media[0] for one in output.admitted))
    steps.core.run()
    first, again, apart = (one.content_hash for one in sent)
    assert first == again
    assert len({first, apart, bytes([1])}) == (3 if any(other.values()) else 2)
    assert steps.touched[0] == {first, apart}
