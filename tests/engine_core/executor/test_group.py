"""Ranks that share a model: what they compute, and what becomes of everybody when one of them fails."""

import gc
import logging
import os
import re
import select
import signal
import time

import pytest

from quire.config import EngineOptions, resolve
from quire.engine_core.executor.group import state_of_all
from quire.engine_core.launch import build_engine_core
from quire.errors import EngineError, ModelError, OptionError
from quire.testing.greedy import generate_greedy, real_core
from quire.testing.tiny_checkpoints import make_checkpoint

PROMPTS = [[5, 6, 7, 8, 9], [3] * 20]
OPTIONS = {"tensor_parallel_size": 2, "kv_cache_memory_bytes": 16 << 20}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("ranks"), "qwen3")


@pytest.fixture(scope="module")
def shared_core(checkpoint):
    """Of those that leave it as it was."""
    core = real_core(checkpoint, **OPTIONS)
    yield core
    core.shutdown()


@pytest.fixture
def core(checkpoint):
    core = real_core(checkpoint, **OPTIONS)
    yield core
    core.shutdown()


def rank_of(core):
    (rank,) = core.executor._ranks
    return rank


def has_ended(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def run_until_it_fails(core, what):
    """Steps until the engine gives up; seconds from `what`, called in the middle, to then."""
    began = None

    def each_step():
        nonlocal began
        if began is None:
            what()
            began = time.monotonic()

    with pytest.raises(EngineError) as failure:
        generate_greedy(core, PROMPTS, 500, each_step)
    assert began is not None
    return str(failure.value), time.monotonic() - began


def test_a_rank_keeps_its_share_of_the_keys_and_values(checkpoint, shared_core):
    alone = real_core(checkpoint, kv_cache_memory_bytes=16 << 20)
    try:
        ours, theirs = shared_core.executor.measure_capacity().layers, alone.executor.measure_capacity().layers
        assert [2 * layer.bytes_per_token for layer in ours] == [layer.bytes_per_token for layer in theirs]
    finally:
        alone.shutdown()


def test_a_step_is_one_message(shared_core, monkeypatch):
    sent = []
    rank = rank_of(shared_core)
    ask = rank.ask
    monkeypatch.setattr(rank, "ask", lambda message: sent.append(len(message)) or ask(message))
    steps = []
    execute = shared_core.executor.execute
    monkeypatch.setattr(shared_core.executor, "execute", lambda step: steps.append(step.step) or execute(step))
    generate_greedy(shared_core, PROMPTS, 8)
    assert len(sent) == len(steps) > 6
    # what a step of two sequences needs, not the state of everything
    assert max(sent[2:]) < 400


def test_the_log_tells_the_size_of_each_message(shared_core, caplog):
    with caplog.at_level(logging.DEBUG, logger="quire.engine_core.executor.group"):
        generate_greedy(shared_core, PROMPTS, 8)
    lines = [record.getMessage() for record in caplog.records if "a message of" in record.getMessage()]
    assert len(lines) == len({line.partition(":")[0] for line in lines}) > 6
    assert all(re.fullmatch(r"step \d+: a message of \d+ bytes for each of 1 ranks", line) for line in lines)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_without_work_is_named_by_the_next_request(core, number):
    pid = rank_of(core).process.pid
    os.kill(pid, number)
    # of a core that has nobody to wake it
    assert select.select([core.executor._watch.loss_descriptor], [], [], 5.0)[0]
    with pytest.raises(EngineError, match="rank 1"):
        generate_greedy(core, PROMPTS, 4)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_dies_ends_the_engine_at_once(core, number):
    message, seconds = run_until_it_fails(core, lambda: os.kill(rank_of(core).process.pid, number))
    assert "rank 1" in message
    assert seconds < 10


def test_a_rank_that_stands_still_ends_the_engine(core):
    pid = rank_of(core).process.pid
    message, seconds = run_until_it_fails(core, lambda: os.kill(pid, signal.SIGSTOP))
    assert "rank 1" in message
    assert "stands still" in message
    assert seconds < 30
    core.shutdown()
    assert has_ended(pid)


def test_ranks_that_differ_end_the_engine(checkpoint, monkeypatch):
    monkeypatch.setenv("QUIRE_FAIL", "rank_step:corrupt")
    core = real_core(checkpoint, **OPTIONS)
    try:
        with pytest.raises(EngineError, match="rank 1 sampled something else than rank 0"):
            generate_greedy(core, PROMPTS, 4)
    finally:
        core.shutdown()


def test_a_rank_that_fails_says_why(checkpoint, monkeypatch):
    monkeypatch.setenv("QUIRE_FAIL", "rank_step:raise")
    core = real_core(checkpoint, **OPTIONS)
    try:
        with pytest.raises(EngineError, match="rank 1"):
            generate_greedy(core, PROMPTS, 4)
    finally:
        core.shutdown()


def test_no_process_is_left(checkpoint):
    core = real_core(checkpoint, **OPTIONS)
    pid = rank_of(core).process.pid
    core.shutdown()
    assert has_ended(pid)


def test_a_model_that_cannot_be_shared_is_refused_by_name(checkpoint):
    with pytest.raises(ModelError, match="Choose a number of workers"):
        real_core(checkpoint, tensor_parallel_size=3)


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2, "enable_lora": True, "rank_invariant": True},
        {"tensor_parallel_size": 2, "compile": True},
        {"tensor_parallel_size": 2, "model_impl": "transformers"},
        {"tensor_parallel_size": 3, "rank_invariant": True},
        {"context_parallel_size": 3},
        {"context_parallel_size": 2, "rank_invariant": True},
        {"enable_expert_parallel": True},
        {"enable_expert_parallel": True, "tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_what_cannot_be_done_together_is_refused(checkpoint, options):
    with pytest.raises(OptionError, match="worker"):
        resolve(EngineOptions(model=str(checkpoint), device="cpu", **options))


def test_equal_bits_with_experts_are_refused_by_name(tmp_path):
    path = make_checkpoint(tmp_path / "model", "qwen3_moe")
    for size in (1, 2):
        with pytest.raises(OptionError, match="rank_invariant: model_type=qwen3_moe has experts"):
            resolve(EngineOptions(model=str(path), device="cpu", tensor_parallel_size=size, rank_invariant=True))


def test_a_failed_start_leaves_nothing(checkpoint, monkeypatch):
    """A rank dies while it loads."""

    def start():
        with pytest.raises(EngineError, match="rank 1"):
            build_engine_core(config)

    monkeypatch.setattr("quire.engine_core.executor.child_placement._PROGRAM", "quire.no_such_program")
    config, _ = resolve(EngineOptions(model=str(checkpoint), device="cpu", num_threads=1, **OPTIONS))
    before = len(os.listdir("/proc/self/fd"))
    start()
    gc.collect()  # the error knew the frames, and they the memory
    assert len(os.listdir("/proc/self/fd")) <= before


READY = {"state": "ready", "error": None, "content": "a"}


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"state": "ready", "error": None, "content": "b"}, {"state": "ready", "error": None, "content": "a,b"}),
        ({"state": "loading", "error": None, "content": ""}, {"state": "loading", "error": None, "content": ""}),
        ({"state": "failed", "error": "no", "content": ""}, {"state": "failed", "error": "no", "content": ""}),
    ],
)
def test_nobody_may_use_an_adapter_before_all_workers_have_it(other, expected):
    assert state_of_all([READY, other]) == expected
