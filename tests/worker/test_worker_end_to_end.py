"""A real model in a real worker: greedy tokens are those of Transformers' generate, whatever the steps look like."""

import pytest
import torch
from tests.support.worker_driver import WorkerDriver

from quire.engine_core.kv_cache_manager.groups import make_groups
from quire.sampling_params import SamplingParams
from quire.testing.model_harness import worker_config
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker.worker import Worker

PROMPTS = {
    0: [5, 6, 7, 8, 9, 10, 11],
    3: [200, 3, 77],
    6: list(range(40, 75)),
}
NUM_NEW = 12
MODELS = ("llama", "qwen2_window")


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.fixture(scope="module")
def expected(checkpoint):
    """What Transformers generates, by row."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def generate(prompt):
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None
        )
        return output[0, len(prompt) :].tolist()

    return {row: generate(prompt) for row, prompt in PROMPTS.items()}


def started(checkpoint, *, num_blocks=200, num_host_blocks=100, **options):
    worker = Worker(worker_config(checkpoint, **options))
    worker.load()
    groups, _ = make_groups(worker.measure_capacity().layers)
    worker.initialize_cache([list(group.layer_names) for group in groups], num_blocks, num_host_blocks)
    return WorkerDriver(
        worker,
        block_size=4,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        num_groups=len(groups),
        seed=1,
    )


@pytest.fixture(params=["reference", "auto"])
def driver(request, checkpoint):
    return started(checkpoint, attention_backend=request.param)


def outputs(driver):
    return {row: tokens[len(PROMPTS[row]) :][:NUM_NEW] for row, tokens in driver.tokens.items() if row in PROMPTS}


def test_all_at_once(driver, expected):
    for row, prompt in PROMPTS.items():
        driver.admit(row, prompt)
    driver.generate(NUM_NEW)

    assert outputs(driver) == expected


def test_sequences_join_in_chunks_while_others_decode(driver, expected):
    driver.admit(3, PROMPTS[3])
    driver.generate(2)
    driver.admit(6, PROMPTS[6])
    for chunk in (1, 5, 13, 16):
        driver.step({6: chunk, 3: 1})
    driver.admit(0, PROMPTS[0])
    driver.step({3: 1, 0: 4})
    driver.step({0: 3, 6: 1})
    driver.generate(NUM_NEW - 1)

    assert outputs(driver) == expected


def test_preempted_sequences_recompute_in_other_blocks(driver, expected):
    for row, prompt in PROMPTS.items():
        driver.admit(row, prompt)
    driver.generate(5)
    driver.preempt(0)
    driver.preempt(6)
    driver.step({3: 1, 6: 9})
    driver.step({0: 12, 6: 31})
    driver.generate(NUM_NEW)

    assert outputs(driver) == expected


def test_swapped_sequences_go_on_in_other_blocks(driver, expected):
    """What leaves makes room for others in the same step, and what comes back is not computed again."""
    for row, prompt in PROMPTS.items():
        driver.admit(row, prompt)
    driver.generate(4)
    before = driver.worker.statistics()["num_tokens"]
    driver.swap_out(6)
    driver.step({0: 1, 3: 1})
    driver.swap_out(0)
    driver.admit(1, list(range(100, 140)))
    driver.generate(3)
    driver.swap_out(1)
    driver.swap_in(6)
    driver.generate(2)
    driver.release(1)
    driver.swap_in(0)
    driver.generate(NUM_NEW)

    assert outputs(driver) == expected
    assert driver.worker.statistics()["num_tokens"] - before == 2 + (40 + 2 + 3) + 2 * 2 + 3 * NUM_NEW


def test_a_swapped_sequence_forks(driver, checkpoint, expected):
    """Everything of one step: a child of a row that comes back takes a row, and copies the block that came back."""
    driver.admit(6, PROMPTS[6])
    driver.admit(1, [9, 9, 9])
    driver.generate(6)
    driver.swap_out(6)
    driver.step({1: 1})
    driver.swap_in(6)
    driver.step({})
    driver.fork(6, 1, 38, num_computed_tokens=38)
    driver.append(1, [7])
    driver.generate(NUM_NEW)

    full = PROMPTS[6] + expected[6]
    assert driver.tokens[6][: len(full)] == full
    alone = started(checkpoint)
    alone.admit(0, [*full[:38], 7])
    alone.generate(NUM_NEW)
    assert driver.tokens[1] == alone.tokens[0]


@pytest.mark.parametrize("num_total", [35, 36, 37, 41])
def test_a_child_shares_blocks_with_its_parent(driver, expected, num_total):
    """The parent goes on at the same time; both write behind the same prefix."""
    driver.admit(6, PROMPTS[6])
    driver.generate(6)
    driver.fork(6, 1, num_total)
    driver.fork(6, 2, 36)
    driver.append(2, [7])
    driver.step({6: 1, 1: 1, 2: 2})
    driver.generate(NUM_NEW)

    full = PROMPTS[6] + expected[6]
    assert driver.tokens[6][: len(full)] == full
    assert driver.tokens[1][: len(full)] == full
    assert driver.tokens[2][36] == 7


def test_prompt_logprobs_are_those_of_the_model(driver, checkpoint):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    prompt = PROMPTS[6]
    driver.admit(6, prompt, sampling=SamplingParams(temperature=0.0, prompt_logprobs=0, logprobs=0))
    entries = driver.step({6: 20}).prompt_logprobs[6]
    output = driver.step()
    entries += output.prompt_logprobs[6]
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)

    assert [entry.token_ids for entry in entries] == [[token] for token in prompt[1:]]
    found = torch.tensor([entry.logprobs[0] for entry in entries])
    torch.testing.assert_close(found, logprobs[range(len(prompt) - 1), prompt[1:]], atol=2e-4, rtol=0)
    assert output.logprobs[6][0].logprobs[0] == pytest.approx(float(logprobs[-1].max()), abs=2e-4)


@pytest.mark.nightly
def test_a_compiled_model_says_the_same(checkpoint, expected):
    driver = started(checkpoint, compile=True, attention_backend="auto")
    for row, prompt in PROMPTS.items():
        driver.admit(row, prompt)
    driver.generate(NUM_NEW)
    assert outputs(driver) == expected

    # a step of one token has code of its own
    driver.preempt(0)
    driver.step({0: 7})
    assert len(driver.step({0: 1}).rows) == 0
