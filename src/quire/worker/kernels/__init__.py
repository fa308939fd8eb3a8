"""The operations that a model spends its time in, each behind one function, whatever the device.

Each is a torch operator of the namespace `quire` (`operators.py`), or a function around the one of its name. The
dispatcher of torch then picks the home: C++ for tensors on the CPU (`kernels/cpu`, `csrc/cpu`), otherwise plain
PyTorch (`kernels/reference`), which is also the specification. torch.compile sees each operator as one opaque call.

Shape suffixes used in `kernels`, innermost dimension last:

    T  tokens of a step, all sequences one after the other      S  sequences
    H  heads (those of keys and values are fewer: K)            M  block ids in a row of the block table
    D  head dimension (that of values may differ: E)            N  blocks of the cache, or pairs of blocks
    B  places in a block                                        I  width of the feed-forward layer
    R  rotary dimension                                         P  positions in a table
    L  slots for adapters                                       G  rank of an adapter
    X  experts of a layer                                       K  experts of a token, where there are some
"""

from quire.worker.kernels.attention import attention_part, paged_attention
from quire.worker.kernels.experts import grouped_linear, route_tokens
from quire.worker.kernels.linear import pack_quantized, packed_linear, packed_rows, sliced_linear
from quire.worker.kernels.operators import (
    activate,
    add,
    add_adapters,
    add_rms_norm,
    all_gather,
    all_reduce,
    apply_bitmask,
    best_tokens,
    clamped_swiglu,
    convert,
    copy_blocks,
    gated_rms_norm,
    gather_logits,
    join,
    layer_norm,
    look_up,
    merge_attention,
    move_blocks,
    multiply,
    pack_weight,
    prepare_heads,
    rms_norm,
    rotary_embedding,
    scale,
    silu_and_mul,
    token_logprobs,
    unpack_weight,
    weigh_experts,
    write_kv,
)
from quire.worker.kernels.ranks import link_bytes, meeting_bytes, receive, relay_links, relay_sums, send
from quire.worker.kernels.recurrent import causal_conv, gated_delta_rule, ssd_scan
from quire.worker.kernels.reference.adapter_format import AdapterFormat
from quire.worker.kernels.sampling import choose_tokens, penalise

__all__ = [
    "AdapterFormat",
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
    "link_bytes",
    "look_up",
    "meeting_bytes",
    "merge_attention",
    "move_blocks",
    "multiply",
    "pack_quantized",
    "pack_weight",
    "packed_linear",
    "packed_rows",
    "paged_attention",
    "penalise",
    "prepare_heads",
    "receive",
    "relay_links",
    "relay_sums",
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
