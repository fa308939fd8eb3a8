"""Steps that are made together leave everything as one by one would have left it, bit by bit."""

import random
from dataclasses import asdict

import pytest

from quire.config.device_sheets import device_sheet
from quire.simulation.arrivals import Arrival
from quire.simulation.costs.linear import LinearCosts
from quire.simulation.deployment import deploy
from quire.simulation.replica import Replica
from quire.simulation.run import simulate


def random_arrivals(pick):
    at = 0.0
    rate = pick.choice([0.2, 2.0, 20.0])
    contents = [(name, pick.choice([16, 40, 64, 130])) for name in range(4)]
    for _ in range(pick.randrange(5, 30)):
        at += pick.expovariate(rate) if pick.random() < 0.8 else 0.0
        pieces = tuple(pick.sample(contents, pick.randrange(0, 3)))
        prompt = sum(tokens for _, tokens in pieces) + pick.choice([1, 7, 16, 90, 300])
        yield Arrival(
            at,
            prompt,
            pick.choice([1, 2, 17, 60, 250]),
            pieces,
            num_sequences=pick.choice([1, 1, 1, 3]),
            is_beam_search=pick.random() < 0.05,
            priority=pick.choice([0, 0, 0, 1]),
        )


def random_options(pick):
    return {
        "scheduling_policy": pick.choice(["fifo", "two_level", "srtf", "priority"]),
        "enable_prefix_caching": pick.random() < 0.6,
        "num_gpu_blocks_override": pick.choice([180, 240, 3000]),
        "block_size": pick.choice([8, 16]),
        "max_model_len": 700,
        "max_num_seqs": pick.choice([4, 8, 64]),
        "max_num_batched_tokens": pick.choice([32, 200, 2048]),
        "preemption_mode": pick.choice(["auto", "swap", "recompute"]),
        "check_invariants": True,
    }


def outcome_of(seed, *, may_leap):
    pick = random.Random(seed)
    options = random_options(pick)
    costs = LinearCosts(0.013, 1.7e-4, 3.1e-7) if pick.random() < 0.5 else None
    model = pick.choice(["llama-3-8b", "opt-13b", "gpt-oss-20b"])
    deployment = deploy(model, device_sheet("h100"), options, costs=costs)
    fleet = {
        "num_replicas": pick.choice([1, 1, 3]),
        "router": pick.choice(["least_time", "least_loaded", "round_robin"]),
        "age": pick.choice([0.0, 0.5]),
    }
    records = []
    outcome = simulate(deployment, random_arrivals(pick), on_record=records.append, may_leap=may_leap, **fleet)
    return [asdict(record) for record in records], outcome.summary


@pytest.mark.parametrize("seed", range(12))
def test_random_workloads_come_out_the_same(seed):
    assert outcome_of(seed, may_leap=True) == outcome_of(seed, may_leap=False)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 500))
def test_many_random_workloads_come_out_the_same(seed):
    assert outcome_of(seed, may_leap=True) == outcome_of(seed, may_leap=False)


@pytest.mark.parametrize("is_cached", [True, False])
def test_most_steps_of_long_answers_are_leapt_over(is_cached, monkeypatch):
    made = []
    take = Replica._take
    monkeypatch.setattr(Replica, "_take", lambda self, outputs: (made.append(1), take(self, outputs)))
    deployment = deploy("llama-3-8b", device_sheet("h100"), {"enable_prefix_caching": is_cached})
    outcome = simulate(deployment, [Arrival(0.1 * number, 100, 500) for number in range(10)])
    assert outcome.summary["engines"][0]["steps"] > 500
    assert len(made) < 50


def test_who_waits_for_memory_does_not_stop_the_others_from_leaping(monkeypatch):
    made = []
    take = Replica._take
    monkeypatch.setattr(Replica, "_take", lambda self, outputs: (made.append(1), take(self, outputs)))
    options = {"num_gpu_blocks_override": 70, "max_model_len": 1100, "scheduling_policy": "fifo"}
    deployment = deploy("llama-3-8b", device_sheet("h100"), options)
    outcome = simulate(deployment, [Arrival(0.0, 500, 500) for _ in range(3)])
    assert outcome.tally.num_completed == 3
    assert outcome.summary["engines"][0]["steps"] > 1000
    assert len(made) < 300


def kept_leaps(monkeypatch):
    """A list that gets what each leap was foreseen to be."""
    leaps = []
    take = Replica._take_many

    def take_many(self, ahead, *made):
        leaps.append(ahead)
        return take(self, ahead, *made)

    monkeypatch.setattr(Replica, "_take_many", take_many)
    return leaps


def test_a_leap_begins_with_prompts_and_goes_beyond_ends(monkeypatch):
    leaps = kept_leaps(monkeypatch)
    deployment = deploy("llama-3-8b", device_sheet("h100"), {"enable_prefix_caching": False})
    answers = [5, 20, 20, 60, 100]
    outcome = simulate(deployment, [Arrival(0.0, 100, length) for length in answers])
    assert outcome.tally.num_completed == len(answers)
    # one with all prompts
    assert len(leaps) == 1
    ends = [float(leaps[0].times[length]) for length in answers]
    assert sorted(outcome.tally.values("latency").tolist()) == ends


def busy_arrivals(pick):
    """Requests that come while others run, of which one is too long, and three have prompts of several steps."""
    at = 0.0
    for number in range(60):
        at += pick.expovariate(12.0) if pick.random() < 0.9 else 0.0
        prompt = 9000 if number == 50 else 3000 if number in {15, 16, 35} else pick.choice([1, 16, 90, 300, 1500])
        yield Arrival(at, prompt, pick.choice([1, 2, 17, 60, 250]))


@pytest.mark.parametrize("policy", ["fifo", "two_level", "srtf", "priority"])
def test_who_comes_joins_a_leap(policy, monkeypatch):
    leaps = kept_leaps(monkeypatch)
    options = {"enable_prefix_caching": False, "scheduling_policy": policy, "max_num_seqs": 24}
    deployment = deploy("llama-3-8b", device_sheet("h100"), options)

    def outcome(may_leap):
        records = []
        found = simulate(deployment, busy_arrivals(random.Random(3)), on_record=records.append, may_leap=may_leap)
        return [asdict(record) for record in records], found.summary

    together = outcome(may_leap=True)
    num_joined = sum(len(ahead.joins) for ahead in leaps)
    assert together == outcome(may_leap=False)
    assert together[1]["requests"]["failed"] == 1
    assert num_joined > 20
    assert len(leaps) < 30


def test_nobody_joins_where_somebody_looks_for_what_is_cached(monkeypatch):
    leaps = []
    take = Replica._take_many
    monkeypatch.setattr(
        Replica, "_take_many", lambda self, ahead, *made: (leaps.append(ahead), take(self, ahead, *made))[1]
    )
    deployment = deploy("llama-3-8b", device_sheet("h100"), {"enable_prefix_caching": True})
    simulate(deployment, [Arrival(0.1 * number, 100, 500) for number in range(5)])
    assert not any(ahead.joins for ahead in leaps)


def test_a_prompt_of_two_steps_joins_beside_parallel_samples(monkeypatch):
    leaps = kept_leaps(monkeypatch)
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": 200}
    deployment = deploy("llama-3-8b", device_sheet("h100"), options)
    arrivals = [Arrival(0.0, 90, 60, num_sequences=3), Arrival(0.1, 364, 60)]
    together = simulate(deployment, arrivals).summary
    assert [join.step - join.begins for ahead in leaps for join in ahead.joins] == [1]
    assert together == simulate(deployment, arrivals, may_leap=False).summary
