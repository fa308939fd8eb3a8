"""Weights that come packed out of a file are those that were packed, and a file that does not fit is not used."""

import io
import json
import os
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.testing.model_harness import ModelHarness, worker_config
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker import packed_store
from quire.worker.kernels import cpu
from quire.worker.model_loader import load_model

pytestmark = pytest.mark.skipif(not cpu.load(), reason="weights are packed by C++ kernels")
IDS = list(range(3, 60))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_store, "_SMALLEST", 1)
    yield tmp_path / "cache" / "packed"
    for thread in threading.enumerate():
        if thread.name == "quire-keep-packed":
            thread.join()


@pytest.fixture
def checkpoint(tmp_path):
    return make_checkpoint(tmp_path / "model", "qwen3_tied")


def load(path, *, limit=1 << 30, **changes):
    return load_model(worker_config(path, attention_backend="cpu", packed_weights_cache=limit, **changes))


def files_in(folder, count):
    for _ in range(400):
        files = sorted(folder.glob("*.weights")) if folder.is_dir() else []
        if len(files) == count and not list(folder.glob("*.part")):
            return files
        time.sleep(0.02)
    raise AssertionError(f"{files} instead of {count} files")


def logits(model):
    return ModelHarness(model).run(0, IDS)


def is_mapped(model, folder):
    with open("/proc/self/maps", encoding="utf-8") as maps:
        spans = [line.split()[0].split("-") for line in maps if str(folder) in line]
    packed = [module.packed.data_ptr() for module in model.modules() if getattr(module, "packed", None) is not None]
    assert packed
    return all(any(int(a, 16) <= address < int(b, 16) for a, b in spans) for address in packed)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("name", ["qwen3_tied", "llama_bias", "gpt2"])
def test_the_second_start_maps_what_the_first_one_packed(name, quantization, tmp_path, folder):
    path = make_checkpoint(tmp_path / name, name)
    first = load(path, dtype="bfloat16", quantization=quantization)
    assert not is_mapped(first, folder)
    files_in(folder, 1)
    second = load(path, dtype="bfloat16", quantization=quantization)
    assert is_mapped(second, folder)
    assert torch.equal(logits(first), logits(second))


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_head_that_is_no_embedding_comes_back_as_one(quantization, checkpoint, folder):
    """Though config.json says that it is tied."""
    weights = load_file(checkpoint / "model.safetensors")
    head = weights["model.embed_tokens.weight"] + 0.25
    save_file({**weights, "lm_head.weight": head}, checkpoint / "model.safetensors", metadata={"format": "pt"})
    first = load(checkpoint, quantization=quantization)
    files_in(folder, 1)
    second = load(checkpoint, quantization=quantization)
    assert is_mapped(second, folder)
    assert [model.lm_head.is_tied for model in (first, second)] == [False, False]
    assert torch.equal(logits(first), logits(second))


def test_a_tied_head_stays_tied(checkpoint, folder):
    load(checkpoint)
    files_in(folder, 1)
    assert load(checkpoint).lm_head.is_tied


def test_each_form_has_a_file_of_its_own(checkpoint, folder):
    for count, changes in enumerate([{}, {"dtype": "bfloat16"}, {"quantization": "int8"}], 1):
        load(checkpoint, **changes)
        files_in(folder, count)


def test_a_changed_checkpoint_is_packed_anew(checkpoint, folder):
    load(checkpoint)
    files_in(folder, 1)
    (weights,) = checkpoint.glob("*.safetensors")
    os.utime(weights, ns=(1, 1))
    assert not is_mapped(load(checkpoint), folder)


def _odd(whole):
    head, _, rest = whole.partition(b"\n")
    index = {name: [kind, [-1, -1], offset] for name, (kind, _, offset) in json.loads(head).items()}
    return json.dumps(index).encode() + b"\n" + rest


