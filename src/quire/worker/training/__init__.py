"""Training with the served kernels: `load.py` makes a TrainedModel, `quire.modeling` is where users find it."""
