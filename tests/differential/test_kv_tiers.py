"""Blocks that outlive an engine: the tokens are those of an engine that computes everything."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from tests.support import kv_servers
from tests.support.kv_servers import SERVERS
from tests.support.server_process import ServerProcess
from tests.support.token_engine import TokenEngine

from quire import LLM, AsyncLLM, LoRARequest, SamplingParams
from quire.errors import OptionError
from quire.interfaces.handles import PINNED
from quire.kv_connectors.tiered.guard import GuardedStore
from quire.kv_connectors.tiered.host import HostTier
from quire.messages import KVTransfer, Tenancy
from quire.testing.tiny_adapters import make_adapter
from quire.testing.tiny_checkpoints import make_checkpoint

BLOCK_SIZE = 4
TEXT = "A text that many prompts begin with, and that is kept."
PROMPTS = [[(7 * length + 3 * place * place) % 250 + 5 for place in range(length)] for length in (30, 1, 4, 17, 48)]
COMMON: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
SAMPLINGS = [
    SamplingParams(temperature=0.0, **COMMON),
    SamplingParams(temperature=1.0, top_p=0.9, **COMMON),
    SamplingParams(temperature=0.0, presence_penalty=1.0, **COMMON),
    SamplingParams(temperature=0.8, repetition_penalty=1.3, **COMMON),
    SamplingParams(temperature=0.7, top_k=20, **COMMON),
]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": 200,
    "max_model_len": 128,
    "max_num_batched_tokens": 16,
    "check_invariants": True,
}
in_both_ways = pytest.mark.parametrize("async_scheduling", [False, pytest.param(True, marks=pytest.mark.nightly)])


class Engine(TokenEngine):
    """`stores` are addresses."""

    def __init__(self, path: Path, *stores: str, **options: Any) -> None:
        args = {"rule": "always", "max_wait": 30.0, **options.pop("tiers", {})}
        values = OPTIONS | options
        if stores:
            values |= {"kv_connector": {"name": "tiered", "stores": list(stores), **args}}
        super().__init__(model=str(path), **values)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    engine = Engine(path)
    tokens = engine.run(PROMPTS, SAMPLINGS)
    engine.close()
    return tokens


@pytest.fixture
def open_engine() -> Iterator[Callable[..., Engine]]:
    opened: list[Engine] = []

    def open_one(path: Path, *stores: str, **options: Any) -> Engine:
        opened.append(Engine(path, *stores, **options))
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()


@pytest.fixture(params=["files", *SERVERS])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "files":
        yield f"file://{tmp_path / 'blocks'}"
        return
    with SERVERS[request.param](tmp_path) as server:
        yield server.address


@pytest.fixture(params=["files", *SERVERS, "nixl"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Of one engine, and of another one that finds what the first one keeps."""
    with kv_servers.two_addresses(request.param, tmp_path) as addresses:
        yield addresses


# ---- what outlives an engine


