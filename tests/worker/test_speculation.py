"""Drafts change how many steps a sequence takes and nothing that it says."""

import logging

import numpy as np
import pytest
import torch
from tests.support.worker_driver import WorkerDriver

from quire.config.speculation import SpeculationConfig
from quire.messages import SchedulerOutput, int_array
from quire.sampling_params import SamplingParams
from quire.testing.fake_model import FakeModel
from quire.testing.model_harness import worker_config
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker.speculative import NoProposer
from quire.worker.worker import Worker

VOCAB = 50
PROMPT = [3, 1, 4, 1, 5]
NUM_NEW = 24
GREEDY = SamplingParams(temperature=0.0)


class Oracle(NoProposer):
    """Knows what each row will say, and says it with mistakes: `is_right(position)`."""

    def __init__(self, answers, is_right=lambda position: True, vocab_size=VOCAB):
        self.answers = answers
        self.is_right = is_right
        self.vocab_size = vocab_size
        self.steps = []

    def open(self, context):
        self.table = context.table

    def propose(self, step):
        self.steps.append(step)
        drafts = np.full((len(step.rows_n), int(step.counts_n.max(initial=0))), -1, dtype=np.int64)
        for n, (row, count) in enumerate(zip(step.rows_n.tolist(), step.counts_n.tolist(), strict=True)):
            start = int(self.table.num_total[row])
            for position in range(start, min(start + count, len(self.answers[row]))):
                token = self.answers[row][position]
                drafts[n, position - start] = token if self.is_right(position) else (token + 1) % self.vocab_size
        return drafts


def started(model, proposer=None, *, path="none", num_blocks=0, **options):
    """A worker and its driver; the proposer takes the place of the one that is configured."""
    loader = {} if model is None else {"model_loader": lambda config: model}
    worker = Worker(worker_config(path, **options), **loader)
    worker.load()
    if proposer is not None:
        worker._proposer = proposer
    layers = [] if model is not None else [[layer.name for layer in worker.measure_capacity().layers]]
    worker.initialize_cache(layers, num_blocks)
    return WorkerDriver(worker, num_blocks=num_blocks, num_groups=len(layers))


SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=1.3),
    "top_k, top_p": SamplingParams(temperature=1.0, top_k=20, top_p=0.9),
    "min_p": SamplingParams(temperature=1.0, min_p=0.1),
    "penalties": SamplingParams(
        temperature=0.7, repetition_penalty=1.5, frequency_penalty=0.4, presence_penalty=0.3, logprobs=3
    ),
    "greedy penalties": SamplingParams(temperature=0.0, repetition_penalty=1.8, frequency_penalty=0.5),
    "min_tokens": SamplingParams(temperature=1.0, min_tokens=9, stop_token_ids=list(range(0, VOCAB, 2))),
    "logprobs": SamplingParams(temperature=0.0, logprobs=2),
    "bias": SamplingParams(temperature=1.0, logit_bias={7: 3.0, 8: -5.0}),
    "allowed": SamplingParams(temperature=1.0, allowed_token_ids=list(range(5, 40))),
}
# greedy with this model and prompt says [..., a, b, ...] somewhere: those become bad words below
BAD_WORDS = "bad_words"


def admit_all(driver, bad_words):
    """A row for each kind of sampling; rows do not start at 0 and their prompts differ."""
    for index, sampling in enumerate(SAMPLINGS.values()):
        driver.admit(index + 1, [*PROMPT, index], sampling=sampling, seed=100 + index)
    driver.admit(0, PROMPT, bad_words_token_ids=bad_words)


def collect(driver, num_new, num_drafts=0, grants_of=None):
    """Steps until every row has so many new tokens: (tokens, logprobs by row, steps)."""
    logprobs = {row: [] for row in driver.tokens}
    steps = 0
    while steps == 0 or any(len(tokens) < num_new + 6 for tokens in driver.tokens.values()):
        output = driver.step(grants_of(driver) if grants_of and steps else None, num_drafts=num_drafts)
        for row, entries in output.logprobs.items():
            logprobs[row] += entries
        for row in driver.tokens:
            assert len(output.logprobs.get(row, [])) in (0, (output.rows == row).sum())
        steps += 1
        assert steps < 10 * num_new
    return driver.tokens, logprobs, steps


@pytest.fixture(scope="module")
def plain():
    """What all rows say without drafts, longer than any test needs."""
    model = FakeModel.random(VOCAB)
    said = model.greedy(PROMPT, 10)
    bad_words = [[said[0]], said[3:5], said[4:8]]
    driver = started(model, max_num_seqs=16)
    admit_all(driver, bad_words)
    tokens, logprobs, steps = collect(driver, NUM_NEW + 20)
    assert steps >= NUM_NEW + 20
    assert tokens[0][5:15] != said, "bad words have changed nothing"
    return {"tokens": dict(tokens), "logprobs": logprobs, "bad_words": bad_words}


