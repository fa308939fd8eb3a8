"""A recorded forward pass computes what the model computes operator by operator, whatever is in the step."""

import pytest
import torch
from tests.support.sampled import sampled
from torch import nn

from quire.testing.model_harness import ModelHarness, worker_config
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker import kernels
from quire.worker.compilation import record_model
from quire.worker.forward_context import forward_context, profiling_context
from quire.worker.kernels import cpu
from quire.worker.kernels.cpu.program import Program
from quire.worker.layers.experts import forget_expert_tokens
from quire.worker.model_loader import load_model

pytestmark = pytest.mark.skipif(not cpu.load(), reason="programs are made of C++ kernels")
NAMES = (
    "llama llama_bias mistral qwen2_window qwen3_tied opt opt_post_norm gpt2 qwen3_moe qwen2_moe deepseek_v2 "
    "deepseek_v3_groups llama4 llama4_dense gpt_oss gemma4 lfm2 qwen3_next qwen3_5_text mamba2 granitemoehybrid "
    "granitemoehybrid_dense"
).split()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return lambda name: make_checkpoint(tmp_path_factory.mktemp(name), name)


@pytest.fixture
def two_threads():
    cpu.set_crew(2)
    yield
    cpu.set_crew(1)


def loaded(path, **changes):
    return load_model(worker_config(path, attention_backend="cpu", **changes))


def record(model, harness, max_tokens=96, max_logits=8):
    blocks = 128 // harness.block_size
    assert record_model(model, max_tokens, 8, blocks, max_logits), "this model must be recordable"


