"""The C++ home of the kernels: found or built at first use, or given up with one line in the log."""

from quire.worker.kernels.cpu.library import load, measure, select_isa, set_crew, statistics

__all__ = ["load", "measure", "select_isa", "set_crew", "statistics"]
