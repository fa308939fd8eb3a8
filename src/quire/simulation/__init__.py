"""The engine core on a virtual clock: what it would do, and how long it would take (docs/simulation.md)."""
