"""Models that are loaded when a request names them: room, who leaves, failures, storms. The engines are fakes, the
clock too."""

import asyncio
import shutil
import threading
from types import SimpleNamespace

import httpx2 as httpx
import pytest
from tests.support.server_process import ServerProcess

from quire.config.memory_budget import engine_bytes
from quire.config.model_source import embedded_path
from quire.errors import ModelError, OptionError
from quire.interfaces.server import further_models
from quire.interfaces.server.access.caller import Caller, EverybodyMayEnter, acting_for
from quire.interfaces.server.further_models import FurtherModels, configs_of
from quire.interfaces.server.options import ServerOptions
from quire.interfaces.server.parts import parts_of
from quire.interfaces.server.wire.errors import ApiError, rate_limited
from quire.interfaces.setup import configured


def config_of(name):
    return SimpleNamespace(served_model_name=name, is_own_name=lambda other: other == name)


class Engine:
    """What a table of models sees of one."""

    def __init__(self, config, log):
        self.config = config
        self.dead_reason = None
        self.name = config.served_model_name
        self._log = log

    async def start(self):
        await asyncio.sleep(0.01)
        if self.name == "broken":
            raise ModelError("broken: no weights there.")
        self._log.append(f"+{self.name}")

    def shutdown(self):
        self._log.append(f"-{self.name}")


class Held:
    """What a request holds."""

    def __init__(self, name, engine):
        self.name = name
        self.engine = engine


class Table:
    """Models of 10 bytes each; `log` has who came and who went."""

    def __init__(self, names, memory, keep_alive=1000.0, **options):
        self.log = []
        self.now = 0.0
        self.made = 0
        configs = [config_of(name) for name in names]
        self.models = FurtherModels(
            configs, memory, keep_alive, self._make, lambda: self.now, size_of=lambda config: 10, **options
        )

    def _make(self, config):
        self.made += 1
        return Engine(config, self.log)

    async def get(self, name):
        return await self.models.get(name, Held)


@pytest.fixture
def run(monkeypatch):
    """Runs a test with a table; times are those of its clock, and waiting is short."""
    monkeypatch.setattr(further_models, "_LOOK_SECONDS", 0.001)

    def start(test, *names, memory=20, **options):
        async def main():
            table = Table(names, memory, **options)
            try:
                await test(table)
            finally:
                await table.models.close()

        asyncio.run(asyncio.wait_for(main(), 60))

    return start


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def test_one_that_is_named_comes_once(run):
    async def test(table):
        held = await asyncio.gather(*(table.get("a") for _ in range(8)))
        assert len({id(one.engine) for one in held}) == 1
        assert table.log == ["+a"]
        assert list(table.models.loaded) == ["a"]

    run(test, "a", "b")


def test_the_least_recently_used_leaves_and_none_that_is_held(run):
    async def test(table):
        first = await table.get("a")
        table.now = 10
        await table.get("b")
        table.now = 20
        # a is older, and held
        await table.get("c")
        assert table.log == ["+a", "+b", "-b", "+c"]
        del first
        table.now = 30
        await table.get("b")
        assert table.log[-2:] == ["-a", "+b"]

    run(test, "a", "b", "c")


def test_who_finds_no_room_is_told_so_and_harms_nobody(run):
    async def test(table):
        held = [await table.get("a"), await table.get("b")]
        table.now = 10
        asking = asyncio.ensure_future(table.get("c"))
        await asyncio.sleep(0.02)
        assert not asking.done()
        table.now = 1000
        with pytest.raises(ApiError, match="in use") as failure:
            await asking
        assert failure.value.status == 503
        assert [one.engine.name for one in held] == ["a", "b"]
        assert sorted(table.models.loaded) == ["a", "b"]

    run(test, "a", "b", "c")


def test_one_that_cannot_be_loaded_is_not_tried_at_once_again(run):
    async def test(table):
        for _ in range(5):
            with pytest.raises(ApiError, match="could not be loaded now") as failure:
                await table.get("broken")
            assert failure.value.status == 503
            assert "retry-after" in failure.value.headers
        assert table.made == 1
        await table.get("a")
        table.now = 6
        with pytest.raises(ApiError):
            await table.get("broken")
        table.now = 12
        with pytest.raises(ApiError):
            await table.get("broken")
        assert table.made == 3, "the second pause is twice as long"

    run(test, "a", "broken")


def test_one_that_is_too_large_says_what_to_do():
    with pytest.raises(OptionError, match="further_models_memory is 0"):
        configs_of(["embedded"], 100)


def test_a_storm_of_changes_loads_no_more_than_stays_allow(run):
    async def test(table):
        async def ask(name):
            for _ in range(20):
                await table.get(name)

        asking = asyncio.gather(ask("a"), ask("b"))
        for second in range(60):
            await asyncio.sleep(0.01)
            table.now = second
            if asking.done():
                break
        await asking
        assert table.made <= 2 + 60 / 5

    run(test, "a", "b", memory=10)


