"""What models with an encoder and a decoder share: the encoder reads a source once, the decoder looks at what it made.

See `source_rows.py` for where the tokens of a source stand.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quire.messages import Media
from quire.worker.layers.cross_attention import CrossAttention
from quire.worker.models.causal_lm import CausalLM
from quire.worker.source_rows import Encoded


class EncoderDecoder(CausalLM):
    """A decoder under `model` that turns (input_ids, positions) of text into hidden states, and a head."""

    takes_vectors = False
    has_sources = True
    reason_not_to_divide = "each looks at what its encoder made, which one worker has"

    def source_of(self, media: Media) -> Tensor:
        """What is encoded, on the host; ModelError where it is nothing that the encoder reads."""
        raise NotImplementedError

    def largest_source(self) -> Tensor:
        raise NotImplementedError

    def encode(self, source: Tensor) -> Tensor:
        """A row for each token of the source, [A, hidden_size]."""
        raise NotImplementedError

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        encoded: Encoded | None = None,
        intermediate_tensors: Any = None,
    ) -> Tensor:
        """Of the tokens of text. With `encoded` a row for each token of the step."""
        if encoded is not None:
            for module in self.model.modules():
                if isinstance(module, CrossAttention):
                    module.remember(encoded.encoded_AE)
            if not len(input_ids):
                return encoded.spread(encoded.encoded_AE[:0])
        hidden: Tensor = self.model(input_ids, positions)
        return hidden if encoded is None else encoded.spread(hidden)
