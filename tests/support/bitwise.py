"""Do the same tokens always give the same bits? A book of hidden states by the tokens that led to them (C7).

Whatever a step holds besides (other requests, chunks, cached prefixes, drafts), the hidden state of a token may depend
on the tokens up to it and on nothing else. So every state of every step is written down under its tokens, and one that
comes again must be equal, bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.engine_core.engine_core import EngineCore
from quire.worker.forward_context import current_forward_context
from quire.worker.input_batch import InputBatch


class BookOfBits:
    """Hidden states of one model, over many engines and requests."""

    def __init__(self) -> None:
        self._bits: dict[bytes, bytes] = {}
        # how often a state was seen that was in the book already; positions at which it had other bits
        self.num_repeated = 0
        self.differences: list[list[int]] = []
        self._num_watched = 0

    def __len__(self) -> int:
        return len(self._bits)

    def watch(self, core: EngineCore) -> None:
        """Write down what this engine computes from now on. It must run in this process. Every second engine is asked
        for the states of all tokens; the others compute those that somebody reads."""
        runner: Any = core.executor.worker._runner  # type: ignore[attr-defined]
        computation = runner.isolation.computation
        table = runner.table
        build = computation.batches.build
        batches: list[InputBatch] = []
        self._num_watched += 1
        if self._num_watched % 2:
            computation.sampler.tokens_read = lambda batch: None

        def build_and_keep(*arguments: Any) -> InputBatch:
            batches[:] = [build(*arguments)]
            return batches[0]

        model = computation.model
        next_tokens = computation._next_tokens

        def run(input_ids: Tensor, positions: Tensor) -> Tensor:
            hidden: Tensor = model(input_ids, positions)
            [batch] = batches
            wanted = current_forward_context().wanted_n
            rows_T = np.repeat(batch.rows_S, batch.num_tokens_S)
            lengths_T = positions.numpy() + 1
            for token in range(len(hidden)) if wanted is None else wanted.tolist():
                self._compare(table.token_ids[rows_T[token], : lengths_T[token]], hidden[token])
            return hidden

        def decode(rows: np.ndarray, *arguments: Any) -> np.ndarray | None:
            tokens: np.ndarray | None = next_tokens(rows, *arguments)
            if tokens is None:
                return None
            for place, row in enumerate(rows.tolist()):
                before = table.token_ids[row, : table.num_computed[row] + 1]
                # of a step of several tokens the states of the last one are there
                sequence = np.concatenate([before, tokens[:-1, place].astype(before.dtype)])
                self._compare(sequence, model.forward.hidden[place])
            return tokens

        computation.batches.build = build_and_keep
        computation.model = run
        if next_tokens is not None:
            computation._next_tokens = decode

    def _compare(self, tokens: np.ndarray, hidden: Tensor) -> None:
        bits = hidden.contiguous().view(torch.uint8).numpy().tobytes()
        known = self._bits.setdefault(tokens.tobytes(), bits)
        if known is bits:
            return
        self.num_repeated += 1
        if known != bits:
            self.differences.append(tokens.tolist())
