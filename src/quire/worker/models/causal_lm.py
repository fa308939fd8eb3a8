"""What every decoder with a language-model head has: a backbone, a head, and the two calls that a step makes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker.layers.embedding import LMHead, VocabEmbedding


class CausalLM(nn.Module):
    """A backbone under `model` that turns (input_ids, positions, input_embeds) into hidden states, and a head."""

    # why its layers cannot be divided over the stages of a pipeline (stages.py), where they cannot
    reason_not_to_divide: str | None = None
    # what encodes images, and how many of the first layers take what it has made: they are the first stage's
    image_modules: tuple[str, ...] = ()
    num_image_layers = 0
    # an image's tokens stand at rows and columns
    has_grid_positions = False
    # vectors may stand in the place of tokens
    takes_vectors = True
    # its sequences begin with what an encoder reads (encoder_decoder.py)
    has_sources = False
    # of what the head is that guesses the token behind the next one; None: there is none that is built
    multi_token: Any = None

    def __init__(self, model: nn.Module, lm_head: LMHead) -> None:
        super().__init__()
        self.model = model
        self.lm_head = lm_head

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        input_embeds: Tensor | None = None,
        intermediate_tensors: Any = None,
    ) -> Tensor:
        """Hidden states of all tokens of the step, [T, hidden_size]. Only a stage of a pipeline is given
        `intermediate_tensors`, and has another `forward` in the place of this one (stages.py)."""
        if intermediate_tensors is not None:
            raise ModelError("intermediate_tensors: every layer of this model is in this worker.")
        hidden: Tensor = self.model(input_ids, positions, input_embeds)
        return hidden

    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        """What vectors stand beside, [T, width]."""
        backbone: Any = self.model
        embed = getattr(backbone, "embed", None) or next(
            module for module in backbone.modules() if isinstance(module, VocabEmbedding)
        )
        embedded: Tensor = embed(input_ids)
        return embedded

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits of the rows of `hidden`, [N, vocab_size]."""
        logits: Tensor = self.lm_head(hidden)
        return logits


def has_sources(model: nn.Module) -> bool:
    return bool(getattr(model, "has_sources", False))


def head_of(config: Any, embedding: VocabEmbedding, *, bias: bool = False) -> LMHead:
    """The head that config.json describes: tied to the embedding or with a weight of its own."""
    tied_to = embedding if config.tie_word_embeddings else None
    return LMHead(config.vocab_size, config.hidden_size, tied_to=tied_to, bias=bias)
