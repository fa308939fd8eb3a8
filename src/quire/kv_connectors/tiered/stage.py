"""The tiered connector's worker half of a stage of a pipeline. A tier holds the blocks of all stages:

block of a tier     [ stage 0: its ranks, their layers ][ stage 1 ] ...

load     stage 0 takes whole blocks; each stage hands on what lies behind its own part, after the step itself
spill    each answers its part with the step, and the core has them put together once all have answered
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kv_connectors.connector import CacheLayout, StageSharers
from quire.kv_connectors.tiered.payload import Payload
from quire.kv_connectors.tiered.tiers import Tiers
from quire.kv_connectors.tiered.worker import TieredWorker

logger = logging.getLogger("quire.kv_connectors")


class TieredStage(TieredWorker):
    """Waits for the stage before, as the step does."""

    def __init__(self, tiers: Tiers | None, sharers: StageSharers) -> None:
        super().__init__(tiers, sharers)
        self._stages = sharers.stages
        # of each load of a step, what the stages behind this one keep; None: it failed
        self._for_next_stage: list[Tensor | None] = []
        self._spilled: Mapping[bytes, bytes] = {}

    def _open_tiers(self, layout: CacheLayout) -> None:
        """What whole blocks are, no stage knows."""

    def _taken(self, source: Any, num_blocks: int) -> Tensor | None:
        if self._sharers.number > 0:
            return torch.empty((num_blocks, self._block_bytes), dtype=torch.uint8)
        contents = self._taken_whole(source) if self._stages.is_first else self._received()
        if contents is not None and not self._fits(contents.shape[1]):
            logger.error("blocks of other sizes lie under the names of ours: %d bytes", contents.shape[1])
            contents = None
        if not self._stages.is_last:
            self._for_next_stage.append(None if contents is None else contents[:, self._block_bytes :])
        return None if contents is None else contents[:, : self._block_bytes]

    def _fits(self, num_bytes: int) -> bool:
        is_right: bool = num_bytes == self._block_bytes if self._stages.is_last else num_bytes > self._block_bytes
        return is_right

    def _taken_whole(self, source: Any) -> Tensor | None:
        assert self._tiers is not None
        try:
            return torch.from_numpy(np.stack(self._tiers.host.take(source)))
        except Exception:
            # not raised here: the other stages would wait for the content
            logger.exception("blocks were near, and cannot be loaded")
            return None

    def _received(self) -> Tensor | None:
        num_blocks, num_bytes = self._stages.receive(torch.empty(2, dtype=torch.int64)).tolist()
        if not num_blocks:
            return None
        contents: Tensor = self._stages.receive(torch.empty((num_blocks, num_bytes), dtype=torch.uint8))
        return contents

    def hand_on(self) -> None:
        for contents in self._for_next_stage:
            self._stages.send(torch.tensor([0, 0] if contents is None else contents.shape))
            if contents is not None:
                self._stages.send(contents)
        self._for_next_stage = []

    def _put(self, rows: Mapping[bytes, Payload]) -> None:
        self._spilled = {name: row.tobytes() for name, row in rows.items()}

    def take_spilled(self) -> Mapping[bytes, bytes]:
        spilled = self._spilled
        self._spilled = {}
        return spilled

    def keep(self, blocks: Mapping[bytes, bytes]) -> None:
        assert self._tiers is not None
        self._tiers.put({name: np.frombuffer(content, dtype=np.uint8) for name, content in blocks.items()})
