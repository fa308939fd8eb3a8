"""Running a model faster than operator by operator: recorded as one program (CPU), or by torch.compile (4.3.1)."""

from quire.worker.compilation.recorded import record_model
from quire.worker.compilation.regional import compile_layers

__all__ = ["compile_layers", "record_model"]
