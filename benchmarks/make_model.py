"""A checkpoint of the Qwen3-0.6B shape with random weights: what PERFORMANCE's workloads and all rivals are run on.

    python benchmarks/make_model.py DIR [--layers 28] [--vocabulary 151936] [--seed 0]
    python benchmarks/make_model.py DIR --experts 64 [--layers 4]      the shape of expert_shape.py instead

596 million parameters in bfloat16 (standard deviation 0.02, fixed seed), tied embeddings, and a byte-level BPE
tokenizer of the full vocabulary size, so that every engine that reads Hugging Face folders can load it. Fewer layers
make a smaller one of the same width. A folder that is complete already is left as it is.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
from expert_shape import config_of
from safetensors.torch import save_file

from quire.testing.tiny_checkpoints import CHAT_TEMPLATE, shape_0_6b_config

STD = 0.02
NUM_BYTES = 256
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Written last: a folder that has it is complete.
_DONE = "made.json"


def make_model(path: Path, *, num_layers: int = 28, vocab_size: int = 151_936, seed: int = 0) -> Path:
    """The folder, made if it is not there yet."""
    made = {"num_layers": num_layers, "vocab_size": vocab_size, "seed": seed}
    done = path / _DONE
    if done.exists() and json.loads(done.read_text(encoding="utf-8")) == made:
        return path
    first_special = vocab_size - len(SPECIAL_TOKENS)
    shape_0_6b_config(
        path,
        num_hidden_layers=num_layers,
        vocab_size=vocab_size,
        eos_token_id=first_special + 2,
        bos_token_id=first_special,
    )
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    save_file(dict(_weights(config, seed)), path / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(path, vocab_size)
    done.write_text(json.dumps(made), encoding="utf-8")
    return path


def make_expert_model(path: Path, *, num_layers: int = 4, num_experts: int = 64, seed: int = 0) -> Path:
    """The folder of a mixture of experts: a file a layer, so that one of them is in memory at a time."""
    made = {"num_layers": num_layers, "num_experts": num_experts, "seed": seed}
    done = path / _DONE
    if done.exists() and json.loads(done.read_text(encoding="utf-8")) == made:
        return path
    path.mkdir(parents=True, exist_ok=True)
    config = config_of(num_layers, num_experts, is_dense=False)
    first_special = config["vocab_size"] - len(SPECIAL_TOKENS)
    config |= {"eos_token_id": first_special + 2, "bos_token_id": first_special}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    files: dict[str, str] = {}
    for number, (file, shapes) in enumerate(_files_of_experts(config)):
        tensors = dict(_drawn(shapes, seed + 1_000 * number))
        save_file(tensors, path / file, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": files}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    _write_tokenizer(path, config["vocab_size"])
    done.write_text(json.dumps(made), encoding="utf-8")
    return path


Shapes: TypeAlias = Iterable[tuple[str, tuple[int, ...]]]


def _files_of_experts(config: dict[str, Any]) -> Iterator[tuple[str, Shapes]]:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    matrix = (config["vocab_size"], hidden)
    yield "model-outside.safetensors", [
        ("model.embed_tokens.weight", matrix), ("model.norm.weight", (hidden,)), ("lm_head.weight", matrix),
    ]  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        shapes = _attention_shapes(config) | {"mlp.gate": (config["num_experts"], hidden)}
        for expert in range(config["num_experts"]):
            shapes |= {
                f"mlp.experts.{expert}.gate_proj": (inner, hidden),
                f"mlp.experts.{expert}.up_proj": (inner, hidden),
                f"mlp.experts.{expert}.down_proj": (hidden, inner),
            }
        named = [(f"model.layers.{layer}.{name}.weight", shape) for name, shape in shapes.items()]
        yield f"model-layer-{layer:03d}.safetensors", named


def _weights(config: dict[str, Any], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    return _drawn(_shapes(config), seed)


def _drawn(shapes: Shapes, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Matrices are drawn, norms are one. Each tensor has its own seed, so fewer layers are the first ones of more."""
    for number, (name, shape) in enumerate(shapes):
        if len(shape) == 1:
            yield name, torch.ones(shape, dtype=torch.bfloat16)
            continue
        generator = torch.Generator().manual_seed(seed * 100_003 + number)
        yield name, torch.empty(shape, dtype=torch.float32).normal_(0, STD, generator=generator).bfloat16()


def _attention_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of a layer, with its norms."""
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, feed_forward = config["hidden_size"], config["intermediate_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(config["num_hidden_layers"]):
        of_layer = _attention_shapes(config) | {
            "mlp.gate_proj": (feed_forward, hidden),
            "mlp.up_proj": (feed_forward, hidden),
            "mlp.down_proj": (hidden, feed_forward),
        }
        for name, shape in of_layer.items():
            yield f"model.layers.{layer}.{name}.weight", shape


def _write_tokenizer(path: Path, vocab_size: int) -> None:
    """Bytes, then pairs of what is there, in a fixed order until the vocabulary is full, then three special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _merges(letters, vocab_size - NUM_BYTES - len(SPECIAL_TOKENS))
    vocabulary = {token: number for number, token in enumerate([*letters, *(left + right for left, right in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL_TOKENS[2], bos_token=SPECIAL_TOKENS[0])
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)


def _merges(letters: list[str], count: int) -> list[tuple[str, str]]:
    """Pairs of letters, then each pair with a further letter; no two make the same token."""
    pairs = [(left, right) for left in letters for right in letters]
    merges = pairs[:count]
    triples = math.ceil(max(0, count - len(pairs)) / len(letters))
    for left, right in pairs[:triples]:
        merges += [(left + right, letter) for letter in letters]
    return merges[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, metavar="DIR")
    parser.add_argument("--layers", type=int, help="default: 28, with experts 4")
    parser.add_argument("--experts", type=int, help="of each layer")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.experts:
        num_layers = options.layers or 4
        path = make_expert_model(options.path, num_layers=num_layers, num_experts=options.experts, seed=options.seed)
    else:
        num_layers = options.layers or 28
        path = make_model(options.path, num_layers=num_layers, vocab_size=options.vocabulary, seed=options.seed)
    size = sum(file.stat().st_size for file in path.iterdir())
    print(f"{path}: {size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