def test_one_that_nobody_uses_leaves(run):
    async def test(table):
        held = await table.get("a")
        table.now = 500
        await asyncio.sleep(0.02)
        assert table.log == ["+a"], "it is held"
        del held
        table.now = 1499
        await asyncio.sleep(0.02)
        assert table.models.seconds_left("a") == 1
        table.now = 1500
        await until(lambda: table.log == ["+a", "-a"])
        await table.get("a")
        table.models.keep("a", 0)
        table.now += 4
        await asyncio.sleep(0.02)
        assert list(table.models.loaded) == ["a"], "each load is worth a stay"
        table.now += 1
        await until(lambda: table.log == ["+a", "-a"] * 2)
        table.models.keep("a", 0)
        await table.get("a")
        assert table.models.seconds_left("a") == 1000, "who came before it was loaded says nothing"
        table.models.keep("a", -1)
        table.now = 10**9
        await asyncio.sleep(0.02)
        assert list(table.models.loaded) == ["a"]

    run(test, "a")


def test_none_is_loaded_while_another_one_still_leaves(run):
    async def test(table):
        held = await table.get("a")
        engine = held.engine
        leaves, ends = engine.shutdown, threading.Event()

        def slow():
            ends.wait(30)
            leaves()

        engine.shutdown = slow
        del held
        table.now = 5000
        await until(lambda: not table.models.loaded)
        asking = asyncio.ensure_future(table.get("a"))
        await asyncio.sleep(0.05)
        assert table.log == ["+a"]
        ends.set()
        await asking
        assert table.log == ["+a", "-a", "+a"]

    run(test, "a")


def test_an_unforeseen_failure_pauses_as_well(run, monkeypatch):
    async def start(self):
        raise ValueError("what nobody thought of")

    monkeypatch.setattr(Engine, "start", start)

    async def test(table):
        for _ in range(3):
            with pytest.raises(ApiError, match="could not be loaded now"):
                await table.get("a")
        assert table.made == 1

    run(test, "a")


def test_only_so_many_wait(run, monkeypatch):
    monkeypatch.setattr(further_models, "_MOST_WAITING", 3)

    async def test(table):
        asked = await asyncio.gather(*(table.get("a") for _ in range(5)), return_exceptions=True)
        refused = [one for one in asked if isinstance(one, ApiError)]
        assert [one.status for one in refused] == [429, 429]
        # those places are free again
        await asyncio.gather(*(table.get("b") for _ in range(3)))

    run(test, "a", "b")


def test_who_waits_too_long_is_told_so_and_the_load_goes_on(run, monkeypatch):
    monkeypatch.setattr(further_models, "_LONGEST_WAIT_SECONDS", 0.001)

    async def test(table):
        with pytest.raises(ApiError, match="was not loaded within"):
            await table.get("a")
        await until(lambda: table.log == ["+a"])
        await table.get("a")
        assert table.made == 1

    run(test, "a")


def test_what_holds_for_all_requests_holds_for_these_models():
    """A filter would be none if another model answered without it."""
    hook = 'banned_text:{"texts": ["secret"]}'
    rules = {"hooks": (hook,), "hook_timeout": 3.0, "max_logprobs": 7, "tenant_cache_share": 0.5}
    own = configured({"model": "embedded", "limit_mm_per_prompt": {"image": 0}, **rules})
    models = parts_of(ServerOptions(further_models=("embedded",)))["models"]
    models.serve(SimpleNamespace(config=own))
    (name,) = models.further.names
    config = models.further.config(name)
    assert {rule: getattr(config, rule) for rule in rules} == rules
    assert config.images.max_images == 0
    assert config.kv_cache_memory_bytes == further_models.KV_CACHE_BYTES


def test_nothing_is_loaded_for_a_request_that_finds_no_place():
    class NoPlace(EverybodyMayEnter):
        def check(self, *_, **__):
            raise rate_limited("Too many.", 1)

    async def main():
        further = parts_of(ServerOptions(further_models=("embedded",)))["models"].further
        (name,) = further.names
        with acting_for(Caller(admission=NoPlace())), pytest.raises(ApiError, match="Too many"):
            await further.get(name, Held)
        assert not further.loaded
        await further.close()

    asyncio.run(main())


def test_one_whose_engine_died_comes_again(run):
    async def test(table):
        held = await table.get("a")
        held.engine.dead_reason = "killed"
        again = await table.get("a")
        assert again.engine is not held.engine
        assert table.log == ["+a", "-a", "+a"]

    run(test, "a")


