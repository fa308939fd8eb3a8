"""Recurrent layers in a real worker: greedy tokens are those of Transformers, whatever the steps look like."""

import numpy as np
import pytest
import torch
from tests.support.worker_driver import WorkerDriver

from quire.engine_core.kv_cache_manager.groups import make_groups
from quire.errors import ModelError
from quire.testing.model_harness import worker_config
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker.capacity import StepCost, bytes_of_state_copies, capacity, measure_largest_step
from quire.worker.kernels import operators, reference, sequence_states
from quire.worker.kernels.sequence_states import put
from quire.worker.layers import CausalConv, GatedDeltaRule, StateSpaceScan, make_parameter
from quire.worker.live_tensors import LiveTensors
from quire.worker.model_loader import load_model
from quire.worker.platforms import MemoryReport
from quire.worker.speculative import NoProposer
from quire.worker.state_cache import recurrent_layers
from quire.worker.worker import Worker

PROMPTS = {
    0: [5, 6, 7, 8, 9, 10, 11],
    3: [200, 3, 77],
    6: list(range(40, 75)),
}
NUM_NEW = 12
MODELS = ("lfm2", "mamba2", "qwen3_next")


class Oracle(NoProposer):
    """Drafts what the row will say, with a wrong token at every `wrong_every`th position."""

    def __init__(self, answers, wrong_every):
        self.answers = answers
        self.wrong_every = wrong_every

    def open(self, context):
        self.table = context.table

    def propose(self, step):
        drafts = np.full((len(step.rows_n), int(step.counts_n.max(initial=0))), -1, dtype=np.int64)
        for n, (row, count) in enumerate(zip(step.rows_n.tolist(), step.counts_n.tolist(), strict=True)):
            start = int(self.table.num_total[row])
            for position in range(start, min(start + count, len(self.answers[row]))):
                is_wrong = position % self.wrong_every == 0
                drafts[n, position - start] = (self.answers[row][position] + is_wrong) % 320
        return drafts


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.fixture(scope="module")
def expected(checkpoint):
    """What Transformers generates, by row; without its cache, whose arithmetic is another."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def generate(prompt):
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(NUM_NEW):
                tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    return {row: generate(prompt) for row, prompt in PROMPTS.items()}


def started(checkpoint, proposer=None, **options):
    worker = Worker(worker_config(checkpoint, **{"attention_backend": "auto", **options}))
    worker.load()
    if proposer is not None:
        worker._proposer = proposer
    groups, _ = make_groups(worker.measure_capacity().layers, 4)
    worker.initialize_cache([list(group.layer_names) for group in groups], 400, 200)
    return WorkerDriver(
        worker,
        block_size=4,
        num_blocks=400,
        num_host_blocks=200,
        num_groups=len(groups),
        num_state_blocks=groups[-1].num_state_blocks,
        seed=1,
    )


@pytest.fixture
def driver(checkpoint):
    return started(checkpoint)


def outputs(driver):
    return {row: tokens[len(PROMPTS[row]) :][:NUM_NEW] for row, tokens in driver.tokens.items() if row in PROMPTS}


def test_all_at_once(driver, expected):
    for row, prompt in PROMPTS.items():
        driver.admit(row, prompt)
    driver.generate(NUM_NEW)
    assert outputs(driver) == expected


@pytest.mark.parametrize("options", [{"attention_backend": "reference"}, {"enforce_eager": True}])
def test_other_ways_of_running_the_model(checkpoint, expected, options):
    driver = started(checkpoint, **options)
    driver.admit(6, PROMPTS[6])
    driver.generate(NUM_NEW)
    assert outputs(driver) == {6: expected[6]}


def test_sequences_join_in_chunks_while_others_decode(driver, expected):
    driver.admit(3, PROMPTS[3])
    driver.generate(2)
    driver.admit(6, PROMPTS[6])
    for chunk in (1, 5, 13, 16):
        driver.step({6: chunk, 3: 1})
    driver.admit(0, PROMPTS[0])
    driver.generate(NUM_NEW)
    assert outputs(driver) == expected


def test_preempted_sequences_begin_with_no_state(driver, expected):
    for row, prompt in PROMPTS.items():
        driver.admit(row, prompt)
    driver.generate(4)
    driver.preempt(0)
    driver.preempt(6)
    driver.generate(NUM_NEW)
    assert outputs(driver) == expected


def test_states_are_swapped_as_blocks_are(driver, expected):
    for row, prompt in PROMPTS.items():
        driver.admit(row, prompt)
    driver.generate(3)
    driver.swap_out(6)
    driver.generate(2)
    driver.swap_in(6)
    driver.generate(NUM_NEW)
    assert outputs(driver) == expected


def test_a_fork_one_token_back_reads_the_last_token_again(driver, expected):
    for row, prompt in PROMPTS.items():
        driver.admit(row, prompt)
    driver.generate(4)
    children = {1: 0, 4: 3, 5: 6}
    for child, parent in children.items():
        # the parent has computed all but its last token; the child computes the one before once more
        driver.fork(parent, child, len(driver.tokens[parent]) - 1)
    driver.generate(NUM_NEW)
    assert outputs(driver) == expected
    for child, parent in children.items():
        assert driver.tokens[child][: len(PROMPTS[parent]) + NUM_NEW] == [*PROMPTS[parent], *expected[parent]]


@pytest.mark.parametrize("wrong_every", [1, 3, 1000])
def test_drafts_leave_no_trace_in_a_state(checkpoint, expected, wrong_every):
    answers = {row: [*prompt, *expected[row]] for row, prompt in PROMPTS.items()}
    driver = started(checkpoint, Oracle(answers, wrong_every))
    for row, prompt in PROMPTS.items():
        driver.admit(row, prompt)
    num_steps = 0
    while any(len(driver.tokens[row]) < len(answers[row]) for row in PROMPTS):
        driver.step(num_drafts=3)
        num_steps += 1
        assert num_steps <= NUM_NEW, "a step brings at least one token"
    assert outputs(driver) == expected
    assert (num_steps < NUM_NEW) == (wrong_every > 1)


def test_a_failed_step_absorbs_nothing_twice(driver, expected, monkeypatch):
    """It is ended when all has been computed; its rows are computed again one by one."""
    driver.admit(6, PROMPTS[6])
    driver.admit(3, PROMPTS[3])
    driver.step({6: 9, 3: 1})
    computation = driver.worker._runner.isolation.computation
    compute = computation.compute
    failed = []

    def fail_together(rows, *arguments):
        computed = compute(rows, *arguments)
        if len(rows) > 1:
            failed.append(len(rows))
            raise RuntimeError("together they cannot be computed")
        return computed

    monkeypatch.setattr(computation, "compute", fail_together)
    driver.step({6: 9, 3: 1})
    driver.generate(NUM_NEW)
    assert failed
    assert outputs(driver) == {3: expected[3], 6: expected[6]}


def test_a_step_that_ends_between_two_chunks_of_a_state_absorbs_nothing_twice(checkpoint, expected, monkeypatch):
    """Where a recurrence is written in Python: C++ changes all chunks in one call."""
    for kind, name in ((CausalConv, "causal_conv"), (GatedDeltaRule, "gated_delta_rule"), (StateSpaceScan, "ssd_scan")):
        monkeypatch.setattr(kind, "is_kernel", False)
        monkeypatch.setattr(operators, name, getattr(reference, name))
    driver = started(checkpoint)
    driver.admit(6, PROMPTS[6])
    driver.admit(3, PROMPTS[3])
    driver.step({6: 9, 3: 1})
    # together with the others' last one, so that a state of one token is torn as well
    for count in (9, 1):
        failed = []

        def put_one_chunk(place, blocks, rows, failed=failed):
            if failed == [2]:
                failed.append(len(blocks))
                raise RuntimeError("together they cannot be kept")
            put(place, blocks, rows)
            if len(blocks) > 1 and not failed:
                failed.append(len(blocks))

        monkeypatch.setattr(sequence_states, "put", put_one_chunk)
        driver.step({6: count, 3: 1})
        assert failed == [2, 2]
        monkeypatch.setattr(sequence_states, "put", put)
    driver.generate(NUM_NEW)
    assert outputs(driver) == {3: expected[3], 6: expected[6]}


def test_a_state_that_stands_elsewhere_fails_its_row_alone(driver, expected):
    driver.admit(0, PROMPTS[0])
    driver.admit(6, PROMPTS[6])
    driver.generate(3)
    # as if the core had lost two tokens of row 6
    driver._changes["progress"].append((6, driver.computed[6] - 2))
    driver.computed[6] -= 2
    output = driver.step()
    assert list(output.failures) == [6]
    assert "computing it failed" in output.failures[6]
    driver.release(6)
    driver.generate(NUM_NEW)
    assert outputs(driver)[0] == expected[0]


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_a_wrong_shape_ends_the_start(name, tmp_path):
    """Memory is measured without states, so that the layer runs for the first time when the cache is there."""
    path = make_checkpoint(tmp_path, name)

    def load_wrong(config):
        model = load_model(config)
        conv = next(module for module in model.modules() if isinstance(module, CausalConv))
        conv.weight = make_parameter(conv.weight.shape[0], conv.weight.shape[1] + 1, dtype=torch.float32)
        return model

    worker = Worker(worker_config(path, attention_backend="auto"), model_loader=load_wrong)
    worker.load()
    groups, _ = make_groups(worker.measure_capacity().layers, 4)
    with pytest.raises(ModelError, match=r"failed when the model was tried.*has another shape"):
        worker.initialize_cache([list(group.layer_names) for group in groups], 400)


def test_a_trial_at_start_leaves_no_trace(driver, expected):
    """Row 0 is the one that was tried."""
    assert not driver.worker._runner.table.is_used.any()
    assert driver.worker.statistics()["num_steps"] == 0
    driver.admit(0, PROMPTS[0])
    driver.generate(NUM_NEW)
    assert outputs(driver)[0] == expected[0]


def test_what_steps_copy_of_states_is_no_room_for_the_cache(tmp_path):
    """Four sequences absorb several tokens each in one step: the most that a step ever holds of them."""
    path = make_checkpoint(tmp_path, "qwen3_next", linear_key_head_dim=64, linear_value_head_dim=64)
    driver = started(path, max_num_seqs=4, max_num_batched_tokens=8)
    worker = driver.worker
    states = [layer.spec for layer in recurrent_layers(worker._model).values()]
    promised = bytes_of_state_copies(states, worker._config)
    for row in range(4):
        driver.admit(row, PROMPTS[6])
    driver.step(dict.fromkeys(range(4), 2))
    with LiveTensors() as with_states:
        driver.step(dict.fromkeys(range(4), 2))
    of_all = sum(layer.state_bytes for layer in states)
    # none of them is small beside the rest of a step
    assert 4 * of_all > 400_000
    least = 4 * of_all
    assert least <= promised <= 2 * least
    measured = measure_largest_step(worker._model, worker._platform, worker._config)
    assert with_states.peak_bytes <= promised + measured.num_bytes


def test_a_capacity_sets_copies_of_states_aside_but_never_more_than_half(tmp_path):
    path = make_checkpoint(tmp_path, "lfm2")
    memory = MemoryReport(total_bytes=1 << 30, free_bytes=1 << 29, limit="of a test")
    model = load_model(worker_config(path))
    left = {
        num_bytes: capacity(model, memory, StepCost(0, "none", state_bytes=num_bytes), 1.0)
        for num_bytes in (0, 1 << 20, 1 << 40)
    }
    assert left[0].available_bytes == 1 << 29
    assert left[1 << 20].available_bytes == (1 << 29) - (1 << 20)
    assert left[1 << 40].available_bytes == 1 << 28
    assert "Copies of states in a step: 0.25 GiB" in left[1 << 40].explanation