def same_as(plain, tokens, logprobs):
    for row, said in tokens.items():
        assert said[: NUM_NEW + 5] == plain["tokens"][row][: NUM_NEW + 5], f"row {row}"
        for entry, expected in zip(logprobs[row][:NUM_NEW], plain["logprobs"][row], strict=False):
            assert entry == expected
        assert len(logprobs[row]) == (len(said) - len(PROMPT) - 1 if plain["logprobs"][row] else 0)


DRAFTS = {
    "right": lambda position: True,
    "wrong": lambda position: False,
    "half": lambda position: position % 2 == 0,
    "the third": lambda position: position % 3 != 0,
}


@pytest.mark.parametrize("num_drafts", [1, 4, 7])
@pytest.mark.parametrize("kind", DRAFTS)
def test_rows_say_the_same_with_drafts_as_without(plain, kind, num_drafts):
    driver = started(FakeModel.random(VOCAB), Oracle(plain["tokens"], DRAFTS[kind]), max_num_seqs=16)
    admit_all(driver, plain["bad_words"])
    tokens, logprobs, steps = collect(driver, NUM_NEW, num_drafts)

    same_as(plain, tokens, logprobs)
    if kind == "right":
        assert steps <= 2 + NUM_NEW // (num_drafts + 1) + 1
    if kind == "wrong":
        assert steps >= NUM_NEW


@pytest.mark.parametrize("kind", DRAFTS)
def test_drafts_may_be_verified_in_pieces(plain, kind):
    """Grants of 1, 2, 3, 1, ... tokens: chunks end before, at and after the last draft."""
    driver = started(FakeModel.random(VOCAB), Oracle(plain["tokens"], DRAFTS[kind]), max_num_seqs=16)
    admit_all(driver, plain["bad_words"])
    turn = iter(range(10**6))

    def grants_of(driver):
        left = {row: len(said) + driver.drafts[row] - driver.computed[row] for row, said in driver.tokens.items()}
        return {row: min(count, 1 + next(turn) % 3) for row, count in left.items()}

    tokens, logprobs, _ = collect(driver, NUM_NEW, 5, grants_of)

    same_as(plain, tokens, logprobs)


def test_a_grant_beyond_the_drafts_is_cut(plain):
    """The core may count on more drafts than were found, and on rows that have nothing left to compute."""
    model = FakeModel.random(VOCAB)
    driver = started(model, Oracle({0: plain["tokens"][0]}, lambda position: True))
    driver.admit(0, PROMPT, bad_words_token_ids=plain["bad_words"])
    driver.step(num_drafts=3)
    worker = driver.worker
    output = worker.execute(
        SchedulerOutput(
            step=2, rows=int_array([0]), num_tokens=int_array([9]), step_data={"num_drafts": int_array([0])}
        )
    )
    assert output.token_ids.tolist() == plain["tokens"][0][6:10]
    assert output.speculated.T.tolist() == [[0, 9, 10, 3, 3]]

    worker.execute(SchedulerOutput(step=3, rows=int_array([0]), num_tokens=int_array([7])))
    worker._runner.table.num_computed[0] += 1
    skipped = SchedulerOutput(
        step=4, rows=int_array([0]), num_tokens=int_array([2]), step_data={"num_drafts": int_array([4])}
    )
    output = worker.execute(skipped)
    assert (len(output.rows), output.speculated.T.tolist()) == (0, [[0, 11, 11, 0, 0]])


def test_numbers_after_a_step_are_told(plain):
    """Four drafts of which the third is wrong, then two pieces of three right ones."""
    oracle = Oracle(plain["tokens"], lambda position: position != 8)
    driver = started(FakeModel.random(VOCAB), oracle, max_num_seqs=16)
    driver.admit(0, PROMPT, bad_words_token_ids=plain["bad_words"])
    driver.admit(1, [*PROMPT, 0], sampling=SAMPLINGS["greedy"])

    output = driver.step({0: 5, 1: 3}, num_drafts=4)
    # row 1 was asked, but has not sampled
    assert output.speculated.T.tolist() == [[0, 5, 10, 0, 0], [1, 3, 6, 0, 0]]
    output = driver.step({0: 5}, num_drafts=3)
    # positions 6 and 7 are right, that of 8 is the worker's own; then three new ones
    assert output.speculated.T.tolist() == [[0, 8, 12, 4, 2]]
    assert output.rows.tolist() == [0, 0, 0]
    output = driver.step({0: 2}, num_drafts=3)
    assert output.speculated.T.tolist() == [[0, 10, 12, 2, 2]]
    assert len(output.rows) == 2
    output = driver.step({0: 2})
    assert output.speculated.T.tolist() == [[0, 12, 13, 1, 1]]
    assert driver.tokens[0] == plain["tokens"][0][:13]
    assert len(driver.step({0: 1}).speculated.T) == 0


