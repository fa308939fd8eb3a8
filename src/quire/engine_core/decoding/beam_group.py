"""One beam search: the running beams, the hypotheses that have ended, and the choice of the next beams.

Candidates come with their penalties. Of each beam, `top_p` and `top_k` leave the likeliest, at least two and one
more than there are stop tokens. The rules are those of Transformers: of all continuations of all beams, by cumulative
log-probability, the first `width` that do not stop run on; one that stops among the first `width` becomes a hypothesis,
judged by its log-probability over length ** length_penalty. Knows tokens and scores; sequences are opaque to it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple

from quire.engine_core.decoding.draws import Draws, NoDraws
from quire.engine_core.decoding.hypotheses import Hypothesis, Node
from quire.messages import Candidates, TokenLogprobs


@dataclass(frozen=True)
class Rules:
    """What all groups of a request have in common."""

    stop_ids: frozenset[int]
    # of these the client hears which it was
    asked_for_ids: frozenset[int]
    length_penalty: float
    early_stopping: bool | Literal["never"]
    num_logprobs: int
    draws: Draws | NoDraws
    top_p: float = 1.0
    # 0: all
    top_k: int = 0

    def penalised(self, score: float, length: int) -> float:
        return score / math.pow(length, self.length_penalty)

    def num_allowed(self, found: Candidates) -> int:
        """How many of a beam's candidates may continue it."""
        count = len(found.logprobs)
        if self.top_k:
            count = min(count, self.top_k)
        if self.top_p < 1.0:
            count = min(count, self._num_within(found))
        return min(len(found.logprobs), max(count, 2, 1 + len(self.stop_ids)))

    def _num_within(self, found: Candidates) -> int:
        """The likeliest that reach `top_p` together."""
        total = 0.0
        for place, logprob in enumerate(found.logprobs):
            if total >= self.top_p:
                return place
            total += math.exp(logprob - found.log_total)
        return len(found.logprobs)


@dataclass(frozen=True)
class Beam:
    """A running hypothesis, and the index of the sequence that computes it."""

    index: int
    score: float
    node: Node


class Continuation(NamedTuple):
    """A token behind a beam. `rank` is its place among the candidates of that beam."""

    beam: Beam
    token_id: int
    score: float
    rank: int

    @property
    def index_of_beam(self) -> int:
        return self.beam.index


_SCORE = attrgetter("score")


class BeamGroup:
    """`width` beams that compete with each other."""

    def __init__(self, width: int, root: Node, rules: Rules) -> None:
        self.width = width
        self.running = [Beam(index=0, score=0.0, node=root)]
        self.finished: list[Hypothesis] = []
        self.is_done = False
        self._rules = rules

    def advance(
        self,
        candidates: Mapping[int, Candidates],
        length: int,
        max_tokens: int,
        penalties: Counter[int],
        penalty: float,
    ) -> list[Continuation]:
        """One step: who runs on. `length` counts the tokens behind the prompt, the new one included."""
        continuations = self._continuations(candidates, length, penalties, penalty)
        stop_ids = self._rules.stop_ids
        is_last = length >= max_tokens
        ended = [one for one in continuations[: self.width] if is_last or one.token_id in stop_ids]
        next_running = [one for one in continuations if one.token_id not in stop_ids][: self.width]
        for one in ended:
            self._finish(one, length, candidates)
        self.is_done = is_last or not next_running or self._is_decided(next_running[0].score, length, max_tokens)
        return next_running

    def grow(self, chosen: Continuation, candidates: Mapping[int, Candidates]) -> Node:
        """The node of a continuation, with the log-probabilities that the client gets of it."""
        found = candidates[chosen.beam.index]
        most = self._rules.num_logprobs
        logprobs = TokenLogprobs([chosen.token_id], [found.logprobs[chosen.rank]], [chosen.rank + 1])
        if most:
            logprobs.token_ids += found.token_ids[:most]
            logprobs.logprobs += found.logprobs[:most]
            logprobs.ranks += range(1, min(most, len(found.token_ids)) + 1)
        return chosen.beam.node.grow(chosen.token_id, logprobs)

    def _continuations(
        self, candidates: Mapping[int, Candidates], length: int, penalties: Counter[int], penalty: float
    ) -> list[Continuation]:
        """All that are allowed, best first; equal ones by beam, then as the model ranks them."""
        continuations: list[Continuation] = []
        for beam in self.running:
            found = candidates[beam.index]
            score = beam.score
            for rank in range(self._rules.num_allowed(found)):
                token = found.token_ids[rank]
                cost = penalty * penalties[token] if penalties else 0.0
                continuations.append(Continuation(beam, token, score + found.logprobs[rank] - cost, rank))
        # in reverse, equal ones keep their order as well
        continuations.sort(key=_SCORE, reverse=True)
        # as many as are sure to have so many that do not stop
        num_followed = self.width * max(2, 1 + len(self._rules.stop_ids))
        return self._rules.draws.drawn(continuations, num_followed, length)

    def _finish(self, one: Continuation, length: int, candidates: Mapping[int, Candidates]) -> None:
        is_stop = one.token_id in self._rules.stop_ids
        asked_for = one.token_id in self._rules.asked_for_ids
        hypothesis = Hypothesis(
            self.grow(one, candidates),
            self._rules.penalised(one.score, length),
            "stop" if is_stop else "length",
            one.token_id if asked_for else None,
        )
        self.finished.append(hypothesis)
        self.finished.sort(key=lambda done: -done.score)
        for worse in self.finished[self.width :]:
            worse.node.leave()
        del self.finished[self.width :]

    def _is_decided(self, best_score: float, length: int, max_tokens: int) -> bool:
        """No running beam can improve on the hypotheses any more, or the user wants no better ones."""
        if len(self.finished) < self.width:
            return False
        rules = self._rules
        if rules.early_stopping is True:
            return True
        is_long = rules.early_stopping == "never" and rules.length_penalty > 0.0
        best_possible = rules.penalised(best_score, max_tokens if is_long else length)
        return best_possible <= self.finished[-1].score
