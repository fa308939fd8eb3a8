"""However many processes share a simulation, it comes out the same, bit by bit."""

import os
import random
import signal
import struct
from dataclasses import asdict

import pytest

from quire.config.device_sheets import device_sheet
from quire.errors import EngineDeadError
from quire.interfaces.cli.program import main
from quire.simulation import alone, forks, run, shard
from quire.simulation.arrivals import Arrival
from quire.simulation.costs.linear import LinearCosts
from quire.simulation.deployment import deploy
from quire.simulation.replica import Replica
from quire.simulation.run import simulate

pytestmark = pytest.mark.skipif(not forks.CAN_FORK, reason="processes are not copied here")


@pytest.fixture(autouse=True)
def few_are_worth_a_process(monkeypatch):
    monkeypatch.setattr(run, "_FEWEST", 4)
    monkeypatch.setattr(alone, "_PART", 3)


def random_arrivals(pick, num_requests, rate):
    at = 0.0
    for _ in range(num_requests):
        at += pick.expovariate(rate) if pick.random() < 0.8 else 0.0
        pieces = tuple((name, 64) for name in pick.sample(range(4), pick.randrange(0, 3)))
        prompt = 64 * len(pieces) + pick.choice([1, 7, 16, 90, 300, 800])
        yield Arrival(
            at,
            prompt,
            pick.choice([1, 2, 17, 60]),
            pieces,
            num_sequences=pick.choice([1, 1, 1, 1, 1, 3]),
            is_beam_search=pick.random() < 0.05,
            priority=pick.choice([0, 0, 0, 1]),
        )


def random_deployment(pick, **options):
    """Some prompts are longer than the model, and some requests than half of the memory."""
    options |= {
        "scheduling_policy": pick.choice(["fifo", "two_level", "srtf", "priority"]),
        "num_gpu_blocks_override": pick.choice([100, 160, 3000]),
        "max_model_len": 700,
        "max_num_seqs": pick.choice([4, 64]),
        "max_num_batched_tokens": pick.choice([64, 200, 2048]),
        "preemption_mode": pick.choice(["auto", "swap", "recompute"]),
    }
    costs = LinearCosts(0.013, 1.7e-4, 3.1e-7) if pick.random() < 0.5 else None
    return deploy("llama-3-8b", device_sheet("h100"), options, costs=costs)


def outcome_of(deployment, arrivals, processes, **how):
    records = []
    outcome = simulate(deployment, arrivals, on_record=records.append, processes=processes, **how)
    return [asdict(record) for record in records], outcome.summary


def one_engine(seed, processes):
    pick = random.Random(seed)
    deployment = random_deployment(pick, enable_prefix_caching=False)
    arrivals = list(random_arrivals(pick, 60, pick.choice([0.3, 1.0, 3.0])))
    return outcome_of(deployment, arrivals, processes)


def fleet(seed, processes):
    pick = random.Random(seed)
    deployment = random_deployment(pick, enable_prefix_caching=pick.random() < 0.7)
    how = {
        "num_replicas": pick.choice([2, 3, 5]),
        "router": pick.choice(["least_time", "least_loaded", "round_robin"]),
        "age": pick.choice([0.0, 0.0, 0.3]),
    }
    arrivals = list(random_arrivals(pick, 60, pick.choice([2.0, 20.0, 200.0])))
    return outcome_of(deployment, arrivals, processes, **how)


@pytest.mark.parametrize("simulation", [one_engine, fleet])
@pytest.mark.parametrize("seed", range(3))
def test_random_workloads_come_out_the_same(simulation, seed):
    of_one = simulation(seed, 1)
    assert simulation(seed, 2) == of_one
    assert simulation(seed, 3) == of_one


@pytest.mark.nightly
@pytest.mark.parametrize("simulation", [one_engine, fleet])
@pytest.mark.parametrize("seed", range(100, 400))
def test_many_random_workloads_come_out_the_same(simulation, seed):
    assert simulation(seed, 1 + seed % 3) == simulation(seed, 1)