def test_a_preempted_row_keeps_its_drafts(plain):
    driver = started(FakeModel.random(VOCAB), Oracle(plain["tokens"]))
    driver.admit(0, PROMPT, bad_words_token_ids=plain["bad_words"])
    driver.step(num_drafts=4)
    driver.preempt(0)

    assert driver.step({0: 3}).speculated.T.tolist() == [[0, 3, 10, 0, 0]]
    output = driver.step({0: 7})
    assert output.speculated.T.tolist() == [[0, 10, 11, 4, 4]]
    assert driver.tokens[0] == plain["tokens"][0][:11]


def test_rows_with_candidates_and_prompt_logprobs_share_the_batch(plain):
    oracle = Oracle(plain["tokens"])
    driver = started(FakeModel.random(VOCAB), oracle)
    driver.admit(0, PROMPT, bad_words_token_ids=plain["bad_words"])
    driver.step(num_drafts=4)
    driver.admit(2, [9, 8, 7], num_candidates=3)
    driver.admit(5, [9, 8, 7, 6], sampling=SamplingParams(temperature=0.0, prompt_logprobs=1))
    driver.admit(7, [9, 8], sampling=GREEDY)
    output = driver.step()

    assert output.rows.tolist() == [0, 0, 0, 0, 0, 5, 7]
    assert driver.tokens[0] == plain["tokens"][0][:11]
    model = FakeModel.random(VOCAB)
    assert driver.tokens[7][2:] == model.greedy([9, 8], 1)
    assert driver.tokens[5][4:] == model.greedy([9, 8, 7, 6], 1)
    assert output.candidates[2].token_ids == model.logits_after([9, 8, 7]).topk(3).indices.tolist()
    assert len(output.prompt_logprobs[5]) == 3


@pytest.mark.parametrize(("broken", "fails"), [(4, False), (2, True), (0, True)])
def test_logits_that_are_not_finite_matter_up_to_the_first_wrong_draft(plain, broken, fails):
    """Five questions of row 1, the draft after the fourth is wrong; one of the questions has no usable answer."""
    model = FakeModel.random(VOCAB)
    oracle = Oracle(plain["tokens"], lambda position: position != 10)
    driver = started(model, oracle)
    driver.admit(1, [*PROMPT, 0], sampling=SAMPLINGS["greedy"])
    driver.admit(2, [*PROMPT, 1], sampling=SAMPLINGS["seeded"], seed=101)
    driver.step(num_drafts=4)
    drafted = driver.worker._runner.table.token_ids[1, :11].tolist()
    model.table_PV[(drafted[6 + broken] + 6 + broken) % len(model.table_PV), 3] = float("nan")
    output = driver.step()

    assert (1 in output.failures) == fails
    assert 2 not in output.failures
    assert driver.tokens[2][:11] == plain["tokens"][2][:11]
    assert driver.tokens[1] == plain["tokens"][1][: 7 if fails else 11]
    # whatever the core still grants, a failed row computes nothing
    assert len(driver.worker.execute(SchedulerOutput(step=9, rows=int_array([1]), num_tokens=int_array([1]))).rows) == (
        0 if fails else 1
    )


def test_a_proposer_that_fails_costs_drafts_alone(plain, caplog):
    class Broken(Oracle):
        def propose(self, step):
            raise RuntimeError("no memory")

    driver = started(FakeModel.random(VOCAB), Broken(plain["tokens"]))
    driver.admit(1, [*PROMPT, 0], sampling=SAMPLINGS["greedy"])
    with caplog.at_level(logging.ERROR):
        driver.generate(3, num_drafts=4)

    assert driver.tokens[1] == plain["tokens"][1][:9]
    assert "without drafts" in caplog.text
    assert "no memory" in caplog.text


def test_a_row_is_never_longer_than_there_is_room(plain):
    """And a proposer that gives more than it was asked for is cut."""

    class Eager(Oracle):
        def propose(self, step):
            return np.ones((len(step.rows_n), 12), dtype=np.int64)

    driver = started(FakeModel.random(VOCAB), Eager({}), max_model_len=9)
    driver.admit(0, PROMPT)
    assert driver.step(num_drafts=2).speculated.T.tolist() == [[0, 5, 8, 0, 0]]
    driver.admit(1, PROMPT)
    assert driver.step({1: 5}, num_drafts=8).speculated.T.tolist() == [[1, 5, 9, 0, 0]]


def test_the_proposer_follows_every_step(plain):
    """Prompt chunks too, so that a draft model can keep up."""
    oracle = Oracle(plain["tokens"])
    driver = started(FakeModel.random(VOCAB), oracle)
    driver.admit(0, PROMPT)
    driver.step({0: 2}, num_drafts=3)
    driver.step({0: 3}, num_drafts=3)

    assert [step.batch.num_tokens_S.tolist() for step in oracle.steps] == [[2], [3]]
    assert [step.rows_n.tolist() for step in oracle.steps] == [[], [0]]
    assert [len(step.hidden_TE) for step in oracle.steps] == [2, 3]


