"""Logits processors, one file each, in the order in which they apply.

First what excludes tokens, then what moves logits. A new processor is a rule (`processor.py`) in a file of its own, or
an object with all hooks, and a line in the tuple below.
"""

from quire.worker.row_table import RowTable
from quire.worker.sampler.processors.allowed_token_ids import AllowedTokenIds
from quire.worker.sampler.processors.bad_words import BadWords
from quire.worker.sampler.processors.logit_bias import LogitBias
from quire.worker.sampler.processors.min_tokens import MinTokens
from quire.worker.sampler.processors.penalties import Penalties
from quire.worker.sampler.processors.processor import ByRow, LogitsProcessor, RowFollower


def built_in_processors(table: RowTable) -> tuple[LogitsProcessor, ...]:
    """One of each, over the rows of this table."""
    num_rows = table.num_rows
    return (
        ByRow(AllowedTokenIds(), num_rows),
        ByRow(BadWords(table), num_rows),
        ByRow(MinTokens(table), num_rows),
        ByRow(LogitBias(), num_rows),
        Penalties(table),
    )


__all__ = ["LogitsProcessor", "RowFollower", "built_in_processors"]
