"""The kernels on the cache: the reference against dense attention, the C++ twin against the reference."""

from dataclasses import replace

import pytest
import torch
from tests.support.sampled import sampled

from quire.testing import kernel_contracts as contracts
from quire.testing.attention_cases import ATTENTION_CASES, CACHE_DTYPES, CODES, DTYPES, LONG, MIXED, AttentionCase
from quire.worker.kernels import cpu, reference

DENSE_CASES = [case for case in ATTENTION_CASES if not case.soft_cap and not case.has_sinks]
INVARIANT_CASES = [
    *(AttentionCase(dtype=dtype) for dtype in DTYPES),
    *(AttentionCase(dtype=torch.bfloat16, cache_dtype=codes, head_dim=128) for codes in CODES),
    AttentionCase(dtype=torch.float32, cache_dtype=torch.bfloat16, num_heads=16, num_kv_heads=1),
    AttentionCase(sequences=((100, 640), (1, 1030)), num_heads=8, num_kv_heads=2, dtype=torch.bfloat16),
    AttentionCase(sequences=((60, 560), (9, 70)), sliding_window=70, head_dim=80, has_sinks=True, soft_cap=10.0),
    AttentionCase(sequences=((60, 560), (9, 70), (1, 600)), sliding_window=100, is_chunked=True, num_heads=16),
    AttentionCase(sequences=((100, 640), (60, 70), (1, 600)), together=(560, 620), sliding_window=90, head_dim=80),
    AttentionCase(sequences=((600, 640), (60, 70), (1, 1)), together=(50, 580), dtype=torch.bfloat16),
    AttentionCase(sequences=((60, 560), (9, 70), (1, 600)), begin=55, num_distances=100, dtype=torch.bfloat16),
    *(
        AttentionCase(
            num_heads=heads,
            num_kv_heads=1,
            head_dim=176,
            value_dim=144,
            dtype=dtype,
            cache_dtype=kept,
            values_in_keys=True,
        )
        for heads in (2, 16, 128)
        for dtype, kept in ((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.int8))
    ),
]


@pytest.mark.parametrize("case", DENSE_CASES, ids=str)
def test_reference_is_dense_attention(case):
    contracts.check_reference_attention(case)


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_cpu_is_the_reference(cpu_kernels, case):
    contracts.check_paged_attention(cpu_kernels, case)


@pytest.mark.parametrize("case", INVARIANT_CASES, ids=str)
def test_cpu_is_invariant(cpu_kernels, case):
    contracts.check_invariance(cpu_kernels, case)


# what a rank that keeps every second or fourth key may see in another way than one that keeps all
RANK_CASES = [
    *(AttentionCase(dtype=dtype, cache_dtype=kept) for dtype, kept in ((torch.float32, None), (torch.bfloat16, None))),
    *(AttentionCase(cache_dtype=codes, head_dim=32, dtype=torch.bfloat16) for codes in CODES),
    AttentionCase(sequences=((100, 640), (1, 1030), (2, 2), (1, 1)), num_heads=8, block_size=4),
    AttentionCase(sequences=((60, 560), (9, 70), (1, 3)), sliding_window=3, has_sinks=True, soft_cap=10.0),
    AttentionCase(sequences=((60, 560), (9, 70), (1, 600)), sliding_window=70, head_dim=80, has_sinks=True),
    AttentionCase(sequences=((60, 560), (9, 70), (1, 601), (1, 600)), sliding_window=100, is_chunked=True),
    AttentionCase(sequences=((100, 640), (60, 70), (1, 600)), together=(560, 620), sliding_window=90, head_dim=80),
    AttentionCase(sequences=((1, 1),) * 3),
    AttentionCase(sequences=((60, 560), (9, 70), (1, 600)), begin=55, num_distances=100),
    AttentionCase(num_heads=16, num_kv_heads=1, head_dim=176, value_dim=144, values_in_keys=True),
]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", RANK_CASES, ids=str)
def test_parts_of_ranks_are_the_whole(cpu_kernels, case, size):
    contracts.check_attention_of_ranks(cpu_kernels, case, size)
    contracts.check_attention_of_ranks(reference, case, size)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("num_shared", [128, 256, 1024])