def test_an_engine_that_dies_again_and_again_is_left_alone(run):
    async def test(table):
        for death in range(3):
            held = await table.get("a")
            held.engine.dead_reason = f"killed {death}"
        for _ in range(4):
            with pytest.raises(ApiError, match="more than 2 restarts within 60 s") as failure:
                await table.get("a")
            assert failure.value.status == 503
            assert failure.value.headers["retry-after"]
        assert table.log == ["+a", "-a"] * 3, "the dead one holds nothing"
        await table.get("b")
        # after that time it may try again
        table.now = 61
        await table.get("a")
        assert table.log[-1] == "+a"

    run(test, "a", "b", restarts=(2, 60.0))


def test_a_load_that_hangs_keeps_its_own_room_alone(run, monkeypatch):
    starts = Engine.start

    async def start(self):
        if self.name == "hangs":
            await asyncio.Event().wait()
        await starts(self)

    monkeypatch.setattr(Engine, "start", start)
    monkeypatch.setattr(further_models, "_TURN_SECONDS", 0.02)

    async def test(table):
        hanging = asyncio.ensure_future(table.get("hangs"))
        await asyncio.sleep(0)
        for name in "abababab":
            table.now += 10
            await table.get(name)
        assert not hanging.done()
        assert table.log == ["+a", *["-a", "+b", "-b", "+a"] * 3, "-a", "+b"], "there is room for one beside it"
        with pytest.raises(ApiError, match="could not be loaded now") as failure:
            await hanging
        assert failure.value.status == 503
        assert table.log[-1] == "-hangs"
        table.now = 100
        await table.get("a")
        assert sorted(table.models.loaded) == ["a", "b"], "its room is free"

    run(test, "a", "b", "hangs", load_seconds=1.0)


def test_the_server_ends_while_one_is_loaded(run, monkeypatch):
    async def start(self):
        await asyncio.Event().wait()

    monkeypatch.setattr(Engine, "start", start)

    async def test(table):
        asking = asyncio.ensure_future(table.get("a"))
        await until(lambda: table.made)
        await table.models.close()
        assert table.log == ["-a"]
        with pytest.raises(asyncio.CancelledError):
            await asking

    run(test, "a")


def test_folders_are_called_by_as_little_of_their_paths_as_tells_them_apart(tmp_path):
    folders = [tmp_path / name for name in ("one/model", "two/model", "other")]
    for folder in folders:
        shutil.copytree(embedded_path(), folder)
    configs = configs_of([str(folder) for folder in folders], 2**40)
    assert [config.served_model_name for config in configs] == ["one/model", "two/model", "other"]
    assert all(config.is_own_name(str(folder)) for config, folder in zip(configs, folders, strict=True))


def test_a_server_of_three_models(tmp_path):
    """Real engines: two copies of the embedded model take turns in room for one of them."""
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        shutil.copytree(embedded_path(), folder)
    one = engine_bytes(configs_of([str(folders[0])], 2**40)[0])
    words = [word for folder in folders for word in ("--further-model", str(folder))]
    command = ["-m", "quire.interfaces.cli", "serve", "--port", "0", *words, "--further-models-memory", str(one)]
    with ServerProcess(command) as server, httpx.Client(base_url=server.wait_ready(300), timeout=120) as http:

        def answer(model):
            body = {"model": model, "messages": [{"role": "user", "content": "What is seven plus five?"}]}
            return http.post("/v1/chat/completions", json={**body, "temperature": 0, "max_tokens": 8})

        def loaded():
            return [one["name"].rpartition("/")[2] for one in http.get("/api/ps").json()["models"]]

        own = answer("quire-embedded").json()["choices"][0]["message"]
        assert loaded() == ["quire-embedded"]
        for name in ("first", "second"):
            assert answer(name).json()["choices"][0]["message"] == own
            assert loaded() == ["quire-embedded", name]
        assert [len(http.get(path).json()[key]) for path, key in (("/v1/models", "data"), ("/api/tags", "models"))] == [
            3,
            3,
        ]
        # where they lie is nobody's business, and no harm to say
        assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["quire-embedded", "first", "second"]
        assert http.get(f"/v1/models/{folders[0]}").json()["root"] == "first"
        assert str(tmp_path) not in http.get("/v1/models").text + http.get("/api/tags").text + http.get("/api/ps").text
        assert str(tmp_path) not in answer("second").text
        assert "completion" in http.post("/api/show", json={"model": "first"}).json()["capabilities"]
        assert answer("third").status_code == 404
        # one that is broken meanwhile: its requests hear of it, and nobody else does
        (folders[0] / "model.safetensors").write_bytes(b"no weights")
        failed = answer("first")
        assert failed.status_code == 503
        assert "could not be loaded" in failed.json()["error"]["message"]
        assert answer("quire-embedded").status_code == 200
        assert http.post("/api/chat", json={"model": "second", "keep_alive": 0}).json()["done_reason"] == "unload"
        server.signal()
        assert server.wait() == 0
        assert "Traceback" not in server.output, server.output
