"""Stages of a pipeline: what each keeps, and what becomes of all when one of them fails."""

import os
import signal
import threading
import time

import numpy as np
import pytest
from tests.support.sampled import sampled

from quire.config import EngineOptions, resolve
from quire.engine_core.executor.placement import RankSight, Sight
from quire.engine_core.executor.rank_channel import Channel, Spilled, StepDone, channel_pair, encode_step
from quire.engine_core.executor.rank_process import serve
from quire.errors import EngineError, ModelError, OptionError
from quire.messages import SchedulerOutput, StepOutput
from quire.testing.greedy import generate_greedy, real_core
from quire.testing.tiny_checkpoints import make_checkpoint

PROMPTS = [[5, 6, 7, 8, 9], [3] * 20, [4, 2], [7] * 9]
OPTIONS = {"pipeline_parallel_size": 2, "kv_cache_memory_bytes": 16 << 20}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("stages"), "qwen3")


@pytest.fixture(scope="module")
def shared_core(checkpoint):
    """Of those that leave it as it was."""
    core = real_core(checkpoint, **OPTIONS)
    yield core
    core.shutdown()


@pytest.fixture
def make_core(checkpoint):
    made = []

    def make(**options):
        made.append(real_core(checkpoint, **{**OPTIONS, **options}))
        return made[-1]

    yield make
    for core in made:
        core.shutdown()


def rank_of(core, number):
    return core.executor._ranks[number - 1]


def run_until_it_fails(core, what):
    """Steps until the engine gives up; what it says, and seconds from `what`, called in the middle, to then."""
    began = None
    num_steps = 0

    def each_step():
        nonlocal began, num_steps
        num_steps += 1
        if num_steps == 5:
            what()
            began = time.monotonic()

    with pytest.raises(EngineError) as failure:
        generate_greedy(core, PROMPTS, 200, each_step)
    assert began is not None
    return str(failure.value), time.monotonic() - began


def bytes_of_a_layer(core):
    return core.ready.block_size * core.executor.measure_capacity().layers[0].bytes_per_token


def test_a_stage_keeps_the_keys_and_values_of_its_own_layers(shared_core, checkpoint):
    """The first one has one of three, and as many blocks as the other one has room for."""
    alone = real_core(checkpoint, kv_cache_memory_bytes=16 << 20)
    try:
        num_blocks = alone.ready.num_blocks
    finally:
        alone.shutdown()
    core = shared_core
    assert core.ready.num_blocks == (16 << 20) // (2 * bytes_of_a_layer(core))
    assert core.ready.num_blocks > 1.4 * num_blocks
    own = core.control("worker.statistics", {})["kv_cache_bytes"]
    assert own == core.ready.num_blocks * bytes_of_a_layer(core)


def test_a_stage_has_the_weights_of_its_own_layers(shared_core):
    names = {name for name, _ in shared_core.executor._own.worker._model.named_parameters()}
    assert any(name.startswith("model.embed_tokens") for name in names)
    assert any(name.startswith("model.layers.0.") for name in names)
    assert not any(name.startswith(("model.layers.1.", "lm_head")) for name in names)


def test_a_step_is_one_message(shared_core, monkeypatch):
    sent = []
    rank = rank_of(shared_core, 1)
    ask = rank.ask
    monkeypatch.setattr(rank, "ask", lambda message: sent.append(len(message)) or ask(message))
    steps = []
    execute = shared_core.executor.execute
    monkeypatch.setattr(shared_core.executor, "execute", lambda step: steps.append(step.step) or execute(step))
    generate_greedy(shared_core, PROMPTS, 8)
    assert len(sent) == len(steps) > 8
    # a decision, and what became of an earlier one
    assert max(sent[4:]) < 500


@pytest.mark.parametrize(("what", "ranks"), sampled([signal.SIGKILL, signal.SIGSTOP], [(1, 1), (2, 1), (2, 3)], n=3))
def test_whoever_ends_or_stands_still_ends_the_engine(make_core, ranks, what):
    tensor, number = ranks
    core = make_core(tensor_parallel_size=tensor)
    rank = rank_of(core, number)
    others = [one for one in core.executor._ranks if one is not rank]
    message, seconds = run_until_it_fails(core, lambda: os.kill(rank.process.pid, what))
    assert f"rank {number}" in message
    # who stands still is seen after two seconds
    assert seconds < (5 if what == signal.SIGKILL else 30)
    # nobody waits in the middle of a step for what never comes: each has said what became of it
    for one in others:
        while one._open:
            assert one.wait_for(one._open[-1], 10) is not None


def test_a_stage_that_computes_for_long_does_not_stand_still(make_core, monkeypatch):
    monkeypatch.setattr("quire.engine_core.executor.group.LONGEST_LAG", 0.5)
    core = make_core()
    watch = core.executor._watch
    monkeypatch.setattr(type(rank_of(core, 1)), "has_work", property(lambda _: True))
    for ticks in range(1, 11):
        watch._look_who_does_nothing(Sight({1: RankSight(ticks)}))
    assert watch.lost is None
    # and one that has had no time does
    for _ in range(10):
        watch._look_who_does_nothing(Sight({1: RankSight(7)}))
    assert "rank 1 stands still" in watch.lost


def test_a_stage_that_knows_other_tokens_ends_the_engine(make_core):
    core = make_core()

    def confuse():
        table = core.executor._own.worker._runner.table
        append = table.append
        table.append = lambda rows, lengths, token_ids: append(rows, lengths, token_ids ^ 1)

    message, _ = run_until_it_fails(core, confuse)
    assert "stage 1 knows other tokens" in message


@pytest.mark.parametrize("options", [{"kv_connector": {"name": "memory"}}, {"compile": True}], ids=str)
def test_what_cannot_be_done_together_is_refused(checkpoint, options):
    with pytest.raises(OptionError, match="workers that share a model"):
        resolve(EngineOptions(model=str(checkpoint), device="cpu", pipeline_parallel_size=2, **options))


def test_more_stages_than_layers_are_refused(checkpoint):
    with pytest.raises(ModelError, match="Use tensor_parallel_size, or fewer stages"):
        real_core(checkpoint, **{**OPTIONS, "pipeline_parallel_size": 9})


class SpillingWorker:
    """Answers more than a socket holds."""

    def execute(self, decision, answers):
        return StepOutput(step=decision.step, spilled={b"block": bytes(4 << 20)})


def test_a_long_step_reaches_a_stage_that_answers_what_it_has_spilled():
    """The core reads no answer before it has sent the next step, and the stage sends while it does."""
    core, descriptor = channel_pair()
    stage = Channel(descriptor, sends_beside=True)
    steps = [SchedulerOutput(step=step, rows=np.zeros(1 << 20, dtype=np.int64)) for step in range(3)]

    def send_all():
        for step in steps:
            core.send(encode_step(step, []))

    rank = threading.Thread(target=serve, args=(SpillingWorker(), stage, {}), daemon=True)
    sender = threading.Thread(target=send_all, daemon=True)
    rank.start()
    sender.start()
    sender.join(20)
    assert not sender.is_alive()
    answers = [type(core.receive(10)) for _ in range(6)]
    assert answers == [Spilled, StepDone] * 3
    core.close()
    rank.join(10)
    assert not rank.is_alive()
