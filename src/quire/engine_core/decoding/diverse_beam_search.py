"""Diverse beam search: groups of beams that are pushed apart (Vijayakumar et al., 2018).

Each group is a beam search of its own. Within a step they choose one after the other, and a token costs
`diversity_penalty` for every beam of an earlier group that has just taken it. Everything else is beam search: the
shared blocks, the forks, the preemption. So this file only says what the parameters mean.
"""

from __future__ import annotations

from typing import Any

from quire.engine_core.decoding.beam_search import BeamSearch
from quire.messages import EngineRequest


def diverse_beam_search(
    message: EngineRequest, *, width: int, num_groups: int, diversity_penalty: float, **rules: Any
) -> BeamSearch:
    """`width` beams in num_groups groups of equal size."""
    return BeamSearch(message, width=width, num_groups=num_groups, diversity_penalty=diversity_penalty, **rules)
