"""The paper's evaluation (3.6, 3.7) with the engine's own core: workloads, systems, figures (docs/paper.md)."""
