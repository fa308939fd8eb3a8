"""Packed weights: the C++ twin and the reference against dense arithmetic; bits that depend on nothing but the row."""

import pytest
import torch
from tests.support.sampled import sampled

from quire.testing import linear_contracts as contracts
from quire.testing.linear_contracts import DTYPES, QuantizedCase
from quire.worker import kernels
from quire.worker.kernels import cpu, reference
from quire.worker.kernels.cpu.build import HERE
from quire.worker.kernels.cpu.program import Program


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", contracts.SHAPES, ids=str)
def test_float_weights(product_kernels, shape, dtype):
    contracts.check_float_weight(product_kernels, shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", contracts.SHAPES, ids=str)
def test_float_weights_in_the_reference(shape, dtype):
    contracts.check_float_weight(reference, shape, dtype)


@pytest.mark.parametrize("case", contracts.QUANTIZED_CASES, ids=str)
def test_quantized_weights(product_kernels, case):
    contracts.check_quantized_weight(product_kernels, case)


@pytest.mark.parametrize("case", contracts.QUANTIZED_CASES, ids=str)
def test_quantized_weights_in_the_reference(case):
    contracts.check_quantized_weight(reference, case)


SHAPE = (200, 1164)  # more than a panel for each thread; no whole number of segments
WEIGHTS = {
    **{str(dtype): dtype for dtype in DTYPES},
    "int8": QuantizedCase(8, SHAPE),
    "int8 groups": QuantizedCase(8, SHAPE, 3, "each"),
    "int4": QuantizedCase(4, SHAPE, 97, "each", False),
    "int8 weight-only": QuantizedCase(8, SHAPE, is_weight_only=True),
    "int4 weight-only": QuantizedCase(4, SHAPE, 97, "fractions", False, is_weight_only=True),
    "int6": QuantizedCase(6, SHAPE, 97),
    "int6 weight-only": QuantizedCase(6, SHAPE, 3, "fractions", is_weight_only=True),
    "fp4": QuantizedCase(4, SHAPE, 97),
    "fp4 weight-only": QuantizedCase(4, SHAPE, 97, is_weight_only=True),
}


def packed_weight(kind, twin=kernels):
    if isinstance(kind, torch.dtype):
        return twin.pack_weight(torch.randn(SHAPE, generator=torch.Generator().manual_seed(2)).to(kind))
    values, scales, offsets = kind.make()
    return twin.pack_quantized(values, scales, offsets, bits=kind.bits, weight_only=kind.is_weight_only)


@pytest.fixture
def threads():
    """Sets the number of threads, and puts it back."""
    yield cpu.set_crew
    cpu.set_crew(torch.get_num_threads())


@pytest.mark.parametrize(("name", "dtype"), sampled(WEIGHTS, DTYPES, n=len(WEIGHTS)), ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others_on_any_number_of_threads(product_kernels, threads, name, dtype):
    packed = packed_weight(WEIGHTS[name])
    x = contracts.inputs(300, SHAPE[1], dtype)
    results = []
    for count in (1, 2, 3):
        threads(count)
        contracts.check_invariance(product_kernels, packed, SHAPE, dtype)
        results.append(product_kernels.packed_linear(x, packed, None, SHAPE[0]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


# Groups of 48 words: segments of 32 and of 16.
SHORT_SEGMENTS = QuantizedCase(8, (70, 1152), 6, "fractions")


@pytest.mark.parametrize(
    "kind", [WEIGHTS["int8"], WEIGHTS["int8 groups"], WEIGHTS["int4"], WEIGHTS["int6"], SHORT_SEGMENTS], ids=str
)
def test_integers_are_the_same_on_every_instruction_set(kind):
    if not cpu.load():
        pytest.skip("no C++ kernels here")
    before = cpu.statistics()["isa"]
    packed, x = packed_weight(kind), contracts.inputs(30, kind.shape[1], torch.float32)
    results = []
    for isa in HERE.isas:
        if cpu.select_isa(isa):
            results.append(kernels.packed_linear(x, packed))
    cpu.select_isa(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("is_weight_only", [False, True])
@pytest.mark.parametrize("zeros", ["none", "each"])
def test_six_bits_give_the_same_results_as_eight(product_kernels, zeros, is_weight_only):
    values, scales, offsets = QuantizedCase(6, SHAPE, 97, zeros).make()
    x = contracts.inputs(30, SHAPE[1], torch.float32)
    narrow, wide = (
        product_kernels.pack_quantized(values, scales, offsets, bits=bits, weight_only=is_weight_only)
        for bits in (6, 8)
    )
    assert torch.equal(product_kernels.unpack_weight(narrow), product_kernels.unpack_weight(wide))
    for count in (1, 3, 30):
        results = (product_kernels.packed_linear(x[:count], packed, None, SHAPE[0]) for packed in (narrow, wide))
        assert torch.equal(*results)


@pytest.mark.parametrize("kind", [torch.bfloat16, WEIGHTS["int8"], WEIGHTS["int6"], SHORT_SEGMENTS], ids=str)
def test_a_row_has_the_same_bits_among_any_number_of_others(product_kernels, kind):
    packed = packed_weight(kind)
    num_rows, num_columns = SHAPE if isinstance(kind, torch.dtype) else kind.shape
    x = contracts.inputs(70, num_columns, torch.bfloat16)
    whole = product_kernels.packed_linear(x, packed, None, num_rows)
    for count in range(1, 70):
        assert torch.equal(product_kernels.packed_linear(x[70 - count :], packed, None, num_rows), whole[70 - count :])


def test_rows_are_long(product_kernels):
    """So long that a panel is cut: all rows meet its first part before the second comes."""
    weight = torch.randn(40, 9001, generator=torch.Generator().manual_seed(1)).bfloat16()
    packed, x = product_kernels.pack_weight(weight), contracts.inputs(70, 9001, torch.bfloat16)
    whole = product_kernels.packed_linear(x, packed, None, 40)
    contracts.check_close(whole, x, weight, None)
    for count in (1, 17, 33):
        assert torch.equal(product_kernels.packed_linear(x[:count], packed, None, 40), whole[:count])


def test_rows_may_lie_anywhere(product_kernels):
    weight, wide = torch.randn(40, 64), torch.randn(6, 5, 200)
    packed = product_kernels.pack_weight(weight)
    for x in (
        wide[..., 17:81],
        wide[:, 2, 17:81],
        wide[::2, :, :64],
        wide[0, 0, :64],
        wide.transpose(0, 2)[:64].transpose(0, 2),
        wide.transpose(0, 1)[..., :64],
        wide[:, :0, :64],
        wide[:1, :, :64].expand(3, -1, -1),
    ):
        y = product_kernels.packed_linear(x, packed)
        assert y.shape == (*x.shape[:-1], 40)
        torch.testing.assert_close(y, x @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("num_rows", "num_columns"), [(4, 0), (0, 8), (0, 0)])
def test_a_weight_may_be_empty(product_kernels, num_rows, num_columns):
    packed, bias = product_kernels.pack_weight(torch.empty(num_rows, num_columns)), torch.arange(float(num_rows))
    assert product_kernels.unpack_weight(packed).shape == (num_rows, num_columns)
    y = product_kernels.packed_linear(torch.empty(3, num_columns), packed, bias)
    assert torch.equal(y, bias.expand(3, -1))


def test_a_weight_of_any_strides_can_be_packed(product_kernels):
    wide = torch.randn(90, 200)
    for weight in (wide[3:80, 11:111], wide[::2, :64]):
        assert torch.equal(product_kernels.unpack_weight(product_kernels.pack_weight(weight)), weight)
    assert torch.equal(product_kernels.unpack_weight(product_kernels.pack_weight(wide.T)), wide.T)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_are_checked(product_kernels, dtype):
    packed = product_kernels.pack_weight(torch.randn(40, 8))
    product_kernels.packed_rows(packed, torch.tensor([0, 39], dtype=dtype), torch.float32)
    for wrong in (-1, 40):
        with pytest.raises(RuntimeError, match="beyond the 40 rows"):
            product_kernels.packed_rows(packed, torch.tensor([0, wrong], dtype=dtype), torch.float32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_that_are_elsewhere_are_zeros(product_kernels, dtype):
    table = torch.randn(40, 8)
    packed, ids = product_kernels.pack_weight(table), torch.tensor([99, 100, 139, 140, 0], dtype=dtype)
    expected = torch.stack([torch.zeros(8), table[0], table[39], torch.zeros(8), torch.zeros(8)])
    assert torch.equal(product_kernels.packed_rows(packed, ids, torch.float32, 8, 100), expected)
    assert torch.equal(product_kernels.look_up(table, ids, 100), expected)


def test_what_is_no_packed_weight_is_refused(product_kernels):
    packed, x = product_kernels.pack_weight(torch.randn(40, 8)), torch.ones(1, 8)
    damaged = packed.clone()
    damaged[0] = 0
    endless = packed.clone()
    endless[24:40].view(torch.int64)[:] = 1 << 61  # rows and columns, whose product overflows to 0
    for wrong, reason in (
        (damaged, "not a packed weight"),
        (endless, "damaged"),
        (packed[:-1], "not as long"),
        (packed[:10], "vector of bytes"),
        (reference.pack_weight(torch.randn(40, 8)), "plain PyTorch"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            torch.ops.quire.packed_linear(x, wrong, None, 40)
    with pytest.raises(RuntimeError, match="9 columns, the weight 8"):
        product_kernels.packed_linear(torch.ones(1, 9), packed)
    with pytest.raises(RuntimeError, match="40 rows, not 41"):
        product_kernels.packed_linear(x, packed, None, 41)
    with pytest.raises(RuntimeError, match="bias"):
        product_kernels.packed_linear(x, packed, torch.ones(39))
    with pytest.raises(ValueError, match="not loaded in this process"):
        reference.unpack_weight(packed)


@pytest.mark.parametrize("rows", [1, 5, 100])
def test_a_weight_without_inputs(product_kernels, rows):
    packed, bias = product_kernels.pack_weight(torch.empty(40, 0)), torch.arange(40.0)
    assert torch.equal(product_kernels.packed_linear(torch.empty(rows, 0), packed, bias), bias.expand(rows, 40))


def test_what_cannot_be_quantized_is_refused(product_kernels):
    values, scales = torch.zeros(4, 24, dtype=torch.int8), torch.ones(4, 1)
    for arguments, reason in (
        ((values, torch.ones(4, 12), None, 8), "multiple of 4"),
        ((values, torch.ones(4, 5), None, 8), "multiple of 4"),
        ((values + 5, scales, None, 4), "0, 1, 2, 3"),
        ((values, scales, None, 5), "4, 6 or 8"),
        ((values + 32, scales, None, 6), "-32 to 31"),
        ((values.to(torch.uint8) + 64, scales, None, 6), "0 to 63"),
        ((values.float(), scales, None, 8), "int8 or uint8"),
        ((values[:, :0].contiguous(), scales, None, 8), "at least one input"),
        ((values, scales.double(), None, 8), "scales must be"),
        ((values, scales * 0, torch.ones(4, 1), 8), "too large for its scale"),
    ):
        *tensors, bits = arguments
        with pytest.raises(RuntimeError, match=reason):
            product_kernels.pack_quantized(*tensors, bits=bits, weight_only=False)


@pytest.mark.parametrize("kind", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_what_is_not_a_number_stays_in_its_row(product_kernels, kind):
    packed, x = packed_weight(kind), contracts.inputs(20, SHAPE[1], torch.float32)
    clean = product_kernels.packed_linear(x, packed)
    x[4, 700], x[9, 3] = float("nan"), float("inf")
    y = product_kernels.packed_linear(x, packed)
    assert not y[[4, 9]].isfinite().any()
    others = [row for row in range(20) if row not in (4, 9)]
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("kind", [torch.bfloat16, WEIGHTS["int8"], WEIGHTS["int4 weight-only"]], ids=str)
def test_a_recorded_program_multiplies_any_number_of_rows(product_kernels, kind):
    packed = packed_weight(kind)
    x, ids = contracts.inputs(30, SHAPE[1], torch.bfloat16), torch.arange(30) % SHAPE[0]
    expected, rows = product_kernels.packed_linear(x, packed), product_kernels.packed_rows(packed, ids, torch.bfloat16)
    program = Program()
    with program.recording(30):
        y, e = product_kernels.packed_linear(x, packed), product_kernels.packed_rows(packed, ids, torch.bfloat16)
        z = product_kernels.packed_linear(x, packed, None, SHAPE[0])
    for count in (1, 7, 30):
        for result in (y, z, e):
            result.zero_()
        program.run(count, 1)
        assert torch.equal(y[:count], expected[:count])
        assert torch.equal(z[:count], expected[:count])
        assert torch.equal(e[:count], rows[:count])
        assert not y[count:].any()


def test_compiled_code_sees_shapes_without_bytes():
    packed = kernels.pack_weight(torch.randn(40, 8))

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def forward(ids, x):
        return kernels.packed_rows(packed, ids, torch.float32, 8) + x, kernels.packed_linear(x, packed, None, 40)

    for count in (5, 3):
        ids, x = torch.arange(count), torch.randn(count, 8)
        rows, y = forward(ids, x)
        assert torch.equal(rows, kernels.packed_rows(packed, ids, torch.float32) + x)
        assert torch.equal(y, kernels.packed_linear(x, packed))
