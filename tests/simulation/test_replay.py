"""A recorded run is replayed: the same decisions, block numbers and tokens, with the model and without it."""

import random

import msgspec
import pytest

from quire import failpoints
from quire.config import EngineOptions, resolve
from quire.engine_core.driver import CoreDriver
from quire.engine_core.executor.in_process import InProcessExecutor
from quire.engine_core.kv_cache_manager.block_pool import BlockPool
from quire.engine_core.launch import make_executor
from quire.engine_core.recorded_core import build_core
from quire.errors import EngineError, OptionError
from quire.messages import AbortRequests, ControlCall, DecodingSpec, EngineRequest, ExtendRequest, Tenancy
from quire.observability.run_log import RunLog, RunLogWriter
from quire.observability.run_records import Answered, Decided, Received, Told
from quire.sampling_params import SamplingParams
from quire.simulation.replay import Replay, compare_logs, config_of
from quire.testing.tiny_adapters import make_adapter
from quire.testing.tiny_checkpoints import make_checkpoint

SEEDS = range(100)
# in the default run
SAMPLE = (0, 1, 2, 3, 4, 5, 6, 7)
KINDS = ("plain", "beams", "drafts", "adapters", "sessions", "failures", "streams", "tenants")
VOCAB_SIZE = 320
END = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, "llama")
    return path


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory):
    return make_adapter(tmp_path_factory.mktemp("adapter"), model, rank=4, seed=1)


@pytest.fixture(autouse=True)
def no_faults_remain():
    yield
    failpoints.arm("")


def config_for(pick, kind, model, log, **more):
    options = {
        "model": str(model),
        "device": "cpu",
        "dtype": "float32",
        "num_threads": 1,
        "recorder_bytes": 0,
        "async_scheduling": pick.random() < 0.5,
        "block_size": pick.choice([4, 8]),
        "num_gpu_blocks_override": pick.choice([72, 100, 400]),
        "max_model_len": 200,
        "max_num_seqs": pick.choice([4, 16]),
        "max_num_batched_tokens": pick.choice([24, 100, 1000]),
        "scheduling_policy": pick.choice(["fifo", "two_level", "srtf", "priority"]),
        "enable_prefix_caching": kind in ("sessions", "tenants") or pick.random() < 0.7,
        "preemption_mode": pick.choice(["auto", "swap", "recompute"]),
        "record": str(log),
    }
    if kind == "drafts":
        options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3}
    if kind == "adapters":
        options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": 4, "max_cpu_loras": pick.choice([1, 3])}
    config, _ = resolve(EngineOptions(**options, **more))
    return config


def request_of(pick, kind, number, prefixes):
    prompt = [*pick.choice([[], *prefixes]), *(pick.randrange(VOCAB_SIZE) for _ in range(pick.choice([1, 9, 50])))]
    if kind == "drafts":
        prompt = (prompt * 6)[:90]
    n = pick.choice([1, 2, 3]) if kind in ("plain", "beams") else 1
    is_beam = kind == "beams" and n > 1
    temperature = 0.0 if kind == "drafts" or is_beam else pick.choice([0.0, 1.0])
    return EngineRequest(
        request_id=number,
        prompt_token_ids=prompt,
        sampling=SamplingParams(
            n=n,
            temperature=temperature,
            max_tokens=pick.choice([1, 5, 40, 70]),
            stop_token_ids=[pick.randrange(VOCAB_SIZE) for _ in range(pick.choice([0, 3]))],
            logprobs=pick.choice([None, None, 2]) if not is_beam else None,
        ),
        seed=number,
        eos_token_ids=[END],
        priority=pick.choice([0, 0, 1]),
        decoding=DecodingSpec(method="beam_search", args={"width": n}) if is_beam else None,
        adapter=pick.choice([0, 1, 1, 2]) if kind == "adapters" else 0,
        is_final=kind != "streams",
        keep=f"kept {number}" if kind == "sessions" else None,
        continues=f"kept {number - 3}" if kind == "sessions" and number >= 3 and pick.random() < 0.6 else None,
        tenant=Tenancy(name=pick.choice("ab"), weight=pick.choice([1.0, 3.0])) if kind == "tenants" else None,
    )


def messages_of(pick, kind, adapter):
    """(calls of step before it, message)."""
    prefixes = [[pick.randrange(VOCAB_SIZE) for _ in range(pick.choice([8, 30, 64]))] for _ in range(3)]
    if kind == "adapters":
        for name in "ab":
            yield 0, ControlCall(call_id=1, name="load_adapter", args={"name": name, "path": str(adapter)})
    at = 0
    for number in range(14):
        at += pick.choice([0, 0, 1, 5, 12])
        yield at, request_of(pick, kind, number, prefixes)
        if kind == "streams":
            for place in range(3):
                at += pick.choice([0, 2])
                token_ids = [pick.randrange(VOCAB_SIZE) for _ in range(5)]
                yield at, ExtendRequest(request_id=number, token_ids=token_ids, is_final=place == 2)
        if pick.random() < 0.15:
            yield at + 2, AbortRequests(request_ids=[number])
        if pick.random() < 0.1:
            yield at, ControlCall(call_id=2, name="reset_prefix_cache")
        if kind == "sessions" and number > 5 and pick.random() < 0.3:
            yield at, ControlCall(call_id=3, name="release_kept", args={"handle": f"kept {number - 5}"})