@pytest.mark.parametrize("damage", ["cut", "empty", "garbage", "no index", "other model", "shape"])
def test_a_damaged_file_is_written_anew(damage, checkpoint, tmp_path, folder):
    expected = logits(load(checkpoint))
    (file,) = files_in(folder, 1)
    whole = file.read_bytes()
    if damage == "other model":
        load(make_checkpoint(tmp_path / "other", "llama"))
        (other,) = set(files_in(folder, 2)) - {file}
        other.replace(file)
    else:
        file.write_bytes(
            {
                "cut": whole[: len(whole) // 2],
                "empty": b"",
                "garbage": b"\xff" * 5000,
                "no index": b"[]\n" + whole,
                "shape": _odd(whole),
            }[damage]
        )
    model = load(checkpoint)
    assert torch.equal(logits(model), expected)
    for _ in range(400):
        if file.stat().st_size == len(whole):
            break
        time.sleep(0.02)
    assert is_mapped(load(checkpoint), folder)


def test_the_limit(checkpoint, tmp_path, folder):
    load(checkpoint)
    (old,) = files_in(folder, 1)
    size = old.stat().st_size
    os.utime(old, (1, 1))
    load(make_checkpoint(tmp_path / "again", "qwen3_tied"), limit=int(1.5 * size))
    for _ in range(400):
        if not old.exists():
            break
        time.sleep(0.02)
    (kept,) = files_in(folder, 1)
    assert kept != old
    load(checkpoint, limit=100)
    assert files_in(folder, 1) == [kept], "one model alone would be too large"


def test_switched_off(checkpoint, folder):
    load(checkpoint, limit=0)
    assert "quire-keep-packed" not in [thread.name for thread in threading.enumerate()]
    assert not folder.exists()


def test_a_folder_of_others_is_not_trusted(checkpoint, folder, caplog):
    expected = logits(load(checkpoint))
    files_in(folder, 1)
    folder.chmod(0o777)
    model = load(checkpoint)
    assert not is_mapped(model, folder)
    assert torch.equal(logits(model), expected)
    assert "written by others" in caplog.text


def test_a_program_waits_for_its_file_though_a_daemon_thread_has_loaded_the_model(checkpoint, folder, monkeypatch):
    writers = []
    monkeypatch.setattr(packed_store.PackedStore, "_save", lambda *_: writers.append(threading.current_thread()))
    # as an engine in a thread does
    loading = threading.Thread(target=load, args=(checkpoint,), daemon=True)
    loading.start()
    loading.join()
    for thread in threading.enumerate():
        if thread.name == "quire-keep-packed":
            thread.join()
    assert [thread.daemon for thread in writers] == [False]


def test_pieces_begin_at_multiples_of_their_length(tmp_path):
    size = packed_store._WRITTEN_AT_ONCE
    content = bytearray()
    places: list[int] = []

    class Out(io.RawIOBase):
        def write(self, data):
            if len(content) % size == 0:
                places.append(len(content))
            taken = data[: max(1, len(data) * 2 // 3)]  # a system may take less than it is given
            content.extend(taken)
            return len(taken)

    whole = bytes(range(256)) * (5 * size // 512)
    pieces = packed_store._LargePieces(Out())
    for start in range(0, len(whole), 1_000_003):
        pieces.add(memoryview(whole[start : start + 1_000_003]))
    pieces.write_rest()
    assert bytes(content) == whole
    assert places == [0, size, 2 * size]


def test_weights_change_when_those_of_the_checkpoint_are_kept(checkpoint, monkeypatch):
    may_write = threading.Event()
    kept = []

    def save(*_):
        may_write.wait()
        kept.append("kept")

    monkeypatch.setattr(packed_store.PackedStore, "_save", save)
    model = load(checkpoint)
    waiting = threading.Thread(target=lambda: (packed_store.settle(model), kept.append("changed")))
    waiting.start()
    may_write.set()
    waiting.join()
    assert kept == ["kept", "changed"]


def test_a_file_in_a_folder_that_only_others_may_write_is_used(checkpoint, folder, monkeypatch):
    """As root leaves it in an image that somebody else runs, or on a file system that is read-only."""
    load(checkpoint)
    files_in(folder, 1)

    def refuse(*_, **__):
        raise PermissionError("not yours")

    monkeypatch.setattr(packed_store.os, "utime", refuse)
    assert is_mapped(load(checkpoint), folder)
