"""Speculative decoding: who proposes tokens (one file a method), and what a step does with proposals."""

from __future__ import annotations

import importlib
from typing import cast

from torch import nn

from quire.config import WorkerConfig
from quire.worker.speculative.drafting import Drafting
from quire.worker.speculative.ngram import NgramProposer
from quire.worker.speculative.proposer import NoProposer, Proposer, ProposerContext

# Methods with a model of their own, imported when asked for: their constructors take (config, target).
_WITH_A_MODEL = {
    "draft_model": "quire.worker.speculative.draft_model:DraftModelProposer",
    "eagle": "quire.worker.speculative.eagle:EagleProposer",
}


def make_proposer(config: WorkerConfig, target: nn.Module) -> Proposer:
    """The proposer that is configured; what it loads is there when this returns. It drafts for `target`."""
    speculation = config.speculation
    if speculation is None:
        return NoProposer()
    if speculation.method == "ngram":
        return NgramProposer(speculation.prompt_lookup_min, speculation.prompt_lookup_max)
    module, _, name = _WITH_A_MODEL[speculation.method].partition(":")
    return cast(Proposer, getattr(importlib.import_module(module), name)(config, target))


__all__ = ["Drafting", "NoProposer", "Proposer", "ProposerContext", "make_proposer"]
