"""Beam search by brute force over any function from a prefix to logits: what the engine's beams are held against.

The rules are those of Transformers' `generate(num_beams=...)`. In one step, with hypotheses of g tokens so far:

1. Candidates are all continuations of all running beams by one token, best cumulative log-probability first.
2. Those of the first `width` that end with a stop token are finished. In the last step (g + 1 = max_tokens) all of the
   first `width` are. A stop token further down is dropped.
3. The first `width` that end with no stop token run on, wherever they stand.
4. Of all finished ones the best `width` are kept, by score = cumulative log-probability / length ** length_penalty.
   The length counts output tokens, the stop token included.
5. It ends in the last step, or once `width` are finished and either early_stopping is True or the best running beam
   cannot beat the worst of them: its own cumulative log-probability is divided by the current length ** length_penalty,
   or by max_tokens ** length_penalty if early_stopping is "never" and length_penalty > 0.

Diverse beam search (num_groups > 1) runs a search like that of width / num_groups for each group. Within a step groups
go in order, and `diversity_penalty` times the number of beams of earlier groups that run on with a token in this step
(rule 3, also in the last step; a group that has ended counts nothing) is taken from that token's log-probability.

Penalties act on the log-probabilities of a beam, as the tokens before say, and these are not normalised again; a token
that is not `allowed` has none. `top_p`
and `top_k` then leave the likeliest continuations of each beam, at least two and one more than there are stop tokens.

What accumulates: rules 1 to 5 add up penalised log-probabilities, so a penalty stays in a beam's sum for good, and the
result is ordered by penalised score over all groups. `cumulative_logprob` of a hypothesis is the sum without penalties.
Without groups the two are the same.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

# prefix (prompt and output) -> logits of the next token
Logits = Callable[[tuple[int, ...]], npt.NDArray[np.float32]]
_NO_MARGIN = float("inf")


@dataclass(frozen=True)
class BeamSettings:
    """What is asked for; the names are those of Quire's BeamSearchParams and of Transformers."""

    width: int
    max_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    temperature: float = 1.0
    num_groups: int = 1
    diversity_penalty: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    # of what a beam has said: which tokens its form lets follow
    allowed: Callable[[tuple[int, ...]], npt.NDArray[np.bool_]] | None = None

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset(self.stop_token_ids) | frozenset(() if self.ignore_eos else self.eos_token_ids)


@dataclass(frozen=True)
class Hypothesis:
    """A finished line. `logprobs` are raw, one a token; `score` is what it was ranked by."""

    tokens: list[int]
    logprobs: list[float]
    score: float
    finish_reason: str

    @property
    def cumulative_logprob(self) -> float:
        return sum(self.logprobs)


@dataclass(frozen=True)
class BeamResult:
    """All hypotheses, best first, and how clear the closest decision on the way was."""

    hypotheses: list[Hypothesis]
    margin: float
    # by step: how many tokens all running and finished hypotheses had in common after it
    num_settled: list[int]


def beam_search(logits: Logits, prompt: Sequence[int], settings: BeamSettings) -> BeamResult:
    """The hypotheses that the rules above give, by looking at every token of every beam in every step."""
    if settings.width % settings.num_groups:
        raise ValueError(f"num_groups={settings.num_groups}: must divide width={settings.width}")
    groups = [_Group(logits, tuple(prompt), settings) for _ in range(settings.num_groups)]
    num_settled = []
    while not all(group.is_done for group in groups):
        counts: Counter[int] = Counter()
        for group in groups:
            if not group.is_done:
                group.step(counts)
                counts.update(beam.tokens[-1] for beam in group.running)
        num_settled.append(_num_common([line.tokens for group in groups for line in group.alive()]))
    lines = sorted((line for group in groups for line in group.finished), key=lambda line: -line.score)
    order = _gaps([line.score for line in lines])
    margin = min([order, *(group.margin for group in groups)])
    return BeamResult([line.as_hypothesis(settings.stop_ids) for line in lines], margin, num_settled)


