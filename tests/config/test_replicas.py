"""Several copies of the engine as a user asks for them."""

import sys

import pytest

from quire.config import EngineOptions, resolve
from quire.config.processors import processors
from quire.errors import OptionError
from quire.testing.fake_llm import fake_config


def test_threads_are_divided_over_copies(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    # as if it were not a small model, which has one thread whatever the machine
    monkeypatch.setattr(sys.modules["quire.config.resolve"], "_SMALL_MODEL_BYTES", 0)
    config = fake_config(data_parallel_size=2)
    assert config.worker.num_threads == max(1, processors().num_threads // 2)


def test_each_copy_has_processors_of_its_own():
    worker = fake_config(num_threads=2, data_parallel_size=2).worker
    placed = [worker.of_replica(number) for number in range(2)]
    if worker.processors is None:
        assert [one.processors for one in placed] == [None, None]
    else:
        assert placed[0].processors + placed[1].processors == worker.processors


def test_the_key_of_the_names_is_not_shown():
    config = fake_config(data_parallel_size=2)
    assert config.prefix_hash_key == b""
    assert "secret" not in repr(config.of_replica(1, b"secret"))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"engine_process": False}, "engine_process=False"),
        ({"kv_connector": {"name": "memory", "store": "x"}}, "kv_connector=memory"),
        ({"device": "cuda"}, "device=cuda"),
    ],
)
def test_what_copies_cannot_do_yet_is_refused_by_name(options, why):
    with pytest.raises(OptionError, match=why):
        resolve(EngineOptions(data_parallel_size=2, **options))


def test_a_policy_needs_something_to_choose_from():
    with pytest.raises(OptionError, match="there is one"):
        resolve(EngineOptions(routing_policy="round_robin"))