def num_full(prompts: list[list[int]]) -> int:
    """Tokens of whole blocks; one token at least is always computed."""
    return sum((len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts)


@in_both_ways
def test_after_a_restart_nothing_is_computed_twice(
    path: Path, store: str, expected: list[list[int]], open_engine: Callable[..., Engine], async_scheduling: bool
) -> None:
    first = open_engine(path, store, async_scheduling=async_scheduling)
    assert first.run(PROMPTS, SAMPLINGS) == expected
    assert first.number("fetched_tokens_total") == 0
    first.close()
    second = open_engine(path, store, async_scheduling=async_scheduling)
    assert second.run(PROMPTS, SAMPLINGS) == expected
    assert second.number("fetched_tokens_total") == num_full(PROMPTS)


@in_both_ways
@pytest.mark.parametrize("num_here", [8, pytest.param(0, marks=pytest.mark.nightly)])
def test_what_one_computes_another_goes_on_with(
    path: Path,
    stores: tuple[str, str],
    expected: list[list[int]],
    open_engine: Callable[..., Engine],
    async_scheduling: bool,
    num_here: int,
) -> None:
    """4.4.4, in two processes: computed = L, total = L + 1; moved are the blocks of L - L_cached."""
    options = {"async_scheduling": async_scheduling, "in_own_process": True}
    first = open_engine(path, stores[0], **options)
    second = open_engine(path, stores[1], **options)
    if num_here:
        second.run([[*prompt[:num_here], 3] for prompt in PROMPTS], [one_token(one) for one in SAMPLINGS])
    begun = first.run(PROMPTS, list(map(one_token, SAMPLINGS)), [KVTransfer(store="any") for _ in PROMPTS])
    transfers = [KVTransfer(fetch="any", num_fetch_tokens=len(prompt), num_output_tokens=1) for prompt in PROMPTS]
    sent = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, begun, strict=True)]
    rest = second.run(sent, SAMPLINGS, transfers)
    assert [[*tokens, *more] for tokens, more in zip(begun, rest, strict=True)] == expected
    here = [min(num_here, len(prompt) // BLOCK_SIZE * BLOCK_SIZE) for prompt in PROMPTS]
    assert second.number("fetched_tokens_total") == sum(map(len, PROMPTS)) - sum(here)
    num_blocks = sum(-(-len(prompt) // BLOCK_SIZE) for prompt in PROMPTS) - sum(here) // BLOCK_SIZE
    assert second.number("fetched_blocks_total") == num_blocks


def one_token(sampling: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(sampling, max_tokens=1)


def test_several_outputs_wait_for_no_block_that_nobody_writes(
    path: Path, tmp_path: Path, open_engine: Callable[..., Engine]
) -> None:
    """They begin at the prompt's last token, which is computed here; the block before it has no name elsewhere."""
    first, second = (open_engine(path, f"file://{tmp_path}") for _ in range(2))
    first.run(PROMPTS, list(map(one_token, SAMPLINGS)), [KVTransfer(store="any") for _ in PROMPTS])
    flush(first)
    transfers = [KVTransfer(fetch="any", num_fetch_tokens=len(prompt)) for prompt in PROMPTS]
    second.run(PROMPTS, [one.replace(n=2) for one in SAMPLINGS], transfers)
    assert second.number("fetched_tokens_total") == num_full(PROMPTS)
    assert second.number("kv_tiers_late_total") == 0


def test_a_conversation_of_50_turns_survives_a_kill_and_a_small_pool(
    path: Path, tmp_path: Path, open_engine: Callable[..., Engine]
) -> None:
    """The engine is dropped at turn 25, as a kill drops it; memory of the tiers goes with it."""
    store = f"file://{tmp_path}"
    alone = open_engine(path, max_model_len=256)
    engine = open_engine(path, store, num_gpu_blocks_override=64, max_model_len=256, tiers={"host_bytes": 2**22})
    sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    history: list[int] = []
    for turn in range(50):
        if turn == 25:
            flush(engine)
            engine = open_engine(
                path, store, num_gpu_blocks_override=64, max_model_len=256, tiers={"host_bytes": 2**23}
            )
        history += [turn + 5, 2 * turn + 5]
        before = engine.number("num_prefix_hit_tokens_total") + engine.number("fetched_tokens_total")
        (tokens,) = engine.run([history], [sampling])
        assert [tokens] == alone.run([history], [sampling])
        found = engine.number("num_prefix_hit_tokens_total") + engine.number("fetched_tokens_total") - before
        # only what is new, and what of the last block was not full
        assert found >= (len(history) - 3) // BLOCK_SIZE * BLOCK_SIZE
        # others push it out
        engine.run(
            [[(turn * 31 + number * 7 + place) % 250 + 5 for place in range(48)] for number in range(5)], [sampling] * 5
        )
        history += tokens


@pytest.mark.nightly
def test_a_server_that_is_killed_at_turn_25_computes_only_what_is_new(tmp_path: Path) -> None:
    """Over HTTP, and with SIGKILL."""
    tiers = json.dumps({"name": "tiered", "stores": [f"file://{tmp_path}"], "rule": "always", "max_wait": 30.0})
    command = ["-m", "quire", "serve", "--port", "0", "--kv-connector", tiers]
    messages: list[dict[str, str]] = []
    before = 0
    with ExitStack() as servers:
        server = servers.enter_context(ServerProcess(command))
        url = server.wait_ready()
        for turn in range(50):
            if turn == 25:
                server.signal(signal.SIGKILL)
                server.wait()
                server = servers.enter_context(ServerProcess(command))
                url = server.wait_ready()
            messages.append({"role": "user", "content": f"{turn}?"})
            asked = {"model": "quire-embedded", "messages": messages, "max_tokens": 2, "temperature": 0}
            answer = httpx2.post(f"{url}/v1/chat/completions", json=asked, timeout=60).json()
            usage = answer["usage"]
            # but for the block that was not full, and the one that the template's last words lie in
            assert usage["prompt_tokens_details"]["cached_tokens"] >= before - 32
            before = usage["prompt_tokens"]
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            while turn == 24 and _num_waiting_bytes(url):
                pass
    assert before > 400


def _num_waiting_bytes(url: str) -> float:
    lines = httpx2.get(f"{url}/metrics").text.splitlines()
    (line,) = [one for one in lines if one.startswith("quire:kv_tiers_waiting_bytes")]
    return float(line.rpartition(" ")[2])


RANKS = [
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    pytest.param({"context_parallel_size": 2}, marks=pytest.mark.nightly),
    pytest.param({"tensor_parallel_size": 2, "context_parallel_size": 2}, marks=pytest.mark.nightly),
    pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.nightly),
    pytest.param({"pipeline_parallel_size": 2, "async_scheduling": True}, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_ranks_that_share_a_model_share_its_blocks(
    path: Path, tmp_path: Path, open_engine: Callable[..., Engine], ranks: dict[str, int]
) -> None:
    store = f"file://{tmp_path}"
    plain = open_engine(path, **ranks)
    expected = plain.run(PROMPTS, SAMPLINGS)
    plain.close()
    for num_fetched in (0, num_full(PROMPTS)):
        engine = open_engine(path, store, **ranks)
        assert engine.run(PROMPTS, SAMPLINGS) == expected
        assert engine.number("fetched_tokens_total") == num_fetched
        engine.close()
    # each block has as many parts as there were ranks
    alone = open_engine(path, store)
    alone.run(PROMPTS, SAMPLINGS)
    assert alone.number("fetched_tokens_total") == 0
    alone.close()
    for file in (one for one in tmp_path.rglob("*") if one.is_file()):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1  # of the part of the last rank
        file.write_bytes(content)
    engine = open_engine(path, store, **ranks)
    assert engine.run(PROMPTS, SAMPLINGS) == expected
    assert engine.number("fetched_tokens_total") == 0


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "sizes"), [("llama", {"num_hidden_layers": 4}), ("gpt_oss", {})], ids=str)
def test_a_stage_in_the_middle_hands_on_what_it_does_not_keep(
    tmp_path: Path, open_engine: Callable[..., Engine], family: str, sizes: dict[str, int]
) -> None:
    path = make_checkpoint(tmp_path / "model", family, **sizes)
    alone = open_engine(path, num_gpu_blocks_override=400)
    expected = alone.run(PROMPTS, SAMPLINGS)
    for is_second in (False, True):
        stages = {"pipeline_parallel_size": 3, "num_gpu_blocks_override": 400}
        engine = open_engine(path, f"file://{tmp_path / 'store'}", **stages)
        assert engine.run(PROMPTS, SAMPLINGS) == expected
        assert (engine.number("fetched_tokens_total") > 0) is is_second
        engine.close()


@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_blocks_that_cannot_be_loaded_fail_one_request_on_all_ranks(
    path: Path,
    tmp_path: Path,
    open_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    ranks: dict[str, int],
) -> None:
    store = f"file://{tmp_path}"
    first = open_engine(path, store, **ranks)
    expected = first.run(PROMPTS[:1], SAMPLINGS[:1])
    first.close()
    second = open_engine(path, store, **ranks)
    with monkeypatch.context() as patched:
        patched.delattr(HostTier, "take")
        with pytest.raises(AssertionError, match="could not be fetched"):
            second.run(PROMPTS[:1], SAMPLINGS[:1])
    assert second.run(PROMPTS[:1], SAMPLINGS[:1]) == expected


def flush(engine: Engine) -> None:
    """Until nothing waits to be written."""
    while engine.number("kv_tiers_waiting_bytes"):
        pass


def test_another_tenant_or_another_secret_finds_nothing(
    path: Path, tmp_path: Path, open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = f"file://{tmp_path}"
    prompt, sampling = [PROMPTS[4]], [SAMPLINGS[0]]
    one, other = (Tenancy(name=name, cache_scope=f"scope of {name}") for name in ("one", "other"))
    first = open_engine(path, store)
    tokens = first.run(prompt, sampling, tenant=one)
    first.close()
    second = open_engine(path, store)
    assert second.run(prompt, sampling, tenant=other) == tokens
    assert second.number("fetched_tokens_total") == 0
    assert second.run(prompt, sampling, tenant=one) == tokens
    assert second.number("fetched_tokens_total") == 44
    second.close()
    monkeypatch.setenv("QUIRE_KV_STORE_SECRET", "another")
    third = open_engine(path, store)
    assert third.run(prompt, sampling, tenant=one) == tokens
    assert third.number("fetched_tokens_total") == 0


def test_adapters_are_told_by_what_is_in_them(path: Path, tmp_path: Path) -> None:
    """Engines number them in the order in which they are loaded; a name may stand for another one tomorrow."""
    options = {**OPTIONS, "enable_lora": True, "max_loras": 2}
    tiers = {"name": "tiered", "stores": [f"file://{tmp_path / 'blocks'}"], "rule": "always", "max_wait": 30.0}
    adapters = {name: make_adapter(tmp_path / name, path, seed=seed) for seed, name in enumerate("abc")}
    prompt, sampling = {"prompt_token_ids": PROMPTS[4]}, SAMPLINGS[0]
    tokens: dict[str, list[int]] = {}
    for names, num_cached in (("ab", [0, 0]), ("cba", [0, 44, 44])):
        found = []
        with LLM(str(path), kv_connector=tiers, **options) as llm:
            for name in names:
                (output,) = llm.generate(prompt, sampling, lora_request=LoRARequest(name, 1, str(adapters[name])))
                assert tokens.setdefault(name, output.outputs[0].token_ids) == output.outputs[0].token_ids
                found.append(output.num_cached_tokens)
        assert found == num_cached
    assert len(set(map(tuple, tokens.values()))) == 3


@pytest.mark.parametrize("options", [{"block_size": 8}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}])
def test_another_layout_finds_nothing(
    path: Path, tmp_path: Path, open_engine: Callable[..., Engine], options: dict[str, Any]
) -> None:
    store = f"file://{tmp_path}"
    first = open_engine(path, store)
    first.run(PROMPTS, SAMPLINGS)
    first.close()
    second = open_engine(path, store, **options)
    second.run(PROMPTS, SAMPLINGS)
    assert second.number("fetched_tokens_total") == 0


def test_other_weights_find_nothing(
    path: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, open_engine: Callable[..., Engine]
) -> None:
    """The same shapes under the same name."""
    store = f"file://{tmp_path}"
    first = open_engine(path, store)
    first.run(PROMPTS, SAMPLINGS)
    first.close()
    other = open_engine(make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", seed=4), store)
    other.run(PROMPTS, SAMPLINGS)
    assert other.number("fetched_tokens_total") == 0


# ---- stores that fail


def test_a_server_that_stops_or_dies_fails_no_request(
    path: Path, tmp_path: Path, expected: list[list[int]], open_engine: Callable[..., Engine]
) -> None:
    with kv_servers.valkey(tmp_path) as server:
        first = open_engine(path, server.address)
        first.run(PROMPTS, SAMPLINGS)
        first.close()
        second = open_engine(path, server.address, tiers={"max_wait": 0.3})
        server.stop()
        assert second.run(PROMPTS[:3], SAMPLINGS[:3]) == expected[:3]
        server.go_on()
        server.kill()
        assert second.run(PROMPTS, SAMPLINGS) == expected
        assert second.number("kv_tiers_late_total") > 0


def test_a_server_that_dies_in_mid_stream(
    path: Path, tmp_path: Path, expected: list[list[int]], open_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Between the question what is there, and the answer what it holds."""
    with kv_servers.valkey(tmp_path) as server:
        first = open_engine(path, server.address)
        first.run(PROMPTS, SAMPLINGS)
        first.close()
        second = open_engine(path, server.address)
        get = GuardedStore.get

        def dies(store: GuardedStore, names: list[bytes]) -> Any:
            server.kill()
            return get(store, names)

        monkeypatch.setattr(GuardedStore, "get", dies)
        assert second.run(PROMPTS, SAMPLINGS) == expected
        assert second.number("kv_store_redis_server_failures_total") > 0
        assert second.number("fetched_tokens_total") == 0


def test_a_flipped_byte_and_a_missing_block_are_computed(
    path: Path, tmp_path: Path, expected: list[list[int]], open_engine: Callable[..., Engine]
) -> None:
    store = f"file://{tmp_path}"
    first = open_engine(path, store)
    first.run(PROMPTS, SAMPLINGS)
    first.close()
    files = sorted(one for one in tmp_path.rglob("*") if one.is_file())
    for number, file in enumerate(files):
        content = bytearray(file.read_bytes())
        if number % 3 == 0:
            content[number % len(content)] ^= 1 << number % 8
            file.write_bytes(content)
        elif number % 3 == 1:
            file.unlink()
    second = open_engine(path, store)
    assert second.run(PROMPTS, SAMPLINGS) == expected
    assert second.number("kv_store_files_corrupt_total") > 0


# ---- options


def test_one_option_is_enough(path: Path, tmp_path: Path) -> None:
    options = {**OPTIONS, "kv_store": f"host?size=10MiB, file://{tmp_path}?size=10MiB"}
    tokens = []
    for _ in range(2):
        with LLM(str(path), **options) as llm:
            (output,) = llm.generate([{"prompt_token_ids": PROMPTS[4]}], SAMPLINGS[0])
            tokens.append(output.outputs[0].token_ids)
    assert tokens[0] == tokens[1]
    assert any(one.is_file() for one in tmp_path.rglob("*"))


@pytest.mark.nightly
def test_copies_of_an_engine_share_the_stores(path: Path, tmp_path: Path, expected: list[list[int]]) -> None:
    options = {**OPTIONS, "data_parallel_size": 2}
    tiers = {"name": "tiered", "stores": [f"file://{tmp_path}"], "rule": "always", "max_wait": 30.0}
    greedy = [{"prompt_token_ids": PROMPTS[place]} for place in (0, 2)], [SAMPLINGS[0], SAMPLINGS[2]]
    for is_second in (False, True):
        with LLM(str(path), kv_connector=tiers, **options) as llm:
            outputs = llm.generate(*greedy)
            assert [one.outputs[0].token_ids for one in outputs] == [expected[0], expected[2]]
            assert [one.num_cached_tokens for one in outputs] == ([28, 0] if is_second else [0, 0])


@pytest.mark.nightly
def test_sessions_and_pinned_prefixes_move_to_another_copy_through_the_stores(path: Path, tmp_path: Path) -> None:
    """The copy that kept them is killed: the other one, and the one in its place, read what it has written."""
    options = {**OPTIONS, "data_parallel_size": 2}
    tiers = {"name": "tiered", "stores": [f"file://{tmp_path}"], "rule": "always", "max_wait": 30.0}
    greedy = SAMPLINGS[0]
    prompt, more = PROMPTS[4], [50, 51, 52]

    async def until_written(engine: AsyncLLM) -> None:
        while (await engine.statistics())["kv_tiers_waiting_bytes"]:
            await asyncio.sleep(0.01)

    async def main() -> list[list[int]]:
        async with AsyncLLM(str(path), kv_connector=tiers, **options) as engine:
            await engine.pin_prefix(TEXT, "kept")
            async with await engine.open_session() as session:
                first = await session.generate({"prompt_token_ids": prompt}, greedy)
                await until_written(engine)
                lost = await killed(engine, session.handle)
                second = await session.generate({"prompt_token_ids": more}, greedy)
                num_before = len(prompt) + len(first.outputs[0].token_ids)
                assert second.num_cached_tokens >= (num_before - 1) // BLOCK_SIZE * BLOCK_SIZE
            await engine.restart_replica(lost)
            await until_written(engine)
            before = [await num_fetched(engine, number) for number in range(2)]
            lost = await killed(engine, f"{PINNED}kept")
            before[lost] = 0
            await engine.restart_replica(lost)
            holder = await keeper(engine, f"{PINNED}kept")
            assert await num_fetched(engine, holder) - before[holder] >= 40
            return [first.outputs[0].token_ids, second.outputs[0].token_ids]

    async def keeper(engine: AsyncLLM, handle: str) -> int:
        for number in range(2):
            if any(one["handle"] == handle for one in await engine.control(f"replica.{number}.list_kept")):
                return number
        raise AssertionError("nobody keeps it")

    async def num_fetched(engine: AsyncLLM, number: int) -> int:
        return int((await engine.control(f"replica.{number}.statistics"))["fetched_tokens_total"])

    async def killed(engine: AsyncLLM, handle: str) -> int:
        number = await keeper(engine, handle)
        os.kill(engine.processes[number].pid, signal.SIGKILL)
        while not engine.take_losses():
            await asyncio.sleep(0.01)
        return number

    first, second = asyncio.run(main())
    with LLM(str(path), **OPTIONS) as llm:
        (one,) = llm.generate([{"prompt_token_ids": prompt}], greedy)
        (other,) = llm.generate([{"prompt_token_ids": [*prompt, *first, *more]}], greedy)
    assert [one.outputs[0].token_ids, other.outputs[0].token_ids] == [first, second]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_store": "file:///tmp/x,"}, "an address is empty"),
        ({"kv_store": "host?size=1GiB,host?size=2GiB"}, "address 2 names the place of another"),
        ({"kv_store": "file:///tmp/x,host,file:///tmp/x?size=1GiB"}, "address 3 names the place of another"),
        ({"kv_store": "tape:///tmp/x"}, "must begin with one of"),
        ({"kv_store": "host?size=much"}, r"kv_store=host: size=much: must be a size"),
        ({"kv_store": "host?bytes=5"}, r"host\?bytes=5: must be a size .* host\?size=4GiB"),
        ({"kv_store": "host", "kv_connector": {"name": "memory"}}, "one of the two"),
        ({"kv_store": "host", "enable_prefix_caching": False}, "enable_prefix_caching"),
    ],
)
def test_what_cannot_be_combined_is_refused(
    path: Path, options: dict[str, Any], reason: str, open_engine: Callable[..., Engine]
) -> None:
    with pytest.raises(OptionError, match=reason):
        open_engine(path, **options)


def test_states_are_moved_between_two_halves_alone(tmp_path: Path, open_engine: Callable[..., Engine]) -> None:
    with pytest.raises(OptionError, match=r"recurrent layers.* Give a role"):
        open_engine(make_checkpoint(tmp_path, "qwen3_next"), kv_store="host")
