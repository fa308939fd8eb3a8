"""Logits processors, one file each, in the order in which they apply.

First what excludes tokens, then what moves logits, then what others bring, then what decides alone: the end of
thoughts, the form of an output; and of what is left, a watermark. A new processor is a rule (`processor.py`) in a file
of its own, or an object with all hooks, and a line in the tuple below.
"""

from quire.config.speech_tokens import SpeechTokens
from quire.config.watermark import Watermark
from quire.structured_output.grammars import Grammars
from quire.worker.row_table import RowTable
from quire.worker.sampler.beside import BesideSteps
from quire.worker.sampler.processors.allowed_token_ids import AllowedTokenIds
from quire.worker.sampler.processors.bad_words import BadWords
from quire.worker.sampler.processors.call_budget import CallBudget, EqualBudget
from quire.worker.sampler.processors.heard_text import HeardText
from quire.worker.sampler.processors.logit_bias import LogitBias
from quire.worker.sampler.processors.min_tokens import MinTokens
from quire.worker.sampler.processors.own_processors import OwnProcessors
from quire.worker.sampler.processors.penalties import Penalties
from quire.worker.sampler.processors.processor import ByRow, LogitsProcessor, RowFeature, RowFollower
from quire.worker.sampler.processors.structured_output import StructuredOutput
from quire.worker.sampler.processors.thinking_budget import ThinkingBudget
from quire.worker.sampler.processors.watermark import WatermarkRule


def built_in_processors(
    table: RowTable,
    grammars: Grammars | None = None,
    beside: BesideSteps | None = None,
    reasons: dict[int, str] | None = None,
    speech: SpeechTokens | None = None,
    watermark: Watermark | None = None,
) -> tuple[LogitsProcessor, ...]:
    """One of each, over the rows of this table. `beside`: for what takes too long for a step. `reasons`: where one says
    why it left a row with nothing, by row. `speech`: of a model that listens."""
    num_rows = table.num_rows
    beside = beside or BesideSteps(num_rows)
    reasons = {} if reasons is None else reasons
    structured = StructuredOutput(table, grammars or Grammars(), beside, reasons)
    forms = ByRow(structured, num_rows, "sampling.structured_outputs", holds_for_beams=True)
    beside.users = forms.rows
    new_budget = CallBudget if beside.is_alone else EqualBudget
    heard = (
        () if speech is None else (ByRow(HeardText(table, speech), num_rows, "media", none=[], holds_for_beams=True),)
    )
    return (
        *heard,
        ByRow(AllowedTokenIds(), num_rows, "sampling.allowed_token_ids"),
        ByRow(BadWords(table), num_rows, "bad_words_token_ids", none=[]),
        ByRow(MinTokens(table), num_rows, "sampling.min_tokens", none=0),
        ByRow(LogitBias(), num_rows, "sampling.logit_bias"),
        Penalties(table),
        ByRow(OwnProcessors(table, reasons, new_budget), num_rows, "sampling.logits_processors"),
        ByRow(ThinkingBudget(table), num_rows, "sampling.thinking_token_budget"),
        forms,
        ByRow(WatermarkRule(table, watermark), num_rows, "sampling.watermarking"),
    )


__all__ = ["LogitsProcessor", "RowFeature", "RowFollower", "built_in_processors"]
