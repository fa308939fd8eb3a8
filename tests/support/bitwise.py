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
from quire.worker.input_batch import InputBatch


class BookOfBits:
    """Hidden states of one model, over many engines and requests."""

    def __init__(self) -> None:
        self._bits: dict[bytes, bytes] = {}
        # how often a state was seen that was in the book already; positions at which it had other bits
        self.num_repeated = 0
        self.differences: list[list[int]] = []

    def __len__(self) -> int:
        return len(self._bits)

    def watch(self, core: EngineCore) -> None:
        """Write down what this engine computes from now on. It must run in this process."""
        runner: Any = core.executor.worker._runner  # type: ignore[attr-defined]
        computation = runner.isolation.computation
        build = computation.batches.build
        batches: list[InputBatch] = []

        def build_and_keep(*arguments: Any) -> InputBatch:
            batches[:] = [build(*arguments)]
            return batches[0]

        model = computation.model

        def run(input_ids: Tensor, positions: Tensor) -> Tensor:
            hidden: Tensor = model(input_ids, positions)
            self._write(runner.table.token_ids, batches[0], hidden)
            return hidden

        computation.batches.build = build_and_keep
        computation.model = run

    def _write(self, token_ids: np.ndarray, batch: InputBatch, hidden: Tensor) -> None:
        bits = hidden.contiguous().view(torch.uint8).numpy()
        starts = batch.query_starts_S1
        for index, (row, first) in enumerate(zip(batch.rows_S, batch.num_computed_S, strict=True)):
            for token in range(starts[index], starts[index + 1]):
                last = int(first) + token - int(starts[index])
                self._compare(token_ids[row, : last + 1], bits[token].tobytes())

    def _compare(self, tokens: np.ndarray, bits: bytes) -> None:
        known = self._bits.setdefault(tokens.tobytes(), bits)
        if known is bits:
            return
        self.num_repeated += 1
        if known != bits:
            self.differences.append(tokens.tolist())
