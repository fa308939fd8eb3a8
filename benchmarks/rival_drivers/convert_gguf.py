"""A Qwen3 checkpoint as GGUF: `python convert_gguf.py CHECKPOINT TARGET bf16|int8|int4`, in llama.cpp's environment.

With experts or without; those of a layer are stacked in one tensor, and routers are float32, as llama.cpp wants them.
bf16 is written with the gguf package, byte for byte as the checkpoint has it. int8 (Q8_0) and int4 (Q4_0, the embedding
in Q6_K, as llama.cpp does) are made from that by llama.cpp's own quantiser.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
}
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def write_bf16(checkpoint: Path, target: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    num_experts = config.get("num_experts", 0)
    # the stacked experts of all layers need not fit into memory
    writer = gguf.GGUFWriter(target, "qwen3moe" if num_experts else "qwen3", use_temp_file=bool(num_experts))
    writer.add_name(checkpoint.name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    _add_tokenizer(writer, checkpoint, config)
    stacks: dict[str, dict[int, Any]] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, shape, words in _tensors(file):
            if match := _EXPERT.fullmatch(name):
                stack = stacks.setdefault(f"blk.{match[1]}.ffn_{match[3]}_exps.weight", {})
                stack[int(match[2])] = words.reshape(shape)
            elif len(shape) == 1 or name.endswith("mlp.gate.weight"):
                # norms and routers stay in float32
                floats = (words.astype(np.uint32) << 16).view(np.float32).reshape(shape)
                writer.add_tensor(_name_of(name), floats)
            else:
                _add_bf16(writer, _name_of(name), words.reshape(shape))
        for name, stack in stacks.items():
            _add_bf16(writer, name, np.stack([stack[number] for number in range(num_experts)]))
        stacks.clear()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_bf16(writer: Any, name: str, words: Any) -> None:
    writer.add_tensor(name, words.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)


def quantise(source: Path, target: Path, precision: str) -> None:
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = {"int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "int4": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}[precision]
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params) != 0:
        raise SystemExit("llama.cpp did not quantise")


def _tensors(file: Path) -> Iterator[tuple[str, list[int], Any]]:
    """Name, shape and the 16-bit words of each tensor, read as they are needed."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise SystemExit(f"{name} is {entry['dtype']}, expected BF16")
        begin, end = entry["data_offsets"]
        yield name, entry["shape"], np.memmap(file, np.uint16, "r", 8 + size + begin, ((end - begin) // 2,))


def _name_of(name: str) -> str:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"


def _add_tokenizer(writer: Any, checkpoint: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    special = {entry["id"]: entry["content"] for entry in tokenizer["added_tokens"]}
    by_id = {number: token for token, number in tokenizer["model"]["vocab"].items()} | special
    numbers = range(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([by_id.get(number, f"<|unused_{number}|>") for number in numbers])
    kinds = gguf.TokenType
    writer.add_token_types(
        [
            kinds.CONTROL if number in special else kinds.NORMAL if number in by_id else kinds.UNUSED
            for number in numbers
        ]
    )
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def main() -> None:
    checkpoint, target, precision = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    partial = target.with_suffix(".partial")
    if precision == "bf16":
        write_bf16(checkpoint, partial)
    else:
        quantise(target.with_name("bf16.gguf"), partial, precision)
    partial.replace(target)


if __name__ == "__main__":
    main()