def plain_and_recorded(path, dtype):
    """The same model operator by operator and as a program, and 90 tokens."""
    harnesses = [ModelHarness(loaded(path, dtype=dtype)) for _ in range(2)]
    record(harnesses[1].model, harnesses[1])
    return harnesses, torch.randint(0, 256, (90,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize(("name", "dtype"), sampled(NAMES, ["float32", "bfloat16"], n=len(NAMES)))
def test_the_same_bits_as_operator_by_operator(name, dtype, checkpoint, two_threads):
    harnesses, ids = plain_and_recorded(checkpoint(name), dtype)
    steps = [
        {0: ids[:40], 1: ids[40:41]},
        {0: ids[40:41], 1: ids[41:80], 2: ids[80:]},
        {2: ids[:1]},
        {0: ids[:1], 1: ids[:1]},
    ]
    for step in steps:
        expected, found = (harness.step(step) for harness in harnesses)
        for sequence in step:
            assert torch.equal(found[sequence], expected[sequence])


@pytest.mark.parametrize(("name", "dtype"), sampled(NAMES, ["float32", "bfloat16"], n=len(NAMES)))
def test_tokens_that_nobody_reads_leave_the_others_as_they_are(name, dtype, checkpoint, two_threads):
    harnesses, ids = plain_and_recorded(checkpoint(name), dtype)
    steps = [
        ({0: ids[:30]}, []),
        ({0: ids[30:50], 1: ids[50:55], 2: ids[55:90]}, [3, 24, 57, 59]),
        ({2: ids[:9], 1: ids[9:10]}, [0, 9]),
        ({0: ids[:1], 1: ids[:1]}, [0, 1]),
    ]
    for step, wanted in steps:
        expected = torch.cat(list(harnesses[0].step(step).values()))
        found = torch.cat(list(harnesses[1].step(step, wanted=wanted).values()))
        assert torch.equal(found[wanted], expected[wanted])


def test_the_last_layer_computes_what_is_read(checkpoint):
    model = loaded(checkpoint("qwen3_moe"))
    harness = ModelHarness(model)
    record(model, harness)
    experts = [layer.mlp for layer in model.model.layers]
    forget_expert_tokens(model)
    harness.step({0: list(range(40)), 1: list(range(20))}, wanted=[39, 58, 59])
    num_rows = [int(layer.num_tokens_X.sum()) // layer.routing.top_k for layer in experts]
    assert num_rows == [60] * (len(experts) - 1) + [3]


def test_the_last_attention_leaves_out_tiles_that_nobody_reads():
    query, caches = torch.ones(400, 2, 32), [torch.ones(25, 2, 16, 32) for _ in range(2)]
    table, lengths, starts = (torch.tensor(x, dtype=torch.int32) for x in ([[*range(25)]], [400], [0, 400]))
    out, program = torch.zeros_like(query), Program()
    with program.recording(400):
        kernels.paged_attention(query, *caches, table, lengths, starts, out, scale=1.0)
        kernels.add(out.flatten(1), out.flatten(1))
    assert program.can_narrow
    program.run(400, 1, torch.tensor([3, 399]))
    assert out[[3, 399]].all()
    assert not out[200:240].any()
    program.run(400, 1)
    assert out.all()


def test_tokens_that_are_read_stand_in_order(checkpoint):
    model = loaded(checkpoint("llama"))
    harness = ModelHarness(model)
    record(model, harness)
    for wanted in ([3, 2], [1, 1], [4], [-1]):
        with pytest.raises(RuntimeError, match="some of the step, in ascending order"):
            harness.step({0: [5, 6, 7, 8]}, wanted=wanted)


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_a_measured_step_touches_no_cache(name, checkpoint):
    model = loaded(checkpoint(name))
    harness = ModelHarness(model)
    record(model, harness)
    before = harness.step({0: [5, 6, 7]})
    with torch.inference_mode(), forward_context(profiling_context()):
        assert model(torch.zeros(50, dtype=torch.int64), torch.arange(50)).shape[0] == 50
    again = ModelHarness(model)
    record(model, again)
    assert torch.equal(before[0], again.step({0: [5, 6, 7]})[0])


def test_more_tokens_than_were_recorded_run_operator_by_operator(checkpoint):
    model = loaded(checkpoint("llama"))
    harness = ModelHarness(model)
    record(model, harness, max_tokens=8)
    expected = ModelHarness(loaded(checkpoint("llama"))).run(0, list(range(40)))
    assert torch.equal(harness.step({0: list(range(40))})[0], expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_in_memory_that_is_kept(dtype, checkpoint, two_threads):
    plain, model = (loaded(checkpoint("llama_bias"), dtype=dtype) for _ in range(2))
    record(model, ModelHarness(model), max_logits=4)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    with torch.inference_mode():
        for rows in (1, 4, 2):
            found = model.compute_logits(hidden[:rows])
            assert torch.equal(found, plain.compute_logits(hidden[:rows]))
            assert found.data_ptr() == model.compute_logits(hidden[:1]).data_ptr()
        assert torch.equal(model.compute_logits(hidden), plain.compute_logits(hidden)), "more rows than were recorded"


def test_an_id_beyond_the_vocabulary_is_refused(checkpoint):
    model = loaded(checkpoint("llama"))
    harness = ModelHarness(model)
    record(model, harness)
    with pytest.raises(RuntimeError, match="100000"):
        harness.step({0: [100_000]})


def test_a_program_runs_no_more_tokens_than_it_was_recorded_with():
    program, x = Program(), torch.zeros(4, 32)
    with program.recording(4):
        out = kernels.add(x, x)
    program.run(4, 0)
    for num_tokens in (5, -1):
        with pytest.raises(RuntimeError, match=f"for 4 tokens cannot run {num_tokens}"):
            program.run(num_tokens, 0)
    assert len(out) == 4


def test_numbers_that_would_be_copied_are_not_recorded():
    """The copy would be of what they were while the program was recorded."""
    with Program().recording(4), pytest.raises(RuntimeError, match="must be contiguous int64"):
        kernels.look_up(torch.zeros(8, 32), torch.zeros(4, dtype=torch.int32))


def test_memory_of_another_type_is_not_recorded():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.zeros(8, 4, dtype=torch.bfloat16))

        def forward(self, input_ids, positions):
            return self.table.new_empty(8, 4, dtype=torch.float32)

    model = Odd()
    assert not record_model(model, 8, 2, 4, 2)
    assert model(torch.zeros(8), None).dtype == torch.float32


def test_a_model_with_other_operators_stays_as_it_is(caplog):
    class Odd(nn.Module):
        def forward(self, input_ids, positions):
            return torch.cumsum(input_ids.float(), 0)[:, None]

    model = Odd()
    assert not record_model(model, 8, 2, 4, 2)
    ids = torch.tensor([1, 2, 3])
    assert torch.equal(model(ids, ids), torch.tensor([[1.0], [3.0], [6.0]]))