LOGITS = [1.0, -0.5, 0.5, 2.0, 0.0, 1.5]


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=0.6, top_p=0.9)], ids=["all", "top_p"]
)
def test_tokens_follow_the_distribution_of_the_model(sampling):
    """Drafts are always the most probable token: were they favoured, it would come too often. Pairs are independent."""

    class Stubborn(Oracle):
        def propose(self, step):
            return np.full((len(step.rows_n), 3), 3, dtype=np.int64)

    num_rows, num_new = 700, 6
    driver = started(FakeModel.constant(LOGITS), Stubborn({}), max_num_seqs=num_rows)
    for row in range(num_rows):
        driver.admit(row, [1, 2], sampling=sampling, seed=5000 + row)
    while min(map(len, driver.tokens.values())) < 2 + num_new:
        driver.step(num_drafts=3)
    said = np.array([tokens[2 : 2 + num_new] for tokens in driver.tokens.values()])

    weights = np.exp(np.array(LOGITS) / sampling.temperature)
    probabilities = weights / weights.sum()
    if sampling.top_p < 1.0:
        order = np.argsort(-probabilities)
        kept = order[: int((probabilities[order].cumsum() < sampling.top_p).sum()) + 1]
        probabilities = np.where(np.isin(np.arange(6), kept), probabilities, 0.0)
        probabilities /= probabilities.sum()
    expected = probabilities * said.size
    counts = np.bincount(said.ravel(), minlength=6)
    # 5 degrees of freedom or fewer: above 25.7 once in 10,000
    assert counts[expected == 0].sum() == 0
    assert ((counts - expected) ** 2 / np.maximum(expected, 1e-9))[expected > 0].sum() < 25.7
    pairs = np.bincount((said[:, :-1] * 6 + said[:, 1:]).ravel(), minlength=36)
    expected = np.outer(probabilities, probabilities).ravel() * pairs.sum()
    # 35 degrees of freedom: above 76.6 once in 10,000
    assert ((pairs - expected) ** 2 / np.maximum(expected, 1e-9))[expected > 0].sum() < 76.6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_model_with_attention_never_reads_what_a_wrong_draft_has_written(checkpoint, kind):
    prompts = {0: [5, 6, 7, 8, 9, 10, 11], 3: [200, 3, 77], 6: list(range(40, 75))}
    sampling = {0: GREEDY, 3: SamplingParams(temperature=1.0), 6: SamplingParams(temperature=0.8, top_k=30)}

    def run(proposer, num_drafts):
        driver = started(None, proposer, path=checkpoint, num_blocks=100)
        for row, prompt in prompts.items():
            driver.admit(row, prompt, sampling=sampling[row], seed=row)
        steps = 0
        while min(len(driver.tokens[row]) - len(prompts[row]) for row in prompts) < NUM_NEW:
            driver.step(num_drafts=num_drafts)
            steps += 1
        return {row: tokens[len(prompts[row]) :] for row, tokens in driver.tokens.items()}, steps

    plain, _ = run(NoProposer(), 0)
    answers = {row: [*prompts[row], *tokens] for row, tokens in plain.items()}
    said, steps = run(Oracle(answers, DRAFTS[kind], vocab_size=200), 4)

    assert {row: tokens[:NUM_NEW] for row, tokens in said.items()} == plain
    assert (steps <= 7) == (kind == "right")


def test_costs_are_measured_without_a_trace(checkpoint):
    ngram = SpeculationConfig(method="ngram", num_speculative_tokens=4)
    worker = Worker(worker_config(checkpoint, speculation=ngram))
    worker.load()
    worker.initialize_cache([[layer.name for layer in worker.measure_capacity().layers]], 20)
    driver = WorkerDriver(worker, num_blocks=20, num_groups=1)
    driver.admit(0, PROMPT)
    driver.generate(2)
    tensors = [tensor.clone() for tensor in worker._runner.cache.tensors]
    costs = worker.control("measure_speculation", {})

    assert set(costs) == {
        "seconds_per_step",
        "seconds_per_token",
        "seconds_of_drafting",
        "seconds_per_asked_row",
        "seconds_per_draft_step",
        "seconds_per_draft_token",
    }
    assert all(isinstance(value, float) and value >= 0 for value in costs.values())
    assert 1e-6 < costs["seconds_per_step"] + costs["seconds_per_token"] < 1
    assert costs["seconds_per_draft_step"] < 1e-4
    assert all(map(torch.equal, tensors, worker._runner.cache.tensors))
    worker.control("check_invariants", {})
