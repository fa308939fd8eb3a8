"""Beam search (3.4.4, figure 3.9) out of fork, append and free.

The worker answers with the best candidates of each beam; when all beams of the request have answered, the next ones
are chosen. A beam with no continuation is dropped, one with several is forked, and each grows by its token: all blocks
are shared, and only a partly filled last block is ever copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from quire.engine_core.decoding.beam_group import Beam, BeamGroup, Continuation, Rules
from quire.engine_core.decoding.draws import MOST_DRAWN_FROM, Draws, NoDraws
from quire.engine_core.decoding.hypotheses import Hypothesis, Node, settled_from
from quire.engine_core.decoding.method import Verbs
from quire.engine_core.request import Request, Sequence
from quire.errors import RequestError
from quire.messages import MOST_SEQUENCES, Candidates, EngineRequest
from quire.sampling_params import SamplingParams

_PLAIN = SamplingParams()
_WITHOUT_EFFECT = (
    "logits_processors",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "min_p",
    "thinking_token_budget",
)
# Of either sign: a length of a million to this power is still a number.
_MOST = 50


class BeamSearch:
    """`width` beams in `num_groups` groups. A token costs more in a group if earlier ones have just taken it."""

    def __init__(
        self,
        message: EngineRequest,
        *,
        width: int,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        num_groups: int = 1,
        diversity_penalty: float = 0.0,
        do_sample: bool = False,
    ) -> None:
        sampling = message.sampling
        _check_sampling(sampling)
        _check(width, sampling.n, num_groups, early_stopping, length_penalty, diversity_penalty)
        eos_ids = frozenset() if sampling.ignore_eos else frozenset(message.eos_token_ids)
        self._rules = Rules(
            stop_ids=eos_ids | frozenset(sampling.stop_token_ids),
            asked_for_ids=frozenset(sampling.stop_token_ids) - eos_ids,
            length_penalty=float(length_penalty),
            early_stopping=early_stopping,
            num_logprobs=sampling.logprobs or 0,
            draws=Draws(message.seed) if do_sample else NoDraws(),
            top_p=sampling.top_p,
            top_k=max(0, sampling.top_k),
        )
        self.num_sequences = width
        self.num_outputs = sampling.n
        # a row has each stop token once, and penalties push down at most the tokens of the other groups
        self.num_candidates = max(width + len(self._rules.stop_ids), self._rules.num_logprobs)
        if do_sample:
            most = min(self._rules.top_k or MOST_DRAWN_FROM, MOST_DRAWN_FROM)
            self.num_candidates = max(self.num_candidates, most)
        self._diversity_penalty = diversity_penalty
        self._settled = root = Node(None, -1, None)
        self._groups = [BeamGroup(width // num_groups, root, self._rules) for _ in range(num_groups)]
        self._answers: dict[int, Candidates] = {}
        self._length = 0

    def after_token(self, sequence: Sequence, verbs: Verbs) -> bool:
        raise AssertionError("the worker samples nothing here")

    def after_candidates(self, request: Request, answers: Mapping[int, Candidates], verbs: Verbs) -> None:
        self._answers.update(answers)
        if any(one.num_computed_tokens < one.num_total_tokens for one in request.sequences.values()):
            return  # some are still to answer, perhaps because all are computed again
        if self._answers.keys() >= request.sequences.keys():
            self._advance(request, verbs)
            self._answers.clear()

    def _advance(self, request: Request, verbs: Verbs) -> None:
        self._length += 1
        max_tokens = request.max_total - request.num_prompt_tokens
        taken: Counter[int] = Counter()
        chosen: list[tuple[BeamGroup, list[Continuation]]] = []
        for group in self._groups:
            if not group.is_done:
                next_running = group.advance(self._answers, self._length, max_tokens, taken, self._diversity_penalty)
                taken.update(one.token_id for one in next_running)
                chosen.append((group, [] if group.is_done else next_running))
        if all(group.is_done for group in self._groups):
            self._finish(request, verbs)
        else:
            self._replace_beams(chosen, request, verbs)
            self._show_settled(request, verbs)

    def _replace_beams(
        self, chosen: list[tuple[BeamGroup, list[Continuation]]], request: Request, verbs: Verbs
    ) -> None:
        """Drop first, so that forks find free rows; fork before anything grows, because a child copies its parent."""
        num_children = Counter(one.beam.index for _, ones in chosen for one in ones)
        for index, sequence in list(request.sequences.items()):
            if not num_children[index]:
                verbs.drop(sequence)
        heirs = {index: [request.sequences[index]] for index in num_children}
        free_indices = (index for index in range(self.num_sequences) if index not in num_children)
        for index, count in num_children.items():
            parent = request.sequences[index]
            total = parent.num_total_tokens
            heirs[index] += [verbs.fork(parent, next(free_indices), total, total) for _ in range(count - 1)]
        for group, ones in chosen:
            before = group.running
            group.running = []
            for one in ones:
                heir = heirs[one.beam.index].pop()
                verbs.append(heir, one.token_id)
                group.running.append(Beam(heir.index, one.score, group.grow(one, self._answers)))
            for beam in before:
                beam.node.leave()

    def _show_settled(self, request: Request, verbs: Verbs) -> None:
        nodes = settled_from(self._settled)
        if nodes:
            self._settled = nodes[-1]
            for output in range(self.num_outputs):
                self._emit(request, output, nodes, verbs)

    def _finish(self, request: Request, verbs: Verbs) -> None:
        """The best of all hypotheses, best first."""
        hypotheses = [hypothesis for group in self._groups for hypothesis in group.finished]
        hypotheses.sort(key=lambda one: -one.score)
        for output in range(self.num_outputs):
            # a tiny vocabulary may not have as many different continuations
            best: Hypothesis | None = hypotheses[output] if output < len(hypotheses) else None
            if best is not None:
                self._emit(request, output, best.node.path_from(self._settled), verbs)
            verbs.finish(request, output, best.finish_reason if best else "length", best.stop_reason if best else None)

    def _emit(self, request: Request, output: int, nodes: list[Node], verbs: Verbs) -> None:
        logprobs = [node.logprobs for node in nodes if node.logprobs is not None]
        verbs.emit(request, output, [node.token_id for node in nodes], logprobs)


def _check_sampling(sampling: SamplingParams) -> None:
    """What would forbid tokens or move them by name is refused: candidates are the model's own."""
    for name in _WITHOUT_EFFECT:
        if getattr(sampling, name) != getattr(_PLAIN, name):
            raise RequestError(
                f"{name}: not together with beams, which are the most probable continuations as the model sees them. "
                "Leave it out, or sample n outputs.",
                param=name,
            )


def _check(
    width: int,
    num_outputs: int,
    num_groups: int,
    early_stopping: object,
    length_penalty: object,
    diversity_penalty: object,
) -> None:
    if type(width) is not int or not 1 <= width <= MOST_SEQUENCES:
        raise RequestError(
            f"beam_width={width!r}: must be a whole number between 1 and {MOST_SEQUENCES}.", param="beam_width"
        )
    if num_outputs > width:
        raise RequestError(
            f"n={num_outputs}: beam search with {width} beams returns at most so many outputs.", param="n"
        )
    if type(num_groups) is not int or not 1 <= num_groups <= width or width % num_groups:
        raise RequestError(
            f"num_beam_groups={num_groups!r}: must divide beam_width={width}, so that groups are equal.",
            param="num_beam_groups",
        )
    for name, value, least in (("length_penalty", length_penalty, -_MOST), ("diversity_penalty", diversity_penalty, 0)):
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= _MOST:
            raise RequestError(f"{name}={value!r}: must be a number between {least} and {_MOST}.", param=name)
    if not (isinstance(early_stopping, bool) or early_stopping == "never"):
        raise RequestError(
            f'early_stopping={early_stopping!r}: must be True, False or "never".', param="early_stopping"
        )
