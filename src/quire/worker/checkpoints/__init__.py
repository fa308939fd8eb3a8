"""Checkpoints: how weights are stored, and how each format is read."""

from quire.worker.checkpoints.checkpoint import Checkpoint, Weight, open_checkpoint

__all__ = ["Checkpoint", "Weight", "open_checkpoint"]