def test_ranks_see_what_sequences_share(cpu_kernels, num_shared, size):
    """All keys that a rank has of a sequence may be shared, but for one."""
    lengths = [num_shared + more for more in range(5)]
    case = AttentionCase(sequences=tuple((1, length) for length in [1100, *lengths]), head_dim=16, block_size=4)
    contracts.check_attention_of_ranks(cpu_kernels, case, size, num_shared)


@pytest.fixture
def crew_of():
    """Sets the number of threads, and puts it back."""
    yield cpu.set_crew
    cpu.set_crew(torch.get_num_threads())


SHARING = ((1, 1100), (1, 1101), (3, 1200), (0, 1100), (1, 1099), (1, 1098))


@pytest.mark.parametrize(
    ("num_shared", "kind"),
    sampled([64, 128, 512, 700, 1090], [torch.float32, torch.bfloat16, torch.int8], n=6),
    ids=str,
)
def test_shared_blocks_do_not_show(cpu_kernels, crew_of, num_shared, kind):
    case = AttentionCase(sequences=SHARING, head_dim=32, dtype=torch.bfloat16, cache_dtype=kind, block_size=4)
    contracts.check_sharing(cpu_kernels, case, num_shared)
    crew_of(3)
    contracts.check_sharing(cpu_kernels, case, num_shared)


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(sequences=((1, 700),) * 40, num_heads=6, has_sinks=True, soft_cap=20.0, head_dim=16),
        AttentionCase(sequences=((1, 700),) * 3, sliding_window=300, head_dim=16),
        AttentionCase(sequences=((1, 577), (1, 640), (1, 577), (30, 700)), num_heads=32, num_kv_heads=1, head_dim=16),
        AttentionCase(sequences=((1, 577), (1, 640), (1, 577), (30, 700)), num_heads=16, num_kv_heads=2, head_dim=16),
        AttentionCase(
            sequences=((1, 577), (1, 640), (1, 577)), num_heads=16, num_kv_heads=1, value_dim=48, values_in_keys=True
        ),
    ],
    ids=str,
)
def test_many_that_share_blocks(cpu_kernels, case):
    """More rows than one tile; a window; many heads; a prompt among single tokens."""
    contracts.check_sharing(cpu_kernels, case, 576)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("sequences", [((1, 3000), (2, 40)), ((60, 1500), (1, 40))])
