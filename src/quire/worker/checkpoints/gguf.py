"""The weights of a GGUF file, under the names and in the layout of a Hugging Face checkpoint.

Owns the table of names, and the differences of layout. For `llama`, GGUF has the rows of queries and keys in an order
in which a rotation takes neighbours, where models here take the two halves of a head. The experts of a layer are
stacked in one tensor, of which each is a range of bytes (`gguf_experts.py`). Quantised weights keep their codes; types
without a reader of their own are computed by the package `gguf`. Must never map the file into memory: its pages would
count beside the weights made from them.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch
from torch import Tensor

from quire.config import ModelFacts
from quire.config.arithmetic import ExpertShape
from quire.config.gguf_file import TYPES, GGUFFile, GGUFTensor
from quire.errors import ModelError
from quire.worker.checkpoints.gguf_blocks import DECODERS
from quire.worker.checkpoints.gguf_experts import one_by_one
from quire.worker.layers.quantization import QuantizedWeight, by_rows
from quire.worker.layers.stored_weight import StoredWeight

_logger = logging.getLogger(__name__)

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_MODULES_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    # its two directions, as they are multiplied: layers/latent.py
    "attn_k_b": "self_attn.kv_b_proj.keys",
    "attn_v_b": "self_attn.kv_b_proj.values",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# what has no leaf of its own, or another one
_OTHER_NAMES = {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_EXPERT = re.compile(r"blk\.(\d+)\.(ffn_gate|ffn_up|ffn_down)\.(\d+)\.(weight|bias)")
# Read with the configuration: the angles of the rotation.
_NOT_WEIGHTS = {"rope_freqs.weight"}


class GGUFCheckpoint:
    """The tensors of a GGUF file."""

    def __init__(self, facts: ModelFacts, dtype: torch.dtype) -> None:
        self._file = GGUFFile.read(facts.path)
        self._dtype = dtype
        self._dequantized: set[str] = set()
        config = facts.hf_config
        self._heads = {
            "attn_q": int(config["num_attention_heads"]),
            "attn_k": int(config["num_key_value_heads"]),
        }
        # layers behind the last one only draft
        first = int(config["num_hidden_layers"])
        self._not_used = {str(first + index) for index in range(config.get("num_nextn_predict_layers", 0))}
        shape = ExpertShape.of(config, first)
        self._num_experts = 0 if shape is None else shape.num_experts
        self._is_interleaved = self._file.metadata.get("general.architecture") == "llama"

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self._file.tensors.values())

    def tensors(self) -> Iterator[tuple[str, Tensor | StoredWeight]]:
        for tensor in one_by_one(self._used(), self._num_experts):
            yield hf_name(tensor.name), self._in_halves(tensor, self._read(tensor))
        if (
            "deepseek2.expert_count" in self._file.metadata
            and "deepseek2.expert_group_count" not in self._file.metadata
        ):
            _logger.info(
                "%s says nothing of groups of experts (deepseek2.expert_group_count): tokens choose among all",
                self._file.path.name,
            )
        if self._dequantized:
            _logger.info(
                "weights of the types %s were dequantised to %s",
                ", ".join(sorted(self._dequantized)),
                str(self._dtype).removeprefix("torch."),
            )

    def _used(self) -> list[GGUFTensor]:
        return [
            tensor
            for tensor in self._file.tensors.values()
            if tensor.name not in _NOT_WEIGHTS and _layer_of(tensor.name) not in self._not_used
        ]

    def _read(self, tensor: GGUFTensor) -> Tensor | StoredWeight:
        """A matrix is read when it is known which part of it is wanted."""
        name = tensor.type_name
        if len(tensor.shape) == 2:
            return self._matrix(tensor)
        if name not in _FLOATS:
            raise ModelError(f"{tensor.file}: {tensor.name} has {len(tensor.shape)} dimensions in {name}.")
        with _opened(tensor) as file:
            return _as_bytes(file, tensor.offset, tensor.num_bytes).view(_FLOATS[name]).view(tensor.shape)

    def _matrix(self, tensor: GGUFTensor) -> StoredWeight:
        name = tensor.type_name
        decode_part: Callable[[_Part], Tensor | QuantizedWeight]
        if name in _FLOATS:
            decode_part = _floats
        elif name in DECODERS:
            decode_part = _quantized
        else:
            self._dequantized.add(name)
            decode_part = functools.partial(_dequantized, compute=_computed_by_gguf(tensor), dtype=self._dtype)

        def read_part(rows: slice, columns: slice) -> Tensor | QuantizedWeight:
            with _opened(tensor) as file:
                return decode_part(_Part(file, tensor, rows, columns))

        _, per_block, _ = TYPES[tensor.type_id]
        num_rows, num_columns = tensor.shape
        return StoredWeight.of((num_rows, num_columns), tensor.num_bytes, read_part, column_step=per_block)

    def _in_halves(self, tensor: GGUFTensor, weight: Tensor | StoredWeight) -> Tensor | StoredWeight:
        match = _LAYER.fullmatch(tensor.name)
        heads = self._heads.get(match.group(2)) if match and self._is_interleaved else None
        if heads is None:
            return weight
        num_rows = weight.shape[0]
        if num_rows % (2 * heads):
            raise ModelError(f"{tensor.file}: {tensor.name} has {num_rows} rows, which are not {heads} heads.")
        index = torch.arange(num_rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)
        return weight[index] if isinstance(weight, Tensor) else weight.select_rows(index)


def hf_name(name: str) -> str:
    """`blk.3.ffn_up.weight` as `model.layers.3.mlp.up_proj.weight`; what is not in the table keeps its name."""
    if match := _EXPERT.fullmatch(name):
        layer, kind, expert, leaf = match.groups()
        projection = _MODULES_OF_LAYER[kind].removeprefix("mlp.")
        return f"model.layers.{layer}.mlp.experts.{expert}.{projection}.{leaf}"
    if match := _LAYER.fullmatch(name):
        layer, kind, leaf = match.groups()
        if f"{kind}.{leaf}" in _OTHER_NAMES:
            return f"model.layers.{layer}.{_OTHER_NAMES[f'{kind}.{leaf}']}"
        return f"model.layers.{layer}.{_MODULES_OF_LAYER[kind]}.{leaf}" if kind in _MODULES_OF_LAYER else name
    module, _, leaf = name.rpartition(".")
    return f"{_MODULES[module]}.{leaf}" if module in _MODULES else name


def _layer_of(name: str) -> str | None:
    """The number of its layer."""
    return name.split(".")[1] if name.startswith("blk.") else None


def _as_bytes(file: BinaryIO, offset: int, num_bytes: int) -> Tensor:
    data = bytearray(num_bytes)
    done = 0
    while done < num_bytes:
        # With its own offset, so that several threads can read; one call gives no more than 2 GiB.
        count = os.preadv(file.fileno(), [memoryview(data)[done:]], offset + done)
        if count == 0:
            raise ModelError(f"{file.name}: ended while it was read. Was it changed meanwhile?")
        done += count
    return torch.frombuffer(data, dtype=torch.uint8)


@contextmanager
def _opened(tensor: GGUFTensor) -> Iterator[BinaryIO]:
    try:
        with tensor.file.open("rb") as file:
            yield file
    except OSError as error:
        raise ModelError(f"{tensor.file}: cannot be read ({error}).") from error


class _Part:
    """Some rows of a matrix, and some columns, which begin and end with a block. Of the file whole rows are read."""

    def __init__(self, file: BinaryIO, tensor: GGUFTensor, rows: slice, columns: slice) -> None:
        self.type_name = tensor.type_name
        self.shape = (rows.stop - rows.start, columns.stop - columns.start)
        _, per_block, self.block_bytes = TYPES[tensor.type_id]
        self._file = file
        self._num_blocks = tensor.shape[1] // per_block
        self._blocks = slice(columns.start // per_block, columns.stop // per_block)
        self._row_bytes = self._num_blocks * self.block_bytes
        self._offset = tensor.offset + rows.start * self._row_bytes

    def first_block(self) -> Tensor:
        """[1, bytes of a block]: one tells what all are like."""
        return _as_bytes(self._file, self._offset, self.block_bytes).view(1, -1)

    def decode(self, decode: Callable[[slice, Tensor], None]) -> None:
        """Calls `decode` with ranges of these rows and their blocks, [B, bytes of a block]."""

        def run(rows: slice) -> None:
            num_rows = rows.stop - rows.start
            data = _as_bytes(self._file, self._offset + rows.start * self._row_bytes, num_rows * self._row_bytes)
            blocks = data.view(num_rows, self._num_blocks, self.block_bytes)[:, self._blocks]
            decode(rows, blocks.reshape(-1, self.block_bytes))

        by_rows(*self.shape, run)


def _floats(part: _Part) -> Tensor:
    weight = torch.empty(part.shape, dtype=_FLOATS[part.type_name])

    def decode(rows: slice, data: Tensor) -> None:
        weight[rows] = data.view(weight.dtype).view(-1, part.shape[1])

    part.decode(decode)
    return weight


def _quantized(part: _Part) -> QuantizedWeight:
    blocks_of, shape = DECODERS[part.type_name], part.shape
    like = blocks_of(part.first_block())
    num_groups = shape[1] // (like.codes.numel() // like.scales.numel())
    values = torch.empty(shape, dtype=like.codes.dtype)
    scales = torch.empty(shape[0], num_groups)
    offsets = None if like.offsets is None else torch.empty(shape[0], num_groups)

    def decode(rows: slice, data: Tensor) -> None:
        blocks = blocks_of(data)
        values[rows] = blocks.codes.reshape(-1, shape[1])
        scales[rows] = blocks.scales.reshape(-1, num_groups)
        if offsets is not None and blocks.offsets is not None:
            offsets[rows] = blocks.offsets.reshape(-1, num_groups)

    part.decode(decode)
    # As everywhere where such files are run on CPUs, inputs are rounded to 8 bits on the way.
    return QuantizedWeight(values, scales, offsets, bits=like.bits, weight_only=False)


def _dequantized(part: _Part, compute: Callable[[Any], Any], dtype: torch.dtype) -> Tensor:
    weight = torch.empty(part.shape, dtype=dtype)

    def decode(rows: slice, data: Tensor) -> None:
        weight[rows] = torch.from_numpy(compute(data.numpy())).view(-1, part.shape[1])

    part.decode(decode)
    return weight


def _computed_by_gguf(tensor: GGUFTensor) -> Callable[[Any], Any]:
    """The package's own arithmetic for a type that has no reader here."""
    what = f"{tensor.file}: {tensor.name} is of type {tensor.type_name}"
    here = ", ".join([*_FLOATS, *DECODERS])
    try:
        import gguf
    except ImportError as error:
        raise ModelError(
            f"{what}, which needs the package gguf: pip install gguf. Without it {here} are read."
        ) from error

    def compute(blocks: Any) -> Any:
        try:
            return gguf.dequantize(blocks, gguf.GGMLQuantizationType(tensor.type_id))
        except (NotImplementedError, ValueError) as error:  # ValueError: an older package, which does not know the type
            raise ModelError(f"{what}, which cannot be read. Take one with {here}.") from error

    return compute
