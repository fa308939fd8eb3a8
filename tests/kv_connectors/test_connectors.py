"""Connectors by name, the store of the memory connector, and what a request says about its KV."""

from __future__ import annotations

import gc
import importlib
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
import torch

from quire import kv_connectors
from quire.config import KVConnectorConfig
from quire.errors import OptionError
from quire.kv_connectors import tiered
from quire.kv_connectors.connector import BlockLoad, BlockStore, CacheLayout, NoSchedulerHalf, NoWorkerHalf
from quire.kv_connectors.memory.store import PrefixStore, StoredPrefix, open_store
from quire.kv_connectors.memory.worker import MemoryWorker
from quire.kv_connectors.tiered.settings import TierSettings
from quire.message_encoding import decode_to_core, encode
from quire.messages import EngineRequest, KVTransfer, LayerSpec
from quire.sampling_params import SamplingParams

SPEC = LayerSpec(name="layer 0", num_kv_heads=2, key_dim=4, value_dim=4, bytes_per_element=4)
LAYOUT = CacheLayout.of("a model", "float32", 4, [["layer 0"]], [SPEC])


def prefix_of(key: str, num_bytes: int = 100) -> StoredPrefix:
    return StoredPrefix(key, LAYOUT, np.zeros(0, dtype=np.int32), [np.zeros(num_bytes, dtype=np.uint8)])


# ---- by name


def test_without_a_name_there_is_nothing() -> None:
    assert isinstance(kv_connectors.make_scheduler_half(None, LAYOUT), NoSchedulerHalf)
    assert isinstance(kv_connectors.make_worker_half(None), NoWorkerHalf)


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_connector_from_outside_the_tree(monkeypatch: pytest.MonkeyPatch, is_broken: bool) -> None:
    class Elsewhere:
        @staticmethod
        def worker_half(*, folder: str) -> Any:
            return folder

    def load(_: EntryPoint) -> Any:
        if is_broken:
            raise ImportError("no module named nowhere")
        return Elsewhere

    entry = EntryPoint(name="elsewhere", value=f"{__name__}:Elsewhere", group="quire.kv_connectors")
    monkeypatch.setattr(kv_connectors, "entry_points", lambda group: [entry] if group == entry.group else [])
    monkeypatch.setattr(EntryPoint, "load", load)
    config = KVConnectorConfig("elsewhere", {"folder": "/kv"})
    if is_broken:
        with pytest.raises(OptionError, match=r"kv_connector=elsewhere.*no module named nowhere"):
            kv_connectors.make_worker_half(config)
    else:
        assert kv_connectors.make_worker_half(config) == "/kv"
        with pytest.raises(OptionError, match=r"kv_connector=.*colour"):
            kv_connectors.make_worker_half(KVConnectorConfig("elsewhere", {"colour": "red"}))


def test_both_halves_are_modules_that_load_without_each_other() -> None:
    memory = importlib.import_module("quire.kv_connectors.memory")
    store = open_store("both halves")
    assert memory.worker_half(store="both halves")._store is store
    assert memory.scheduler_half(LAYOUT, store="both halves").statistics()["num_stored_prefixes"] == 0


# ---- layouts


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"model": "b model"}, "model a model, not b model"),
        ({"dtype": "float16"}, "dtype float32, not float16"),
        ({"block_size": 16}, "block_size 4, not 16"),
        ({"groups": ()}, "layers"),
    ],
)
def test_a_layout_says_in_what_another_differs(changes: dict[str, Any], words: str | None) -> None:
    fields = {"model": "a model", "dtype": "float32", "block_size": 4, "groups": ((SPEC,),)}
    assert LAYOUT.difference(CacheLayout(**{**fields, **changes})) == words


# ---- the store


def test_the_least_recently_used_prefix_leaves_first() -> None:
    store = PrefixStore(max_bytes=250)
    store.put(prefix_of("a"))
    store.put(prefix_of("b"))
    used = store.find("a")
    assert used is not None
    store.take(store.lend(used))
    store.put(prefix_of("c"))
    assert [key for key in "abc" if store.find(key)] == ["a", "c"]
    assert store.num_bytes == 200


def test_a_prefix_takes_the_place_of_what_was_there() -> None:
    store = PrefixStore(max_bytes=250)
    old = prefix_of("a")
    store.put(old)
    number = store.lend(old)
    store.put(prefix_of("a", 50))
    assert store.num_bytes == 50
    assert store.take(number) is old, "it was on its way"


def test_a_prefix_that_is_larger_than_the_store_is_not_kept() -> None:
    store = PrefixStore(max_bytes=250)
    store.put(prefix_of("a", 251))
    assert store.find("a") is None
    assert store.num_bytes == 0


def test_a_store_lives_as_long_as_somebody_has_it() -> None:
    store = open_store("short-lived", 250)
    store.put(prefix_of("a"))
    again = open_store("short-lived")
    assert again.find("a")
    assert again.max_bytes == 250
    del store, again
    gc.collect()
    assert open_store("short-lived").find("a") is None