def run(config, messages, *, adapter=False):
    """The core of a configuration as its process drives it."""
    driver = CoreDriver(build_core(config))
    waiting = sorted(messages, key=lambda pair: pair[0])
    num_calls = 0
    while (waiting or driver.has_work) and not driver.is_dead:
        while waiting and (waiting[0][0] <= num_calls or not driver.has_work):
            message = waiting.pop(0)[1]
            driver.handle(message)
            if adapter and isinstance(message, ControlCall) and message.name == "load_adapter":
                while not is_ready(driver, "ab".index(message.args["name"]) + 1):
                    pass
        driver.step()
        num_calls += 1
    driver.shutdown()
    return driver


def is_ready(driver, number):
    driver.handle(ControlCall(call_id=9, name="adapter_state", args={"number": number}))
    return driver.take()[-1].result == "ready"


def recorded(tmp_path, seed, model, adapter, **more):
    pick = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    log = tmp_path / "run.qlog"
    config = config_for(pick, kind, model, log, **more)
    if kind == "failures":
        failpoints.arm(f"nan_row:corrupt:0.02:{seed}")
    run(config, messages_of(pick, kind, adapter), adapter=kind == "adapters")
    failpoints.arm("")
    return log


def replayed(log, *, with_model=False):
    opened = RunLog(log)
    workers = make_executor(config_of(opened.header).worker) if with_model else None
    return Replay(opened, workers).run()


def picture(outcome):
    return outcome.difference and outcome.difference.picture()


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in SAMPLE else pytest.mark.nightly) for seed in SEEDS]
)
def test_a_run_is_replayed_without_a_difference(seed, model, adapter, tmp_path):
    log = recorded(tmp_path, seed, model, adapter)
    for with_model in (False, True):
        outcome = replayed(log, with_model=with_model)
        assert outcome.difference is None, picture(outcome)
        assert outcome.ending == "the engine was ended"
        assert outcome.num_steps > 20
        assert outcome.num_requests == 14


def test_decisions_need_neither_the_model_nor_its_folder(model, adapter, tmp_path, monkeypatch):
    log = recorded(tmp_path, 0, model, adapter)
    header = RunLog(log).header
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    gone = msgspec.structs.replace(header, config=config_of(header, model=str(elsewhere / "no model")))
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr("quire.engine_core.executor.in_process.InProcessExecutor.__init__", None)
    opened = RunLog(log)
    opened.header = gone
    assert Replay(opened).run().difference is None


@pytest.mark.parametrize("share", [0.3, 0.61, 0.97])
def test_a_log_that_was_cut_off_is_replayed_as_far_as_it_goes(share, model, adapter, tmp_path):
    log = recorded(tmp_path, 1, model, adapter, record_bytes=2**20)
    whole = replayed(log)
    data = log.read_bytes()
    cut = tmp_path / "cut.qlog"
    cut.write_bytes(data[: int(len(data) * share)])
    outcome = replayed(cut)
    assert outcome.difference is None, picture(outcome)
    assert 0 <= outcome.num_steps < whole.num_steps
    assert outcome.ending.startswith("it was cut off")


def test_a_flipped_byte_is_seen(model, adapter, tmp_path):
    log = recorded(tmp_path, 0, model, adapter)
    data = bytearray(log.read_bytes())
    data[-100] ^= 1
    log.write_bytes(data)
    assert "damaged at byte" in replayed(log).ending


def test_a_core_that_decides_otherwise_is_told_from_the_recorded_one(model, adapter, tmp_path, monkeypatch):
    log = recorded(tmp_path, 0, model, adapter)
    take = BlockPool.allocate
    monkeypatch.setattr(BlockPool, "allocate", lambda pool, count, *args: take(pool, count, *args)[::-1])
    outcome = replayed(log)
    assert outcome.difference is not None
    assert outcome.difference.field.startswith("block_writes")
    assert "first difference" in outcome.difference.picture()
    assert outcome.difference.recorded != outcome.difference.replayed


def test_a_model_that_says_something_else_is_told_from_the_recorded_one(model, adapter, tmp_path):
    log = recorded(tmp_path, 0, model, adapter)
    other = make_checkpoint(tmp_path / "other", "llama", seed=9)
    opened = RunLog(log)
    outcome = Replay(opened, make_executor(config_of(opened.header, str(other)).worker)).run()
    assert outcome.difference is not None
    assert outcome.difference.field in ("token", "logprobs")
    assert outcome.difference.request


