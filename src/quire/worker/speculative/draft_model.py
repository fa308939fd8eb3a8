"""A small model with the same vocabulary proposes: it reads what the target reads, a little later, and goes on alone.

Its keys and values lie in the blocks of the rows, in layers of their own. So a prefix hit, a fork, a copy and a swap
bring them along, and all that is kept here is one number a row: how many tokens the draft has computed.

    target     a chunk of the prompt ... the last chunk, a token     d1 d2 d3 verified     the next
    draft      the same chunk        ... the chunk, the token:       what was accepted     ...
                                         d1, d2, d3 proposed         and the token: d1 ...

What is missing when a row asks for drafts is made up for first. A row that was given none for long has much to make up:
as many tokens in a step as the target may compute in one, and until it is done it proposes nothing. Must never: change
the row table. Called by ModelRunner, as every proposer.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from quire.config import ModelFacts, WorkerConfig
from quire.errors import ModelError
from quire.messages import DRAFT_PREFIX, AdmittedSequence, ForkedSequence, IntArray
from quire.worker.attention import Attention, attention_layers
from quire.worker.capacity import StepCost, measure_largest_step
from quire.worker.model_loader import load_model
from quire.worker.platforms import Platform
from quire.worker.speculative.pass_runner import PassRunner, run_alone
from quire.worker.speculative.passes import PassBuilder
from quire.worker.speculative.proposer import FinishedStep, ProposerContext, no_drafts
from quire.worker.state_cache import recurrent_layers

_logger = logging.getLogger(__name__)
# Vocabularies are padded to multiples of some power of two, differently by size of model.
_MOST_PADDING = 1024


class DraftModelProposer:
    """Follows the rows with a model of its own."""

    reads_hidden_states = False

    def __init__(self, config: WorkerConfig, target: nn.Module) -> None:
        assert config.speculation is not None, "somebody asked for drafts"
        assert config.speculation.model_path is not None, "a draft model has a directory"
        facts = ModelFacts.read(Path(config.speculation.model_path))
        target_facts = ModelFacts.read(Path(config.model_path))
        _check_vocabulary(facts, target_facts)
        self._max_len = min(config.max_model_len, facts.max_model_len or config.max_model_len)
        if self._max_len < config.max_model_len:
            _logger.warning(
                "the draft has positions for %d tokens, max_model_len is %d: longer sequences go on without drafts",
                self._max_len,
                config.max_model_len,
            )
        model = load_model(
            dataclasses.replace(config, model_path=config.speculation.model_path, max_model_len=self._max_len)
        )
        if recurrent_layers(model):
            raise ModelError(
                f"speculative_config: the draft {config.speculation.model_path} has recurrent layers, whose states "
                "cannot take back what was rejected. Use a draft with attention alone, or method=ngram."
            )
        self._model = _TargetsVocabulary(model, facts.vocab_size, target_facts.vocab_size)
        self._most_tokens = config.max_num_batched_tokens
        self._num_steps = 0
        # Tokens whose keys and values the draft has. What is rejected later is subtracted in the step that rejects it.
        self._progress = np.zeros(config.max_num_seqs, dtype=np.int64)
        self._last_step = np.full(config.max_num_seqs, -1, dtype=np.int64)
        # of the rows of a step: drafts that are asked for. All zero between steps.
        self._counts = np.zeros(config.max_num_seqs, dtype=np.int64)
        self._is_following = True

    @property
    def layers(self) -> dict[str, Attention]:
        return self._model.layers

    def recordable(self, target: nn.Module) -> list[nn.Module]:
        return [target, self._model.module]

    def largest_step(self, platform: Platform, config: WorkerConfig) -> StepCost:
        config = dataclasses.replace(config, max_model_len=self._max_len)
        return measure_largest_step(self._model.module, platform, config)

    def open(self, context: ProposerContext) -> None:
        self._table = context.table
        passes = PassBuilder(self.layers.values(), context.table)
        self._runner = PassRunner(self._model, passes, context.table, context.settings)

    # ------------------------------------------------------------------------------------------ rows

    def admit(self, sequence: AdmittedSequence) -> None:
        """What a prefix hit brings is taken for computed. If drafts were off when it was, they are worse for it."""
        self._progress[sequence.row] = sequence.num_computed_tokens

    def fork(self, fork: ForkedSequence) -> None:
        """The blocks after a child's own tokens are not its parent's."""
        self._progress[fork.row] = min(self._progress[fork.parent_row], fork.num_computed_tokens)

    def release(self, row: int) -> None:
        """Nothing to free."""

    def set_progress(self, progress: Sequence[tuple[int, int]]) -> None:
        for row, num_computed in progress:
            self._progress[row] = min(self._progress[row], num_computed)

    # ------------------------------------------------------------------------------------------ steps

    def propose(self, step: FinishedStep) -> IntArray:
        rows_S = step.batch.rows_S
        counts_S = self._counts_of(step)
        starts_S = self._valid_progress(step)
        ends_S = np.where(counts_S > 0, self._table.num_total[rows_S], self._end_of_following(step))
        ends_S = np.minimum(ends_S, self._max_len)
        index = np.flatnonzero(ends_S > starts_S)
        if len(index) == 0:
            return no_drafts(len(step.rows_n))
        ends, counts = self._in_pieces(starts_S[index], ends_S[index], counts_S[index])
        order = _by_count(counts)
        if order is not None:
            index = index[order]
            ends = ends[order]
            counts = counts[order]
        rows = rows_S[index]
        starts = starts_S[index]
        computed = step.batch.num_computed_S[index]
        num_drafting = np.count_nonzero(counts)
        drafts = self._runner.run(rows, starts, ends, counts[:num_drafting], computed_S=computed)
        self._progress[rows] = ends + np.maximum(counts - 1, 0)
        return self._in_order_of(step.rows_n, rows[:num_drafting], drafts)

    def run_pass(self, num_tokens: int) -> None:
        run_alone(self._model, num_tokens, next(self._model.module.parameters()).device)

    def _counts_of(self, step: FinishedStep) -> IntArray:
        """Drafts for each row of the step, as far as the draft has positions for the tokens that it reads itself."""
        most_n = self._max_len + 1 - self._table.num_total[step.rows_n]
        self._counts[step.rows_n] = np.clip(step.counts_n, 0, most_n.clip(min=0))
        counts_S = self._counts[step.batch.rows_S]
        self._counts[step.rows_n] = 0
        return counts_S

    def _valid_progress(self, step: FinishedStep) -> IntArray:
        """Tokens of each row that the draft has computed and that still are what they were."""
        rows_S = step.batch.rows_S
        table = self._table
        progress_S = self._progress[rows_S]
        # A row that missed a step may have been swapped out, and with it goes only what the target has computed.
        is_back_S = self._last_step[rows_S] != self._num_steps
        progress_S = np.where(is_back_S, np.minimum(progress_S, step.batch.num_computed_S), progress_S)
        # The last token is always new: the target's own, in the place of a draft that it rejected or after all of them.
        progress_S = np.minimum(progress_S, np.maximum(table.num_computed[rows_S], table.num_total[rows_S] - 1))
        self._num_steps += 1
        self._last_step[rows_S] = self._num_steps
        self._progress[rows_S] = progress_S
        return progress_S

    def _end_of_following(self, step: FinishedStep) -> IntArray:
        """Up to where rows without drafts are computed: prompts, because drafts, forks and prefix hits will want them.

        Not if the last step with sampling rows gave no drafts at all: then speculation is off, and costs nothing.
        """
        rows_S = step.batch.rows_S
        table = self._table
        computed_S = table.num_computed[rows_S]
        missing_S = table.num_total[rows_S] - table.num_computed[rows_S]
        if len(step.batch.sampling_rows_N):
            self._is_following = len(step.rows_n) > 0
        if not self._is_following:
            return np.zeros_like(rows_S)
        is_prompt_S = (step.batch.num_computed_S < table.num_prompt[rows_S]) | (missing_S > 1)
        return np.where(is_prompt_S, computed_S, 0)

    def _in_pieces(self, starts: IntArray, ends: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
        """No more tokens than a step of the target may have; rows with few to make up come first."""
        lengths = ends - starts
        if lengths.sum() <= self._most_tokens:
            return ends, counts
        order = np.argsort(lengths, kind="stable")
        before = np.empty_like(lengths)
        before[order] = lengths[order].cumsum() - lengths[order]
        granted = np.clip(self._most_tokens - before, 0, lengths)
        return starts + granted, np.where(granted == lengths, counts, 0)

    def _in_order_of(self, rows_n: IntArray, rows: IntArray, drafts: IntArray) -> IntArray:
        """Drafts of `rows`, as rows_n has them; those that were not asked or must make up for much have none."""
        if len(rows) == len(rows_n) and (rows == rows_n).all():
            return drafts
        self._counts[rows] = np.arange(1, len(rows) + 1)
        place_n = self._counts[rows_n]
        self._counts[rows] = 0
        with_none = np.concatenate([np.full((1, drafts.shape[1]), -1, dtype=np.int64), drafts])
        return with_none[place_n]


class _TargetsVocabulary:
    """The draft, with logits over the target's tokens alone."""

    def __init__(self, module: nn.Module, vocab_size: int, target_vocab_size: int) -> None:
        self.module = module
        self.num_embeddings = vocab_size
        self._target_vocab_size = target_vocab_size
        self.layers = {}
        for name, layer in attention_layers(module).items():
            layer.name = f"{DRAFT_PREFIX}{name}"
            self.layers[layer.name] = layer

    def forward_pass(self, input_ids_T: Tensor, positions_T: Tensor, hidden_TE: Tensor | None) -> Tensor:
        hidden: Tensor = self.module(input_ids_T, positions_T)
        return hidden

    def compute_logits(self, hidden_NE: Tensor) -> Tensor:
        logits: Tensor = self.module.compute_logits(hidden_NE)
        return logits[:, : self._target_vocab_size]

    def target_tokens(self, chosen_N: Tensor) -> Tensor:
        return chosen_N


def _by_count(counts: IntArray) -> IntArray | None:
    """An order in which counts never rise; None if they do not."""
    if len(counts) == 1 or (counts[1:] <= counts[:-1]).all():
        return None
    return np.argsort(-counts, kind="stable")


def _check_vocabulary(draft: ModelFacts, target: ModelFacts) -> None:
    if abs(draft.vocab_size - target.vocab_size) < _MOST_PADDING:
        return
    raise ModelError(
        f"speculative_config: model={draft.path}: has a vocabulary of {draft.vocab_size:,} tokens, {target.path} one "
        f"of {target.vocab_size:,}. They may differ by padding, by less than {_MOST_PADDING:,}, because a draft must "
        "mean the same by every token id. Take a draft with the tokenizer of the model, or method=ngram."
    )
