"""Logits processors, one file each, in the order in which they apply.

First what excludes tokens, then what moves logits. A new processor is a class with the hooks of `processor.py` that
takes the row table, and a line in the tuple below.
"""

from quire.worker.row_table import RowTable
from quire.worker.sampler.processors.allowed_token_ids import AllowedTokenIds
from quire.worker.sampler.processors.bad_words import BadWords
from quire.worker.sampler.processors.logit_bias import LogitBias
from quire.worker.sampler.processors.min_tokens import MinTokens
from quire.worker.sampler.processors.penalties import Penalties
from quire.worker.sampler.processors.processor import LogitsProcessor, RowFollower

_BUILT_IN = (AllowedTokenIds, BadWords, MinTokens, LogitBias, Penalties)


def built_in_processors(table: RowTable) -> tuple[LogitsProcessor, ...]:
    """One of each, over the rows of this table."""
    return tuple(kind(table) for kind in _BUILT_IN)


__all__ = ["LogitsProcessor", "RowFollower", "built_in_processors"]
