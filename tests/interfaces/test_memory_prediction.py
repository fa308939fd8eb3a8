"""What a plan and an engine's start say that it will take is what it takes once its cache is full."""

import asyncio

import pytest
from benchmarks.memory_prediction import predict_and_measure

from quire.config.memory_budget import engine_bytes
from quire.interfaces.cli.plan import bytes_in_all
from quire.interfaces.setup import configured
from quire.testing.tiny_checkpoints import make_checkpoint, shape_0_6b_config, write_tokenizer

# records of decisions come with time
_SIZES = {"max_num_batched_tokens": 512, "max_num_seqs": 16, "recorder_bytes": 1 << 20}


def assert_within_5_percent(**options):
    prediction = asyncio.run(predict_and_measure(**_SIZES, **options))
    assert prediction.by_start == pytest.approx(prediction.measured, rel=0.05), prediction
    assert prediction.by_plan == pytest.approx(prediction.measured, rel=0.05), prediction


def test_of_the_embedded_model():
    assert_within_5_percent(model="embedded", kv_cache_memory_bytes=48 << 20)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_of_tiny_models(tmp_path, family):
    path = make_checkpoint(tmp_path / family, family)
    assert_within_5_percent(model=str(path), kv_cache_memory_bytes=32 << 20)


def test_models_that_share_a_memory_are_counted_as_planned():
    options = {"model": "embedded", "kv_cache_memory_bytes": 3 << 20}
    config = configured({**options, "max_num_seqs": 16})
    argv = ["embedded", "--dtype", config.worker.dtype, "--max-num-seqs", "16"]
    assert engine_bytes(config) == bytes_in_all(argv, 3 << 20)


@pytest.mark.nightly
def test_of_a_larger_one(tmp_path):
    """Four layers of a model of 0.6 billion parameters, and all of its vocabulary."""
    path = shape_0_6b_config(tmp_path / "wide", num_hidden_layers=4)
    write_tokenizer(path)
    assert_within_5_percent(model=str(path), kv_cache_memory_bytes=128 << 20, load_format="dummy", max_model_len=1024)
