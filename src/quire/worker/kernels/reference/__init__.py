"""Every operation in plain PyTorch, written to be read: the specification that all other kernels are tested against.

It runs on any device. Nothing here waits for a device where that is easy to avoid.
"""

from quire.worker.kernels.reference.add_rms_norm import add_rms_norm
from quire.worker.kernels.reference.copy_blocks import copy_blocks
from quire.worker.kernels.reference.move_blocks import move_blocks
from quire.worker.kernels.reference.paged_attention import paged_attention
from quire.worker.kernels.reference.rms_norm import rms_norm
from quire.worker.kernels.reference.rotary_embedding import rotary_embedding
from quire.worker.kernels.reference.silu_and_mul import silu_and_mul
from quire.worker.kernels.reference.write_kv import write_kv

__all__ = [
    "add_rms_norm",
    "copy_blocks",
    "move_blocks",
    "paged_attention",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "write_kv",
]