def plain(**options):
    return deploy("opt-13b", device_sheet("a100-80gb"), options, costs=LinearCosts(0.1, 0.001))


def made_here(monkeypatch):
    """A list that gets an entry for each step or leap that this process makes."""
    made = []
    make_next = Replica.make_next
    monkeypatch.setattr(Replica, "make_next", lambda self, *until: (made.append(1), make_next(self, *until))[1])
    return made


def test_the_trace_of_one_engine_is_shared_where_it_has_nothing_to_do(monkeypatch):
    made = made_here(monkeypatch)
    arrivals = [Arrival(20.0 * number, 50, 10) for number in range(90)]
    deployment = plain(enable_prefix_caching=False)
    of_one = outcome_of(deployment, arrivals, 1)
    num_alone = len(made)
    made.clear()
    assert outcome_of(deployment, arrivals, 3) == of_one
    assert num_alone / 3 <= len(made) < num_alone / 2


@pytest.mark.parametrize("is_cached", [True, False])
def test_an_engine_that_is_never_new_again_makes_all_of_it_in_one_process(is_cached, monkeypatch):
    made = made_here(monkeypatch)
    # it always has something to do, or something in its cache
    seconds = 20.0 if is_cached else 0.5
    arrivals = [Arrival(seconds * number, 50, 10) for number in range(60)]
    deployment = plain(enable_prefix_caching=is_cached)
    of_one = outcome_of(deployment, arrivals, 1)
    num_alone = len(made)
    made.clear()
    assert outcome_of(deployment, arrivals, 2) == of_one
    assert len(made) == num_alone


def killed(pipe):
    os.kill(os.getpid(), signal.SIGKILL)


def killed_while_it_tells(pipe):
    os.write(pipe.fileno(), struct.pack("!i", 1000) + b"less than that")
    killed(pipe)


@pytest.mark.parametrize("work", [killed, killed_while_it_tells])
def test_what_a_lost_process_would_have_made_is_made_here(work, monkeypatch):
    arrivals = [Arrival(20.0 * number, 50, 10) for number in range(60)]
    deployment = plain(enable_prefix_caching=False)
    of_one = outcome_of(deployment, arrivals, 1)
    monkeypatch.setattr(alone, "fork", lambda _: forks.fork(work))
    assert outcome_of(deployment, arrivals, 2) == of_one


def test_replicas_are_advanced_in_other_processes(monkeypatch):
    made = made_here(monkeypatch)
    arrivals = [Arrival(0.1 * number, 50, 10) for number in range(40)]
    of_one = outcome_of(plain(), arrivals, 1, num_replicas=4)
    assert made
    made.clear()
    assert outcome_of(plain(), arrivals, 2, num_replicas=4) == of_one
    assert not made


def test_a_lost_process_with_replicas_ends_the_simulation_in_one_line(monkeypatch):
    monkeypatch.setattr(shard, "fork", lambda _: forks.fork(killed))
    with pytest.raises(EngineDeadError, match="memory may be short"):
        outcome_of(plain(), [Arrival(0.1 * number, 50, 10) for number in range(40)], 2, num_replicas=4)


def test_the_command_prints_the_same_bytes(capsys):
    argv = ["simulate", "--model", "opt-13b", "--device", "a100-80gb", "--trace", "sharegpt", "--rate", "8"]
    argv += ["--num-requests", "40", "--replicas", "3", "--json", "-"]
    printed = []
    for processes in ("1", "2"):
        assert main([*argv, "--processes", processes]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert main([*argv, "--processes", "none"]) == 2
    assert "--processes" in capsys.readouterr().err


def test_an_interrupt_that_comes_while_a_process_is_copied_is_not_lost():
    due = [True]

    def interrupt():
        if due:
            due.pop()
            signal.raise_signal(signal.SIGINT)

    # what a function of this kind raises goes nowhere
    os.register_at_fork(before=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            forks.fork(lambda pipe: None)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not due
