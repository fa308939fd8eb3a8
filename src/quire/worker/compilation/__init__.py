"""Running a model faster than operator by operator: recorded as one program (CPU), as graphs of a device, or in pieces
that torch's compiler makes (4.3.1)."""

from quire.worker.compilation.graphs import GraphedModel, StepBuffers, graph_model, why_no_graphs
from quire.worker.compilation.piecewise import CannotCompileError, compile_model
from quire.worker.compilation.recorded import record_model
from quire.worker.compilation.recorded_decoding import RecordedDecoding

__all__ = [
    "CannotCompileError",
    "GraphedModel",
    "RecordedDecoding",
    "StepBuffers",
    "compile_model",
    "graph_model",
    "record_model",
    "why_no_graphs",
]
