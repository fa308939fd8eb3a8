"""The recurrences of layers that keep a state. Specified in `reference/<name>.py`.

Each fills `out` and changes the states where they lie.
"""

from __future__ import annotations

from torch import Tensor

from quire.worker.kernels import operators
from quire.worker.kernels.sequence_states import SequenceStates


def causal_conv(
    x_TC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    states: SequenceStates,
    out_TC: Tensor,
    *,
    has_silu: bool,
) -> None:
    """A short convolution over the tokens of each sequence, each channel by itself."""
    operators.causal_conv(x_TC, weight_WC, bias_C, *states.arguments(), out_TC, has_silu)


def gated_delta_rule(
    query_THK: Tensor,
    key_THK: Tensor,
    value_TVE: Tensor,
    a_TV: Tensor,
    b_TV: Tensor,
    a_log_V: Tensor,
    dt_bias_V: Tensor,
    states: SequenceStates,
    out_TVE: Tensor,
) -> None:
    """The recurrence of Gated DeltaNet."""
    operators.gated_delta_rule(
        query_THK,
        key_THK,
        value_TVE,
        a_TV,
        b_TV,
        a_log_V,
        dt_bias_V,
        *states.arguments(),
        out_TVE,
    )


def ssd_scan(
    x_THP: Tensor,
    dt_TH: Tensor,
    dt_bias_H: Tensor,
    a_log_H: Tensor,
    b_TGN: Tensor,
    c_TGN: Tensor,
    d_H: Tensor,
    states: SequenceStates,
    out_THP: Tensor,
    *,
    least_dt: float,
    most_dt: float,
) -> None:
    """The recurrence of Mamba 2."""
    operators.ssd_scan(
        x_THP,
        dt_TH,
        dt_bias_H,
        a_log_H,
        b_TGN,
        c_TGN,
        d_H,
        *states.arguments(),
        out_THP,
        least_dt,
        most_dt,
    )
