"""Speculative decoding: who proposes tokens (one file a method), and what a step does with proposals."""

from __future__ import annotations

import importlib
from typing import cast

from torch import nn

from quire.config import WorkerConfig
from quire.errors import ModelError
from quire.worker.models.causal_lm import has_sources
from quire.worker.speculative.drafting import Drafting
from quire.worker.speculative.ngram import NgramProposer
from quire.worker.speculative.proposer import NoProposer, Proposer, ProposerContext

# Methods with a model of their own, imported when asked for: their constructors take (config, target).
_WITH_A_MODEL = {
    "draft_model": "quire.worker.speculative.draft_model:DraftModelProposer",
    "eagle": "quire.worker.speculative.eagle:EagleProposer",
    "mtp": "quire.worker.speculative.mtp:MTPProposer",
}


def make_proposer(config: WorkerConfig, target: nn.Module) -> Proposer:
    """The proposer that is configured; what it loads is there when this returns. It drafts for `target`."""
    speculation = config.speculation
    if speculation is None:
        return NoProposer()
    if speculation.method == "ngram":
        return NgramProposer(speculation.prompt_lookup_min, speculation.prompt_lookup_max)
    if has_sources(target):
        raise ModelError(
            f"speculative_config: method={speculation.method!r}: a draft would not know what the encoder of "
            f"{type(target).__name__} has read. Take method='ngram', or leave it out."
        )
    module, _, name = _WITH_A_MODEL[speculation.method].partition(":")
    return cast(Proposer, getattr(importlib.import_module(module), name)(config, target))


def prepare_to_draft(config: WorkerConfig, target: nn.Module) -> None:
    """Of a stage of a pipeline that is not the last: `target` hands on what that one drafts with."""
    if config.speculation is not None and config.speculation.method == "eagle":
        importlib.import_module("quire.worker.speculative.eagle_loader").hand_on_taps(config, target)


__all__ = ["Drafting", "NoProposer", "Proposer", "ProposerContext", "make_proposer", "prepare_to_draft"]
