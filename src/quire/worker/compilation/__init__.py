"""Running a model faster than operator by operator: recorded as one program (CPU), as graphs of a device, or by
torch.compile (4.3.1)."""

from quire.worker.compilation.graphs import GraphedModel, StepBuffers, graph_model, why_no_graphs
from quire.worker.compilation.recorded import record_model
from quire.worker.compilation.regional import compile_layers

__all__ = ["GraphedModel", "StepBuffers", "compile_layers", "graph_model", "record_model", "why_no_graphs"]
