"""torch.compile around the model, with attention as one opaque operator (4.3.1, Operation Fusion)."""

from quire.worker.compilation.regional import compile_layers

__all__ = ["compile_layers"]