@pytest.mark.parametrize("max_bytes", [0, -1, "2 pounds", "0", True, 1.5])
def test_a_size_that_is_none(max_bytes: Any) -> None:
    with pytest.raises(OptionError, match=rf"^kv_connector: max_bytes=.*{max_bytes}.*: must be a size .*500M"):
        open_store("a", max_bytes)


def test_sizes_are_written_as_elsewhere() -> None:
    assert open_store("of a size", "1.5GiB").max_bytes == 3 * 2**29
    settings = TierSettings.of(["file:///kv"], "2GiB", 1.0, "cost")
    assert settings == TierSettings.of(("file:///kv",), 2**31, 1.0, "cost")
    with pytest.raises(OptionError, match=r"^host_bytes=much: must be a size"):
        tiered.worker_half(host_bytes="much")


# ---- what is given to a connector


class Disk:
    """A connector from elsewhere."""

    @staticmethod
    def scheduler_half(layout: CacheLayout, *, folder: str, depth: int = 1) -> Any:
        return layout, folder, depth + 1

    @staticmethod
    def worker_half(**args: Any) -> Any:
        return args


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint(name="disk", value=f"{__name__}:Disk", group="quire.kv_connectors")
    monkeypatch.setattr(kv_connectors, "entry_points", lambda group: [entry])
    monkeypatch.setattr(EntryPoint, "load", lambda self: Disk)


@pytest.mark.usefixtures("disk")
def test_what_fits_is_handed_on() -> None:
    config = KVConnectorConfig("disk", {"folder": "/kv"})
    assert kv_connectors.make_scheduler_half(config, LAYOUT) == (LAYOUT, "/kv", 2)
    assert kv_connectors.make_worker_half(KVConnectorConfig("disk", {"colour": "red"})) == {"colour": "red"}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"fodler": "/kv"}, "kv_connector=disk: fodler: there is no such argument; it takes folder, depth. Did"),
        ({"folder": "/kv", "layout": 1}, "kv_connector=disk: layout: there is no such argument; it takes folder"),
        ({"depth": 2}, 'kv_connector=disk: folder is missing. Give it: {"name": "disk", "folder": ...}.'),
        ({"folder": "redis://user:secret@host", "depth": "2"}, "kv_connector=disk: its code raised TypeError: "),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("disk")
def test_what_does_not_fit_is_said_in_one_line(args: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError) as refused:
        kv_connectors.make_scheduler_half(KVConnectorConfig("disk", args), LAYOUT)
    text = str(refused.value)
    assert text.startswith(says)
    assert "\n" not in text
    assert "secret" not in text
    assert "()" not in text, "a call in Python means nothing to whoever wrote an option"


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("memory", {"stroe": "a"}, 'kv_connector=memory: stroe: .* Did you mean "store"'),
        ("tiered", {"host_byte": 1}, 'kv_connector=tiered: host_byte: .* Did you mean "host_bytes"'),
        ("tiered", {"sharers": 1}, "kv_connector=tiered: sharers: there is no such argument"),
        ("tiered", {"stores": 5}, "^stores=5: must be a list of addresses"),
    ],
)
def test_what_ours_do_not_take(name: str, args: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        kv_connectors.make_worker_half(KVConnectorConfig(name, args))


# ---- tensors


def test_blocks_come_back_into_other_blocks() -> None:
    """Two groups over the same tensors; only the blocks from the first missing one on."""
    generator = torch.Generator().manual_seed(0)
    source = [torch.rand(9, 2, 4, 3, generator=generator), torch.rand(9, 2, 4, 5, generator=generator)]
    target = [torch.zeros_like(tensor) for tensor in source]
    store = PrefixStore()
    first, second = MemoryWorker(store), MemoryWorker(store)
    first.open(LAYOUT, source)
    second.open(LAYOUT, target)
    tokens = np.arange(10, dtype=np.int32)
    first.store([BlockStore(row=0, key="a", token_ids=tokens, blocks=[[3, 8, 1], [0, 2, 7]])])
    kept = [tensor.clone() for tensor in source]
    for tensor in source:
        tensor.zero_()
    found = store.find("a")
    assert found is not None
    second.load([BlockLoad(row=0, source=store.lend(found), first_block=1, blocks=[[5, 6], [4, 0]])])
    for before, after in zip(kept, target, strict=True):
        assert torch.equal(after[[5, 6, 4, 0]], before[[8, 1, 2, 7]])
        assert not after[[1, 2, 3, 7, 8]].any()


# ---- messages


def test_what_a_request_says_crosses_a_socket() -> None:
    transfer = KVTransfer(store="a", fetch="b", num_fetch_tokens=2, num_output_tokens=1)
    request = EngineRequest(request_id=1, prompt_token_ids=[1, 2, 3], sampling=SamplingParams(), transfer=transfer)
    assert decode_to_core(encode(request)) == request