def test_cpu_does_not_depend_on_threads(cpu_kernels, crew_of, cache_dtype, sequences):
    # Long enough that several threads share one sequence.
    batch = contracts.make_batch(
        AttentionCase(sequences=sequences, dtype=torch.bfloat16, cache_dtype=cache_dtype, head_dim=128)
    )
    outputs = []
    for count in (1, 2, 5):
        crew_of(count)
        outputs.append(batch.attend(cpu_kernels))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_of_either_width(cpu_kernels, dtype):
    batch = contracts.make_batch(AttentionCase())
    expected = batch.attend(cpu_kernels)
    for name in ("block_tables_SM", "seq_lens_S", "query_starts_S1"):
        setattr(batch, name, getattr(batch, name).to(dtype))
    assert torch.equal(batch.attend(cpu_kernels), expected)
    contracts.check_write_kv(cpu_kernels, AttentionCase(), slot_dtype=dtype)


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(),
        AttentionCase(value_dim=24, block_size=1, dtype=torch.bfloat16),
        *(AttentionCase(dtype=dtype, cache_dtype=cache_dtype, value_dim=20) for dtype, cache_dtype in MIXED),
        *(AttentionCase(cache_dtype=codes, head_dim=100, block_size=1) for codes in CODES),
        *(
            AttentionCase(num_kv_heads=1, value_dim=48, cache_dtype=kept, values_in_keys=True)
            for kept in (None, torch.bfloat16, *CODES)
        ),
    ],
    ids=str,
)
def test_write_kv(cpu_kernels, case):
    contracts.check_write_kv(cpu_kernels, case)
    contracts.check_write_kv(reference, case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_blocks(cpu_kernels, dtype):
    contracts.check_copy_blocks(cpu_kernels, dtype)
    contracts.check_copy_blocks(reference, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_move_blocks(cpu_kernels, crew_of, dtype, num_threads):
    crew_of(num_threads)
    contracts.check_move_blocks(cpu_kernels, dtype)
    contracts.check_move_blocks(reference, dtype)


@pytest.mark.parametrize(
    ("name", "place", "value", "words"),
    [
        ("block_tables_SM", (1, 0), 2**30, "sequence 1: block 1073741824"),
        ("seq_lens_S", 0, 10**6, "sequence 0: length 1000000"),
        ("query_starts_S1", -1, 10**6, "sequence 4: row 999999"),
        ("query_starts_S1", 0, -3, "sequence 0: row -3"),
    ],
)
def test_what_lies_outside_of_the_tensors_is_refused(cpu_kernels, name, place, value, words):
    batch = contracts.make_batch(AttentionCase())
    getattr(batch, name)[place] = value
    with pytest.raises(RuntimeError, match=words):
        batch.attend(cpu_kernels)


def test_the_suite_can_fail():
    """A kernel that is wrong by one key must not pass."""

    class OneKeyTooFew:
        @staticmethod
        def paged_attention(query, k_cache, v_cache, tables, seq_lens, starts, out, **options):
            window = options.pop("sliding_window") or 10_000
            arguments = (query, k_cache, v_cache, tables, seq_lens, starts, out)
            reference.paged_attention(*arguments, sliding_window=min(window, 36), **options)

    with pytest.raises(AssertionError):
        contracts.check_paged_attention(OneKeyTooFew(), replace(AttentionCase(), sequences=((1, 37),)))


def test_rows_that_see_nothing_are_zero(cpu_kernels):
    batch = contracts.make_batch(AttentionCase(sequences=((3, 5), (1, 4))))
    batch.seq_lens_S[0] = 2  # the first of three rows has the position -1
    for kernels in (cpu_kernels, reference):
        out = batch.attend(kernels)
        assert (out[0] == 0).all()
        assert out.isfinite().all()


@pytest.mark.parametrize("num_padding", [1, 2])
def test_rows_that_pad_the_step_are_ignored(cpu_kernels, num_padding):
    # With two of them there are as many rows as sequences, which is the other way through the reference.
    batch = contracts.make_batch(AttentionCase(sequences=((0, 5), (1, 20), (0, 3)), block_size=4))
    expected = batch.attend(reference)
    batch.query_THD = torch.cat((batch.query_THD, batch.query_THD.new_zeros(num_padding, *batch.query_THD.shape[1:])))
    for kernels in (cpu_kernels, reference):
        contracts.assert_close(batch.attend(kernels)[:1], expected)


def test_nan_is_not_hidden(cpu_kernels):
    batch = contracts.make_batch(AttentionCase(sequences=((1, 5), (1, 4))))
    batch.query_THD[0] = float("nan")
    out = batch.attend(cpu_kernels)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_a_long_prompt(cpu_kernels):
    contracts.check_paged_attention(
        cpu_kernels,
        AttentionCase(sequences=((0, 3), (4096, 4096), (1, 4096)), num_heads=2, num_kv_heads=1, head_dim=32),
    )


def test_long_context_of_many_rows(cpu_kernels):
    contracts.check_paged_attention(
        cpu_kernels, AttentionCase(sequences=LONG, num_heads=16, num_kv_heads=8, head_dim=128)
    )
