"""Decoding methods out of three verbs (3.5.2): fork, append, free. One file each."""

from __future__ import annotations

from quire.engine_core.decoding.method import DecodingMethod
from quire.engine_core.decoding.parallel_sampling import ParallelSampling
from quire.sampling_params import SamplingParams

_PARALLEL_SAMPLING = ParallelSampling()


def method_of(sampling: SamplingParams) -> DecodingMethod:
    """The method that these parameters ask for. One sequence alone is parallel sampling with nothing to fork."""
    return _PARALLEL_SAMPLING
