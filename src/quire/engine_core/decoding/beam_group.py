"""One beam search: the running beams, the hypotheses that have ended, and the choice of the next beams.

The rules are those of Transformers: of all continuations of all beams, by cumulative log-probability, the first `width`
that do not stop run on; one that stops among the first `width` becomes a hypothesis, judged by its log-probability over
length ** length_penalty. Knows tokens and scores; sequences are opaque to it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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

    def penalised(self, score: float, length: int) -> float:
        return score / math.pow(length, self.length_penalty)


@dataclass(frozen=True)
class Beam:
    """A running hypothesis, and the index of the sequence that computes it."""

    index: int
    score: float
    node: Node


@dataclass(frozen=True)
class Continuation:
    """A token behind a beam. `rank` is its place among the candidates of that beam."""

    beam: Beam
    token_id: int
    score: float
    rank: int


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
        continuations = self._continuations(candidates, penalties, penalty)
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
        logprobs = TokenLogprobs(
            token_ids=[chosen.token_id, *found.token_ids[:most]],
            logprobs=[found.logprobs[chosen.rank], *found.logprobs[:most]],
            ranks=[chosen.rank + 1, *range(1, min(most, len(found.token_ids)) + 1)],
        )
        return chosen.beam.node.grow(chosen.token_id, logprobs)

    def _continuations(
        self, candidates: Mapping[int, Candidates], penalties: Counter[int], penalty: float
    ) -> list[Continuation]:
        """All there are, best first; equal ones by beam, then as the model ranks them."""
        continuations = [
            Continuation(beam, token, beam.score + logprob - (penalty * penalties[token] if penalties else 0.0), rank)
            for beam in self.running
            for rank, (token, logprob) in enumerate(
                zip(candidates[beam.index].token_ids, candidates[beam.index].logprobs, strict=True)
            )
        ]
        continuations.sort(key=lambda one: -one.score)
        return continuations

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
