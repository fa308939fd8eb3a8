"""Prompt look-up finds what a search by hand finds, and a text that repeats itself is proposed as it goes on."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.worker_driver import WorkerDriver

from quire.config.speculation import SpeculationConfig
from quire.testing.fake_model import FakeModel
from quire.testing.model_harness import worker_config
from quire.worker.row_table import RowTable
from quire.worker.speculative.ngram import NgramProposer, place_after_match
from quire.worker.speculative.proposer import FinishedStep, ProposerContext
from quire.worker.worker import Worker


def proposals(rows, counts, *, shortest=2, longest=4):
    """Drafts for rows with these tokens, by the order of `rows`."""
    table = RowTable(8, 64)
    for row, tokens in rows.items():
        # what stood there before must not be read
        table.token_ids[row] = 1
        table.token_ids[row, : len(tokens)] = tokens
        table.num_total[row] = len(tokens)
    proposer = NgramProposer(shortest, longest)
    proposer.open(ProposerContext(table, None))
    asked = np.array(list(rows), dtype=np.int64), np.array(counts, dtype=np.int64)
    drafts = proposer.propose(FinishedStep(None, None, *asked))
    return [[token for token in row if token >= 0] for row in drafts.tolist()]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 9, 1, 2], [3, 4, 5, 9]),
        # the most recent of two
        ([1, 2, 3, 3, 1, 2, 4, 4, 4, 1, 2], [4, 4, 4, 1]),
        # the longest goes before the most recent
        ([7, 1, 2, 3, 3, 1, 2, 4, 4, 7, 1, 2], [3, 3, 1, 2]),
        # no further back than four tokens: five and four are the same
        ([5, 5, 7, 1, 2, 3, 6, 5, 7, 1, 2, 4, 5, 5, 7, 1, 2], [4, 5, 5, 7]),
        # a period of two, and of one
        ([9, 1, 2, 1, 2], [1, 2, 1, 2]),
        ([9, 4, 4, 4], [4, 4, 4, 4]),
        # one token alone is not enough
        ([1, 2, 3, 1], []),
        ([1, 2, 3, 4], []),
        ([1], []),
    ],
)
def test_what_followed_the_last_tokens_before(tokens, expected):
    assert proposals({3: tokens}, [4]) == [expected]


def test_rows_differ_in_length_and_count():
    rows = {5: [1, 2, 3, 4, 1, 2], 0: [8, 9], 2: [6, 6, 6], 7: [5, 6, 7, 5, 6]}

    assert proposals(rows, [1, 4, 3, 2]) == [[3], [], [6, 6, 6], [7, 5]]


def test_one_token_is_enough_if_asked_for():
    assert proposals({0: [1, 2, 3, 1]}, [2], shortest=1) == [[2, 3]]
    assert proposals({0: [1, 2, 3, 1, 2]}, [2], shortest=3, longest=3) == [[]]


def test_nobody_asks():
    assert proposals({}, []) == []


def searched(tokens, shortest, longest):
    """From the longest suffix down, from the end to the front."""
    for length in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[len(tokens) - length :]:
                return end
    return None


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 4), st.integers(0, 3))
def test_equals_a_search_by_hand(tokens, shortest, more):
    longest = shortest + more

    assert place_after_match(np.array(tokens, dtype=np.int32), shortest, longest) == searched(tokens, shortest, longest)


def test_a_text_that_repeats_itself_takes_few_steps():
    """As configured, in a worker; the model says the same token for ever."""
    model = FakeModel.constant([0.0, 1.0, 5.0, 2.0])
    speculation = SpeculationConfig(method="ngram", num_speculative_tokens=5)
    worker = Worker(worker_config("none", speculation=speculation), model_loader=lambda config: model)
    worker.load()
    worker.initialize_cache([], 0)
    driver = WorkerDriver(worker)
    driver.admit(0, [1, 3, 0])
    lengths = [len(driver.step(num_drafts=5).rows) for _ in range(6)]

    assert lengths == [1, 1, 1, 6, 6, 6]
    assert driver.tokens[0][3:] == [2] * 21


def test_of_a_token_that_is_everywhere_the_last_places_are_looked_at():
    """A prompt of one token would take milliseconds of each step of everybody."""
    few, many = (np.array([1, 2, 9, 5, *[9, 3] * count, 1, 2, 9], dtype=np.int32) for count in (10, 5000))
    assert place_after_match(few, 2, 4) == 3
    assert place_after_match(many, 2, 4) is None
    equal = np.full(20_000, 7, dtype=np.int32)
    assert place_after_match(equal, 2, 4) == len(equal) - 1
