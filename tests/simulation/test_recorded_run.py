"""A simulation that is given the times of a real run takes the decisions of that run, all of them."""

import random

import msgspec
import pytest

from quire.config import EngineOptions, resolve
from quire.engine_core.executor.modelled import ModelledExecutor, VirtualClock
from quire.engine_core.launch import build_engine_core
from quire.messages import DecodingSpec, EngineRequest
from quire.observability.run_records import Decided, encode_record
from quire.sampling_params import SamplingParams
from quire.simulation.recorded_run import record
from quire.testing.tiny_checkpoints import make_checkpoint

SEEDS = range(20)
# in the default run
SAMPLE = (0, 1, 2, 3, 4)
KINDS = ("plain", "stops", "parallel", "beams", "drafts")
VOCAB_SIZE = 320


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, "llama")
    return str(path)


def options_of(pick, kind, model):
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    config, _ = resolve(
        EngineOptions(
            model=model,
            device="cpu",
            num_threads=1,
            async_scheduling=False,
            recorder_bytes=0,
            block_size=pick.choice([4, 8]),
            num_gpu_blocks_override=pick.choice([72, 100, 400]),
            max_model_len=200,
            max_num_seqs=pick.choice([4, 16]),
            max_num_batched_tokens=pick.choice([24, 100, 1000]),
            scheduling_policy=pick.choice(["fifo", "two_level", "srtf", "priority"]),
            enable_prefix_caching=pick.random() < 0.7,
            preemption_mode=pick.choice(["auto", "swap", "recompute"]),
            speculative_config=drafts if kind == "drafts" else None,
        )
    )
    return config


def requests_of(pick, kind):
    prefixes = [[pick.randrange(VOCAB_SIZE) for _ in range(pick.choice([8, 30, 64]))] for _ in range(3)]
    at = 0.0
    for number in range(12):
        at += pick.expovariate(200.0) if pick.random() < 0.8 else 0.0
        prompt = [*pick.choice([[], *prefixes]), *(pick.randrange(VOCAB_SIZE) for _ in range(pick.choice([1, 9, 50])))]
        if kind == "drafts":
            prompt = (prompt * 6)[:90]
        is_several = kind in ("parallel", "beams") and pick.random() < 0.6
        n = pick.choice([2, 3]) if is_several else 1
        is_beam = kind == "beams" and n > 1
        yield (
            at,
            EngineRequest(
                request_id=number,
                prompt_token_ids=prompt,
                sampling=SamplingParams(
                    n=n,
                    temperature=0.0 if kind == "drafts" or is_beam else 1.0,
                    max_tokens=pick.choice([1, 5, 40, 70]),
                    ignore_eos=kind != "stops",
                    stop_token_ids=[pick.randrange(VOCAB_SIZE) for _ in range(3)] if kind == "stops" else [],
                ),
                seed=number,
                eos_token_ids=[256],
                priority=pick.choice([0, 0, 1]),
                decoding=DecodingSpec(method="beam_search", args={"width": n}) if is_beam else None,
            ),
        )


def decision_of(decided):
    return encode_record(msgspec.structs.replace(decided, at=0.0))


class RecordedCosts:
    """What the steps of a run took, one after the other."""

    def __init__(self, seconds):
        self._seconds = iter(seconds)

    def seconds(self, work):
        return next(self._seconds)


def modelled_worker(run, config, clock, *, with_answers):
    """A worker that takes as long as the recorded one. `with_answers`: it also says what that one said, where decisions
    hang on it (stop tokens, beams, drafts, siblings that may sample the same)."""
    answers = {answer.step: answer for answer in run.answers}
    return ModelledExecutor(
        run.capacity,
        RecordedCosts(run.seconds),
        clock=clock,
        vocab_size=config.facts.vocab_size,
        control=run.control,
        answers=answers.__getitem__ if with_answers else None,
    )


def simulated(run, config, arrivals, *, with_answers):
    clock = VirtualClock()
    core = build_engine_core(config, modelled_worker(run, config, clock, with_answers=with_answers))
    decisions = []
    core.watch_steps(lambda decided, work: decisions.append(decision_of(Decided.of(decided, 0.0))))
    for at, request in arrivals:
        while core.has_work and clock.now() < at:
            core.step()
        clock.wait_until(at)
        core.add(request)
    while core.has_work:
        core.step()
    return decisions


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in SAMPLE else pytest.mark.nightly) for seed in SEEDS]
)
def test_a_simulation_takes_the_decisions_of_the_real_run(seed, model):
    pick = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    config = options_of(pick, kind, model)
    arrivals = list(requests_of(pick, kind))
    run = record(config, arrivals)
    found = simulated(run, config, arrivals, with_answers=kind != "plain")
    assert len(run.decisions) > 20
    assert found == [decision_of(decided) for decided in run.decisions]


def test_other_times_lead_to_other_decisions(model):
    pick = random.Random(5)
    config = options_of(pick, "plain", model)
    arrivals = list(requests_of(pick, "plain"))
    run = record(config, arrivals)
    # none: what arrives later is never waited for, however busy the machine is that was recorded
    run.seconds = [1e-9] * 10_000
    found = simulated(run, config, arrivals, with_answers=False)
    assert found != [decision_of(decided) for decided in run.decisions]
