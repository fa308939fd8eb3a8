"""Graphs of a GPU, through torch: what is captured shares one pool of memory and one stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class CudaGraph:
    """Replayed on the stream that is current."""

    graph: torch.cuda.CUDAGraph
    outputs: Any
    num_bytes: int

    def replay(self) -> None:
        self.graph.replay()


class CudaGraphs:
    """Captures on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, run: Callable[[], Any]) -> CudaGraph:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # Kernels are compiled, and what operators remember of addresses is remembered.
            run()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            outputs = run()
        left, _ = torch.cuda.mem_get_info(self._device)
        return CudaGraph(graph, outputs, max(0, free - left))