@dataclass
class _Line:
    """A running beam or a finished hypothesis; total is the sum of penalised log-probabilities."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    total: float = 0.0
    score: float = 0.0

    def as_hypothesis(self, stop_ids: frozenset[int]) -> Hypothesis:
        reason = "stop" if self.tokens[-1] in stop_ids else "length"
        return Hypothesis(list(self.tokens), list(self.logprobs), self.score, reason)


@dataclass
class _Group:
    """One search; the only one, unless the search is a diverse one."""

    logits: Logits
    prompt: tuple[int, ...]
    settings: BeamSettings
    running: list[_Line] = field(default_factory=lambda: [_Line()])
    finished: list[_Line] = field(default_factory=list)
    is_done: bool = False
    margin: float = _NO_MARGIN

    @property
    def width(self) -> int:
        return self.settings.width // self.settings.num_groups

    def step(self, counts: Counter[int]) -> None:
        """One token further. `counts` says how often earlier groups have taken each token in this step."""
        length = len(self.running[0].tokens) + 1
        is_last = length == self.settings.max_tokens
        candidates = self._candidates(counts)
        is_stop = [line.tokens[-1] in self.settings.stop_ids for line in candidates]
        is_ending = [is_last or stop for stop in is_stop]
        going_on = [line for line, stop in zip(candidates, is_stop, strict=True) if not stop]
        self._see(_gaps([line.total for line in going_on[self.width - 1 : self.width + 1]]))
        self._see(self._cut_margin(candidates, is_ending))
        self.running = going_on[: self.width]
        self._keep([line for line, ends in zip(candidates[: self.width], is_ending, strict=False) if ends], length)
        self.is_done = is_last or not self.running or self._is_complete(length)

    def alive(self) -> list[_Line]:
        return self.finished if self.is_done else [*self.running, *self.finished]

    def _candidates(self, counts: Counter[int]) -> list[_Line]:
        """Continuations, best first, equal ones by beam and then by token id; without the tail that cannot matter."""
        raw = self._logprobs()
        penalised = raw.copy()
        for token, count in counts.items():
            penalised[:, token] -= self.settings.diversity_penalty * count
        totals = penalised + np.array([[beam.total] for beam in self.running])
        num_needed = self.width * (1 + len(self.settings.stop_ids)) + 2
        order = np.argsort(-totals, axis=None, kind="stable")[:num_needed]
        lines = []
        for index in order[np.isfinite(totals.ravel()[order])].tolist():
            parent, token = divmod(index, raw.shape[1])
            beam = self.running[parent]
            logprobs = (*beam.logprobs, float(raw[parent, token]))
            lines.append(_Line((*beam.tokens, token), logprobs, float(totals[parent, token])))
        return lines

    def _logprobs(self) -> npt.NDArray[np.float64]:
        """[beam, token]: log_softmax(logits / temperature) after each running beam; a temperature of 0 counts as 1."""
        values = np.array([self.logits((*self.prompt, *beam.tokens)) for beam in self.running], dtype=np.float64)
        values /= self.settings.temperature or 1.0
        values -= values.max(axis=1, keepdims=True)
        values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
        for beam, row in zip(self.running, values, strict=True):
            self._penalise(row, beam.tokens)
            if self.settings.allowed is not None:
                row[~self.settings.allowed(beam.tokens)] = -np.inf
            row[self._excluded(row)] = -np.inf
        return values

    def _penalise(self, row: npt.NDArray[np.float64], output: tuple[int, ...]) -> None:
        settings = self.settings
        said = sorted({*self.prompt, *output})
        row[said] *= np.where(row[said] > 0, 1 / settings.repetition_penalty, settings.repetition_penalty)
        for token, count in Counter(output).items():
            row[token] -= settings.presence_penalty + settings.frequency_penalty * count

    def _excluded(self, row: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """By top_k and top_p; the likeliest first."""
        order = np.argsort(-row, kind="stable")
        count = self.settings.top_k or len(row)
        if self.settings.top_p < 1:
            shares = np.exp(row[order]) / np.exp(row).sum()
            before = np.cumsum(shares) - shares
            count = min(count, int((before < self.settings.top_p).sum()))
        return order[max(count, 2, 1 + len(self.settings.stop_ids)) :]

    def _keep(self, ended: list[_Line], length: int) -> None:
        for line in ended:
            line.score = line.total / length**self.settings.length_penalty
        ranked = sorted([*self.finished, *ended], key=lambda line: -line.score)
        self._see(_gaps([line.score for line in ranked[self.width - 1 : self.width + 1]]))
        self.finished = ranked[: self.width]

    def _is_complete(self, length: int) -> bool:
        settings = self.settings
        if len(self.finished) < self.width:
            return False
        if settings.early_stopping is True:
            return True
        is_patient = settings.early_stopping == "never" and settings.length_penalty > 0
        best_length = settings.max_tokens if is_patient else length
        best_possible = self.running[0].total / best_length**settings.length_penalty
        worst = self.finished[-1].score
        self._see(abs(best_possible - worst))
        return best_possible <= worst

    def _cut_margin(self, candidates: list[_Line], is_ending: list[bool]) -> float:
        """How far those that would end are from the line between the first `width` candidates and the others."""
        if len(candidates) <= self.width:
            return _NO_MARGIN
        last_above, first_below = (candidates[place].total for place in (self.width - 1, self.width))
        return min(
            (
                line.total - first_below if place < self.width else last_above - line.total
                for place, (line, ends) in enumerate(zip(candidates, is_ending, strict=True))
                if ends
            ),
            default=_NO_MARGIN,
        )

    def _see(self, margin: float) -> None:
        self.margin = min(self.margin, margin)


def _gaps(falling: list[float]) -> float:
    """The smallest distance between neighbours."""
    return min((a - b for a, b in itertools.pairwise(falling)), default=_NO_MARGIN)


def _num_common(lines: list[tuple[int, ...]]) -> int:
    return next((i for i, column in enumerate(zip(*lines, strict=False)) if len(set(column)) > 1), min(map(len, lines)))


def remembered(logits: Logits) -> Logits:
    """The same function; each prefix is computed once, however many searches pass through it."""
    known: dict[tuple[int, ...], npt.NDArray[np.float32]] = {}

    def look_up(prefix: tuple[int, ...]) -> npt.NDArray[np.float32]:
        if prefix not in known:
            known[prefix] = logits(prefix)
        return known[prefix]

    return look_up


def logits_of_transformers(model: Any) -> Logits:
    """A Transformers model as such a function: the whole prefix is computed each time, with no cache to be wrong."""
    import torch

    @torch.inference_mode()
    def compute(prefix: tuple[int, ...]) -> npt.NDArray[np.float32]:
        result: npt.NDArray[np.float32] = model(torch.tensor([prefix]), use_cache=False).logits[0, -1].float().numpy()
        return result

    return remembered(compute)