@pytest.mark.parametrize("seed", [0, 1, 4, 7])
def test_a_redacted_log_has_no_token_of_anybody_and_leads_to_the_same_decisions(seed, model, adapter, tmp_path):
    plain = recorded(tmp_path, seed, model, adapter)
    (tmp_path / "redacted").mkdir()
    redacted = recorded(tmp_path / "redacted", seed, model, adapter, record_redact=True)
    outcome = replayed(redacted)
    assert outcome.difference is None, picture(outcome)

    def of_kind(kind, log):
        return [record for record in RunLog(log) if isinstance(record, kind)]

    both = zip(of_kind(Received, plain), of_kind(Received, redacted), strict=True)
    prompts = [pair for pair in both if isinstance(pair[0].message, EngineRequest)]
    # a token may stand for itself
    prompts = [pair for pair in prompts if len(pair[0].message.prompt_token_ids) > 3]
    assert prompts
    assert all(one.message.prompt_token_ids != other.message.prompt_token_ids for one, other in prompts)
    assert all(one.message.sampling.max_tokens == other.message.sampling.max_tokens for one, other in prompts)
    assert len(of_kind(Answered, plain)) == len(of_kind(Answered, redacted))
    steps = zip(of_kind(Decided, plain), of_kind(Decided, redacted), strict=True)
    assert all(one.rows.tolist() == other.rows.tolist() for one, other in steps)
    with pytest.raises(OptionError, match="--no-model"):
        replayed(redacted, with_model=True)


def test_two_logs_are_compared(model, adapter, tmp_path):
    logs = []
    for seed, name in ((0, "a"), (0, "b"), (8, "c")):
        (tmp_path / name).mkdir()
        logs.append(recorded(tmp_path / name, seed, model, adapter))
    assert compare_logs(logs[0], logs[1]).difference is None
    assert compare_logs(logs[0], logs[2]).difference is not None


def test_a_core_that_died_dies_again_in_the_same_step(model, adapter, tmp_path, monkeypatch):
    pick = random.Random(0)
    config = config_for(pick, "plain", model, tmp_path / "run.qlog")
    execute = InProcessExecutor.execute

    def fails(executor, output):
        if output.step == 25:
            raise EngineError("the device is gone")
        return execute(executor, output)

    monkeypatch.setattr(InProcessExecutor, "execute", fails)
    assert run(config, messages_of(pick, "plain", adapter)).is_dead
    monkeypatch.undo()
    for with_model in (False, True):
        outcome = replayed(tmp_path / "run.qlog", with_model=with_model)
        assert outcome.difference is None, picture(outcome)
        assert outcome.num_steps == 25


def test_what_a_connector_said_is_said_again(model, adapter, tmp_path):
    pick = random.Random(3)
    log = tmp_path / "run.qlog"
    tiers = {"name": "tiered", "host_bytes": 4 << 20, "rule": "always"}
    config = config_for(pick, "sessions", model, log, kv_connector=tiers)
    run(config, messages_of(pick, "tenants", adapter))
    assert "num_near" in {record.question for record in RunLog(log) if isinstance(record, Told)}
    outcome = replayed(log)
    assert outcome.difference is None, picture(outcome)
    assert outcome.num_requests == 14


def test_a_redacted_log_does_not_say_where_a_store_is(model, adapter, tmp_path):
    pick = random.Random(3)
    log = tmp_path / "run.qlog"
    tiers = {"name": "tiered", "stores": [f"file://{tmp_path}/passw0rd"], "host_bytes": 4 << 20}
    options = {"kv_connector": tiers, "record_redact": True}
    run(config_for(pick, "sessions", model, log, **options), messages_of(pick, "tenants", adapter))
    header = RunLog(log).header
    assert "passw0rd" not in repr(header)
    assert config_of(header).kv_connector.name == "tiered"
    outcome = replayed(log)
    assert outcome.difference is None, picture(outcome)


def test_what_is_no_log_is_one_clear_error(tmp_path):
    (tmp_path / "no.qlog").write_bytes(b"something else")
    with pytest.raises(OptionError, match="no log of a run"):
        RunLog(tmp_path / "no.qlog")
    with pytest.raises(OptionError, match="cannot be read"):
        RunLog(tmp_path / "missing.qlog")


def test_a_call_of_workers_that_no_recording_holds_is_refused(tmp_path, model, adapter):
    log = RunLog(recorded(tmp_path, 0, model, adapter))
    forged = RunLogWriter(tmp_path / "forged.qlog", 2**20)
    forged.write(log.header)
    for record in log:
        if isinstance(record, Received):
            break
        forged.write(record)
    forged.write(Received(at=0.0, message=ControlCall(call_id=1, name="worker.update_weights", args={"path": "/x"})))
    forged.close()
    with pytest.raises(OptionError, match="no log that was recorded"):
        Replay(RunLog(forged.path)).run()
