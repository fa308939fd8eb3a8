"""The operations on rows of logits. What each one means is written in `reference/<name>.py`.

`rows_n`, on the device of the logits, says which rows are meant, None all of them. Suffixes: N rows of logits, n rows
that are meant, V tokens of the vocabulary, K tokens of each row.
"""

from __future__ import annotations

from torch import Tensor

from quire.worker.kernels import operators


def choose_tokens(
    logits_NV: Tensor,
    rows_n: Tensor | None,
    *,
    temperature_n: Tensor,
    top_k_n: Tensor,
    top_p_n: Tensor,
    min_p_n: Tensor,
    uniform_n: Tensor,
) -> tuple[Tensor, Tensor]:
    """(token, greatest logit) of each row: drawn by one uniform number, or the best at a temperature of 0.

    The parameters are on the host, whatever the device of the logits.
    """
    return operators.choose_tokens(logits_NV, rows_n, temperature_n, top_k_n, top_p_n, min_p_n, uniform_n)


def penalise(
    logits_nV: Tensor,
    tokens_RL: Tensor,
    *,
    rows_n: Tensor,
    num_prompt_n: Tensor,
    lengths_n: Tensor,
    repetition_n: Tensor,
    frequency_n: Tensor,
    presence_n: Tensor,
) -> None:
    """Penalties on what rows of a table of tokens have said, on float32 logits in place: row i of the logits is that of
    the first lengths[i] tokens of row rows[i], of which num_prompt[i] are prompt. All but the logits is on the host."""
    operators.penalise(logits_nV, tokens_RL, rows_n, num_prompt_n, lengths_n, repetition_n, frequency_n, presence_n)
