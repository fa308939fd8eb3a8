"""The block formats against the arithmetic of the package gguf: the same numbers, to the last bit."""

import numpy as np
import pytest
import torch
from tests.support.gguf_checkpoints import random_blocks

from quire.worker.checkpoints.gguf_blocks import DECODERS

gguf = pytest.importorskip("gguf")
# float16 scales, whose random bytes might be infinities
SCALES_AT = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "MXFP4": []}
SCALES_AT |= {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
SCALES_AT |= {"IQ4_NL": [0], "IQ4_XS": [0]}
COUNT = 300


def blocks_of(kind):
    rng = np.random.default_rng(len(kind))
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (COUNT, size), dtype=np.uint8)
    for place in SCALES_AT[kind]:
        blocks[:, place : place + 2] = rng.standard_normal(COUNT).astype(np.float16).view(np.uint8).reshape(COUNT, 2)
    if kind == "MXFP4":
        # 2 ** 127 times 6 is the largest that float32 holds
        blocks[:, 0] = rng.integers(1, 250, COUNT)
    return blocks


@pytest.mark.parametrize("kind", DECODERS)
def test_every_number_is_the_same(kind):
    blocks = blocks_of(kind)
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind]).reshape(COUNT, -1)
    _, codes, scales, offsets = DECODERS[kind](torch.from_numpy(blocks))
    found = codes.float().view(COUNT, scales.shape[1], -1) * scales[..., None]
    if offsets is not None:
        found = found + offsets[..., None]
    assert np.array_equal(found.flatten(1).numpy(), expected)


@pytest.mark.parametrize("kind", DECODERS)
def test_codes_fit_into_their_bits(kind):
    bits, codes, scales, _ = DECODERS[kind](torch.from_numpy(blocks_of(kind)))
    group = codes.shape[1] // scales.shape[1]
    if codes.dtype == torch.uint8:
        assert int(codes.max()) <= 15
        assert (bits, group) == (4, 32)
    else:
        assert codes.dtype == torch.int8
        assert bits == 4 or (int(codes.min()) >= -(2 ** (bits - 1)) and int(codes.max()) < 2 ** (bits - 1))
        assert group in (16, 32)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q5_1"])
def test_what_the_package_quantises_comes_back_near(kind):
    weight = np.random.default_rng(0).standard_normal((40, 64)).astype(np.float32)
    stored = gguf.quantize(weight, gguf.GGMLQuantizationType[kind])
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    _, codes, scales, offsets = DECODERS[kind](torch.from_numpy(stored.reshape(-1, size)))
    found = codes.float() * scales + (0 if offsets is None else offsets)
    bound = {"Q4_0": 0.12, "Q8_0": 0.01, "Q5_1": 0.06}[kind]
    assert np.abs(found.numpy().reshape(40, 64) - weight).max() < bound * np.abs(weight).max()


def test_random_blocks_are_of_a_usual_size():
    for kind in ("Q4_K", "Q6_K", "Q2_K"):
        numbers = gguf.dequantize(random_blocks(kind, 50), gguf.GGMLQuantizationType[kind])
        assert 0.2 < numbers.std() < 0.3
        assert abs(numbers.mean()) < 0.05
