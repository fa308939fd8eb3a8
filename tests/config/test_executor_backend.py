"""By what workers are placed: what is asked for, what fits, and where they may listen."""

import pytest

from quire.config import EngineOptions, executor_backend, resolve
from quire.errors import OptionError

RAY = {"distributed_executor_backend": "ray", "host_ip": "127.0.0.1"}


def resolved(**options):
    config, reasons = resolve(EngineOptions(device="cpu", **{"tensor_parallel_size": 2, **options}))
    return config.worker.executor_backend, reasons


def test_what_is_asked_for():
    assert resolved(**RAY)[0] == "ray"
    assert resolved(distributed_executor_backend="mp")[0] == "mp"
    assert resolved()[0] == "mp"
    assert resolved(tensor_parallel_size=1)[0] == "mp"


def test_what_does_not_fit_on_this_machine_needs_others(monkeypatch):
    monkeypatch.setattr(executor_backend, "_memory_bytes", lambda: 1000)
    monkeypatch.setattr(executor_backend, "_has_ray", lambda: True)
    with pytest.raises(OptionError, match="host_ip"):
        resolved()
    backend, reasons = resolved(host_ip="127.0.0.1")
    assert backend == "ray"
    assert "the weights do not fit" in reasons.table()
    monkeypatch.setattr(executor_backend, "_has_ray", lambda: False)
    with pytest.raises(OptionError, match=r"Choose ray once it runs, mp if"):
        resolved()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"host_ip": "0.0.0.0"}, "stands for many networks"),
        ({"host_ip": "::"}, "stands for many networks"),
        ({"host_ip": "::ffff:0.0.0.0"}, "stands for many networks"),
        ({"host_ip": "0"}, "must be an address"),
        ({"host_ip": "here"}, "must be an address"),
        ({"host_ip": None}, "listens for the workers of other machines"),
        ({"distributed_executor_backend": "mp"}, "nothing listens there"),
        ({"tensor_parallel_size": 1}, "there is one"),
        ({"data_parallel_size": 2}, "quire deploy"),
    ],
)
def test_what_makes_no_sense_is_refused(options, says):
    with pytest.raises(OptionError, match=says):
        resolved(**{**RAY, **options})
