"""Continuations that are drawn: without replacement, in proportion to their probability, by the seed."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import pytest

from quire.engine_core.decoding.beam_search import BeamSearch
from quire.engine_core.decoding.draws import MOST_DRAWN_FROM, Draws, NoDraws
from quire.messages import EngineRequest
from quire.sampling_params import SamplingParams


@dataclass(frozen=True)
class One:
    score: float
    token_id: int
    index_of_beam: int = 0


PROBABILITIES = [0.5, 0.25, 0.15, 0.1]
ALL = [One(math.log(share), token) for token, share in enumerate(PROBABILITIES)]


def test_nothing_is_drawn_where_that_was_not_asked_for() -> None:
    assert NoDraws().drawn(ALL, 2, 1) == ALL


def test_each_comes_as_often_as_it_is_probable() -> None:
    draws = Draws(7)
    times = Counter(draws.drawn(ALL, 1, length)[0].token_id for length in range(1, 8001))
    for token, share in enumerate(PROBABILITIES):
        assert times[token] / 8000 == pytest.approx(share, abs=0.02)


def test_the_second_one_comes_out_of_those_that_are_left() -> None:
    times = Counter(tuple(one.token_id for one in Draws(seed).drawn(ALL, 2, 3)) for seed in range(8000))
    # the best first, however they were drawn
    assert all(first < second for first, second in times)
    expected = 0.5 * 0.25 / 0.5 + 0.25 * 0.5 / 0.75
    assert times[0, 1] / 8000 == pytest.approx(expected, abs=0.02)


def test_beams_positions_and_seeds_draw_for_themselves() -> None:
    others = [One(one.score, one.token_id, index_of_beam=1) for one in ALL]
    drawn = [
        [Draws(seed).drawn(of_beam, 1, length)[0].token_id for length in range(40)]
        for seed, of_beam in ((1, ALL), (1, others), (2, ALL))
    ]
    assert len(set(map(tuple, drawn))) == 3
    assert [Draws(1).drawn(ALL, 1, length)[0].token_id for length in range(40)] == drawn[0]


def test_all_are_followed_where_there_are_no_more() -> None:
    assert Draws(1).drawn(ALL, 4, 1) == ALL


@pytest.mark.parametrize(("top_k", "num_candidates"), [(-1, 1024), (0, 1024), (50, 50), (2**31 - 1, 1024)])
def test_no_top_k_has_a_step_read_more_than_so_many(top_k: int, num_candidates: int) -> None:
    sampling = SamplingParams(n=4, top_k=top_k, temperature=1.0, logprobs=0)
    search = BeamSearch(EngineRequest(request_id=1, prompt_token_ids=[1], sampling=sampling), width=4, do_sample=True)
    assert search.num_candidates == num_candidates <= MOST_DRAWN_FROM
