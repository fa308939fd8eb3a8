"""Every operation in plain PyTorch, written to be read: the specification that all other kernels are tested against.

It runs on any device. Nothing here waits for a device where that is easy to avoid.
"""

from quire.worker.kernels.reference.activate import activate
from quire.worker.kernels.reference.add import add
from quire.worker.kernels.reference.add_adapters import add_adapters
from quire.worker.kernels.reference.add_rms_norm import add_rms_norm
from quire.worker.kernels.reference.all_reduce import all_gather, all_reduce
from quire.worker.kernels.reference.apply_bitmask import apply_bitmask
from quire.worker.kernels.reference.best_tokens import best_tokens
from quire.worker.kernels.reference.causal_conv import causal_conv
from quire.worker.kernels.reference.choose_tokens import choose_tokens
from quire.worker.kernels.reference.clamped_swiglu import clamped_swiglu
from quire.worker.kernels.reference.convert import convert
from quire.worker.kernels.reference.copy_blocks import copy_blocks
from quire.worker.kernels.reference.gated_delta_rule import gated_delta_rule
from quire.worker.kernels.reference.gated_rms_norm import gated_rms_norm
from quire.worker.kernels.reference.gather_logits import gather_logits
from quire.worker.kernels.reference.grouped_linear import grouped_linear
from quire.worker.kernels.reference.join import join
from quire.worker.kernels.reference.layer_norm import layer_norm
from quire.worker.kernels.reference.look_up import look_up
from quire.worker.kernels.reference.move_blocks import move_blocks
from quire.worker.kernels.reference.multiply import multiply
from quire.worker.kernels.reference.new_rows import new_rows
from quire.worker.kernels.reference.pack_quantized import pack_quantized
from quire.worker.kernels.reference.pack_weight import pack_weight
from quire.worker.kernels.reference.packed_linear import packed_linear
from quire.worker.kernels.reference.packed_rows import packed_rows
from quire.worker.kernels.reference.paged_attention import attention_part, merge_attention, paged_attention
from quire.worker.kernels.reference.penalise import penalise
from quire.worker.kernels.reference.prepare_heads import prepare_heads
from quire.worker.kernels.reference.rms_norm import rms_norm
from quire.worker.kernels.reference.rotary_embedding import rotary_embedding
from quire.worker.kernels.reference.route_tokens import route_tokens
from quire.worker.kernels.reference.scale import scale
from quire.worker.kernels.reference.send_and_receive import receive, send
from quire.worker.kernels.reference.silu_and_mul import silu_and_mul
from quire.worker.kernels.reference.sliced_linear import sliced_linear
from quire.worker.kernels.reference.ssd_scan import ssd_scan
from quire.worker.kernels.reference.token_logprobs import token_logprobs
from quire.worker.kernels.reference.unpack_weight import unpack_weight
from quire.worker.kernels.reference.weigh_experts import weigh_experts
from quire.worker.kernels.reference.write_kv import write_kv

__all__ = [
    "activate",
    "add",
    "add_adapters",
    "add_rms_norm",
    "all_gather",
    "all_reduce",
    "apply_bitmask",
    "attention_part",
    "best_tokens",
    "causal_conv",
    "choose_tokens",
    "clamped_swiglu",
    "convert",
    "copy_blocks",
    "gated_delta_rule",
    "gated_rms_norm",
    "gather_logits",
    "grouped_linear",
    "join",
    "layer_norm",
    "look_up",
    "merge_attention",
    "move_blocks",
    "multiply",
    "new_rows",
    "pack_quantized",
    "pack_weight",
    "packed_linear",
    "packed_rows",
    "paged_attention",
    "penalise",
    "prepare_heads",
    "receive",
    "rms_norm",
    "rotary_embedding",
    "route_tokens",
    "scale",
    "send",
    "silu_and_mul",
    "sliced_linear",
    "ssd_scan",
    "token_logprobs",
    "unpack_weight",
    "weigh_experts",
    "write_kv",
]
