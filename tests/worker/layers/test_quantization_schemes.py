"""Schemes that quantise at load: error bounds, what is left alone, and that ranks and parts make no difference."""

import pytest
import torch
from tests.support.resident_peak import resident_peak

from quire.config.quantization import SCHEMES
from quire.errors import ModelError, OptionError
from quire.testing.model_harness import ModelHarness, worker_config
from quire.testing.tiny_checkpoints import make_checkpoint, shape_0_6b_config
from quire.worker import kernels
from quire.worker.kernels import cpu
from quire.worker.layers.quantization import QuantizedWeight, apply, by_rows, find_scheme
from quire.worker.layers.quantization.rounding import to_int4, to_int6, to_int8
from quire.worker.model_loader import load_model

# Root of the mean squared error, as a part of the weights' own. For normal weights, theory says 0.0075 and 0.082.
BOUNDS = {"int8": 0.009, "int4": 0.085}
# with a scale for 32 of them
BOUND_OF_6_BITS = 0.022


def weights(num_rows=256, num_columns=512, seed=0):
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def error(quantized, weight):
    return ((quantized.dequantize(torch.float32) - weight).square().mean() / weight.square().mean()).sqrt().item()


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_error_is_bounded(name, dtype):
    scheme, weight = find_scheme(name), weights().to(dtype)
    quantized = apply(scheme, weight, "linear", "w")
    assert isinstance(quantized, QuantizedWeight)
    assert quantized.weight_only is name.endswith("weight_only")
    assert quantized.bits == scheme.bits == int(name[3])
    assert error(quantized, weight.float()) < BOUNDS[name[:4]]


def test_rounding_is_to_the_nearest_step():
    weight = weights(8, 64)
    quantized = to_int8(weight, weight_only=True)
    assert quantized.num_groups == 1
    assert ((quantized.dequantize(torch.float32) - weight).abs() <= quantized.scales / 2 * 1.0001).all()
    assert (quantized.values.abs().amax(1) == 127).all()


def test_outliers_may_be_cut_off_for_the_many():
    """Every group is at least as good as with the plain rule, which never cuts off."""
    weight = weights(64, 256)
    weight[:, ::32] *= 3
    quantized = to_int4(weight, weight_only=True)
    groups = weight.view(-1, 32)
    low, high = groups.aminmax(dim=1, keepdim=True)
    scale = torch.where(high > -low, high, low) / -8
    plain = (groups / scale).round().clamp(-8, 7) * scale
    errors = (quantized.dequantize(torch.float32).view(-1, 32) - groups).square().sum(1)
    assert (errors <= (plain - groups).square().sum(1) * 1.0001 + 1e-12).all()


@pytest.mark.parametrize("name", SCHEMES)
def test_zeros_and_single_numbers_are_no_trouble(name):
    weight = torch.zeros(64, 128)
    weight[3, 5], weight[4, 7] = 1.0, -1e-12
    for role in ("linear", "head"):
        found = apply(find_scheme(name), weight, role, "w").dequantize(torch.float32)
        assert found.isfinite().all()
        assert torch.allclose(found, weight, atol=1e-6)


@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_not_finite_is_an_error(name):
    weight = weights(64, 128)
    weight[1, 2] = float("inf")
    for role in ("linear", "head"):
        with pytest.raises(ModelError, match=r"model\.w: .*infinities"):
            apply(find_scheme(name), weight, role, "model.w")


def test_what_is_small_or_looked_up_stays_as_it_is():
    scheme = find_scheme("int4")
    for weight, role in ((weights(16, 64), "linear"), (weights(64, 130), "linear"), (weights(), "embedding")):
        assert apply(scheme, weight, role, "w") is weight


def test_the_head_has_6_bits_and_odd_widths_stay_in_8():
    scheme = find_scheme("int4")
    head = apply(scheme, weights(), "head", "w")
    assert head.bits == scheme.head_bits == 6
    assert error(head, weights()) < BOUND_OF_6_BITS
    assert head.values.aminmax() == (-32, 31)
    for role in ("linear", "head"):
        assert apply(scheme, weights(128, 72), role, "w").bits == 8


def test_codes_of_the_checkpoint_stay_if_they_are_small_enough():
    stored = to_int4(weights(), weight_only=True)
    kept = apply(find_scheme("int8"), stored, "linear", "w")
    assert kept.values is stored.values
    assert not kept.weight_only
    wide = to_int8(weights(), weight_only=True)
    assert apply(find_scheme("int4"), wide, "linear", "w").bits == 4
    assert apply(find_scheme("int8"), wide, "head", "w").values is wide.values
    head = to_int6(weights(), weight_only=True)
    assert apply(find_scheme("int4"), head, "head", "w").values is head.values
    assert apply(find_scheme("int4"), wide, "head", "w").bits == 6
    assert apply(find_scheme("int4"), wide, "embedding", "w").values is wide.values


