"""Names that no other request can ask for take no memory, and change nothing."""

import random
from dataclasses import asdict

import pytest

from quire.config.device_sheets import device_sheet
from quire.engine_core.kv_cache_manager.block_pool import BlockPool
from quire.engine_core.kv_cache_manager.prefix_cache import PrefixHasher
from quire.simulation import deployment as deployments
from quire.simulation.arrivals import Arrival, Requests
from quire.simulation.costs.linear import LinearCosts
from quire.simulation.deployment import deploy
from quire.simulation.fleet import Fleet
from quire.simulation.names import TraceHasher
from quire.simulation.run import simulate
from quire.simulation.split_fleet import Split


def random_arrivals(pick, num_requests):
    """Prompts that begin alike, up to a place within a block or to its end; some have siblings or beams."""
    at = 0.0
    for _ in range(num_requests):
        at += pick.expovariate(20.0)
        pieces = tuple(
            (name, pick.choice([16, 40, 62, 64, 96])) for name in pick.sample(range(3), pick.randrange(0, 3))
        )
        shared = sum(length for _, length in pieces)
        yield Arrival(
            at,
            (shared + pick.choice([0, 1, 3, 4, 16, 90, 300])) or 1,
            pick.choice([1, 2, 17, 60]),
            pieces,
            num_sequences=pick.choice([1, 1, 1, 3]),
            is_beam_search=pick.random() < 0.1,
        )


def outcome_of(seed, models, **how):
    """Memory is short, so that requests give way and find again what they had."""
    pick = random.Random(seed)
    block_size = pick.choice([1, 8, 16])
    options = {
        "enable_prefix_caching": True,
        "block_size": block_size,
        "num_gpu_blocks_override": pick.choice([90, 160]) * 16 // block_size,
        "max_model_len": 600,
        "max_num_batched_tokens": pick.choice([64, 2048]),
        "preemption_mode": pick.choice(["auto", "swap", "recompute"]),
    }
    costs = LinearCosts(0.013, 1.7e-4, 3.1e-7)
    deployment = deploy(pick.choice(models), device_sheet("h100"), options, costs=costs)
    records = []
    outcome = simulate(deployment, list(random_arrivals(pick, 50)), on_record=records.append, **how)
    return [asdict(record) for record in records], outcome.summary


def name_all_by_hash(monkeypatch):
    """Names are the engine's own, and each of them is kept and told of."""
    monkeypatch.setattr(deployments, "TraceHasher", PrefixHasher)
    monkeypatch.setattr(TraceHasher, "_num_common_blocks", lambda self, request: 1 << 40)
    monkeypatch.setattr(BlockPool, "hide", lambda self, names: None)


HOW = {
    "alone": (["llama-3-8b", "gpt-oss-20b"], {}),
    "fleet": (["llama-3-8b", "gpt-oss-20b"], {"num_replicas": 3}),
    "split": (["llama-3-8b"], {"split": Split(2, 2)}),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("how", HOW)
def test_everything_comes_out_as_with_the_names_of_the_engine(how, seed, monkeypatch):
    models, options = HOW[how]
    outcome = outcome_of(seed, models, **options)
    assert outcome[1]["cache_hit_rate"] > 0
    name_all_by_hash(monkeypatch)
    assert outcome_of(seed, models, **options) == outcome


def test_memory_was_short_enough_for_somebody_to_give_way():
    outcomes = [outcome_of(seed, ["llama-3-8b"])[1] for seed in range(4)]
    assert sum(outcome["preemptions"]["recomputed"] for outcome in outcomes) > 5
    assert sum(engine["kv_blocks_evicted"] for outcome in outcomes for engine in outcome["engines"]) > 100


def fleet_behind(arrivals):
    """One that has made all of that."""
    options = {"enable_prefix_caching": True, "block_size": 16, "num_gpu_blocks_override": 300}
    deployment = deploy("llama-3-8b", device_sheet("h100"), options, costs=LinearCosts(0.1, 0.001))
    fleet = Fleet(deployment, 2, lambda record: None)
    fleet.run(Requests(arrivals, 1000))
    return fleet


def test_of_requests_that_have_ended_those_names_are_kept_that_others_can_ask_for():
    alike = ((5, 60),)
    arrivals = [Arrival(3.0 * number, 150, 40, alike if number % 2 else ()) for number in range(8)]
    fleet = fleet_behind(arrivals)
    pools = [replica.core.scheduler.manager.pool for replica in fleet.replicas.values()]
    assert sum(len(pool.names(0)) for pool in pools) == 3
    assert fleet.router.statistics()["routed_blocks"] == 3
    # in the cache there are all that were full
    assert sum(pool.num_cached for pool in pools) == 4 * (189 // 16) + 4 * (189 // 16) - 3 * 3
    for pool in pools:
        pool.check_invariants(pool.counts)


def test_what_nobody_can_ask_for_gives_way_in_its_turn():
    fleet = fleet_behind([Arrival(3.0 * number, 800, 40) for number in range(60)])
    pools = [replica.core.scheduler.manager.pool for replica in fleet.replicas.values()]
    for pool in pools:
        assert not pool.names(0)
        assert pool.num_evictions > 300
        assert pool.num_cached > 200
        pool.check_invariants(pool.counts)
