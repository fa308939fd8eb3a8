"""Sampling: from hidden states to tokens (docs/sampling.md)."""