def test_rows_are_quantised_alike_whatever_stands_beside_them():
    weight = weights(600, 256)
    for make in (to_int8, to_int6, to_int4):
        whole, part = make(weight, weight_only=True), make(weight[100:117], weight_only=True)
        assert torch.equal(whole.narrow(0, 100, 17).values, part.values)
        assert torch.equal(whole.narrow(0, 100, 17).scales, part.scales)


def test_threads_share_the_rows_and_change_nothing():
    weight, before = weights(3000, 256), torch.get_num_threads()
    alone = to_int4(weight, weight_only=True)
    torch.set_num_threads(3)
    try:
        shared = to_int4(weight, weight_only=True)
        assert torch.get_num_threads() == 3
        with pytest.raises(ZeroDivisionError):
            by_rows(3000, 256, lambda rows: 1 // 0)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone.values, shared.values)
    assert torch.equal(alone.scales, shared.scales)


def test_an_unknown_scheme_is_named():
    with pytest.raises(OptionError, match="int5"):
        find_scheme("int5")


def test_another_package_may_bring_a_scheme(monkeypatch):
    from quire.worker.layers.quantization import scheme as schemes

    class Point:
        name = "halves"

        @staticmethod
        def load():
            return find_scheme("int8")

    monkeypatch.setattr(schemes, "entry_points", lambda group: [Point] if group == "quire.quantization" else [])
    assert find_scheme("halves") is find_scheme("int8")


# ---- in models ------------------------------------------------------------------------------------------------------

PROMPT = [7, 99, 3, 250, 18, 6, 77, 140]


def logits(path, **options):
    return ModelHarness(load_model(worker_config(path, **options))).run(0, PROMPT)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3_tied", "gpt2", "opt", "gemma"])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_quantised_model_is_near_the_float_one(name, architecture, tmp_path):
    """As near as the error of its weights lets expect, in models whose wide weights make much of it."""
    path = make_checkpoint(tmp_path, architecture)
    expected, found = logits(path), logits(path, quantization=name)
    error = ((found - expected).square().mean() / expected.square().mean()).sqrt()
    assert 0 < error < (0.08 if name.startswith("int8") else 0.6)


def test_a_tied_head_and_its_embedding_are_kept_once(tmp_path):
    model = load_model(worker_config(make_checkpoint(tmp_path, "qwen3_tied"), quantization="int8"))
    embedding, head = model.model.embed_tokens, model.lm_head
    assert embedding.packed is head.packed
    assert embedding.weight.numel() == head.weight.numel() == 0
    names = {name for name, parameter in model.named_parameters() if parameter.numel() > 1}
    assert not any("proj" in name or "embed" in name for name in names)


@pytest.mark.parametrize("name", ["int8", "int4_weight_only"])
def test_random_weights_are_quantised_as_stored_ones_are(name, tmp_path):
    path = shape_0_6b_config(tmp_path, num_hidden_layers=2, hidden_size=128, intermediate_size=96, vocab_size=300)
    plain = load_model(worker_config(path, load_format="dummy")).model.layers[1].mlp.gate_up_proj
    quantized = load_model(worker_config(path, load_format="dummy", quantization=name)).model.layers[1].mlp.gate_up_proj
    weight = plain.weight if plain.packed is None else kernels.unpack_weight(plain.packed)
    expected = apply(find_scheme(name), weight, "linear", "w").dequantize(torch.float32)
    torch.testing.assert_close(kernels.unpack_weight(quantized.packed), expected, atol=0, rtol=1e-3)


def test_the_peak_is_what_is_packed_and_one_layer(tmp_path):
    """A float model of 400 MB in 8 bits: at no moment are the floats there beside the codes."""
    if not cpu.load():
        pytest.skip("the reference widens codes while it packs them")
    load_model(worker_config(make_checkpoint(tmp_path / "small", "llama"), quantization="int8"))
    path = make_checkpoint(tmp_path / "large", "llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=6)
    size = (path / "model.safetensors").stat().st_size
    assert size > 350 * 2**20
    with resident_peak() as peak:
        model = load_model(worker_config(path, quantization="int8"))
    # a quarter of float32, a part of the file, and the largest layer: its codes twice
    assert peak.num_bytes < size / 4 + 160 * 2**20
    del model
