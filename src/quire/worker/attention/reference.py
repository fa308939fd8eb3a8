"""The reference backend: plain PyTorch on any device, written to be right. Other backends are tested against it."""

from __future__ import annotations

from quire.worker.attention.paged import PagedAttention
from quire.worker.kernels import reference


class ReferenceBackend(PagedAttention):
    """Serves every layer."""

    name = "reference"
    kernels = reference
