"""Torch and the worker are imported with the collector off."""

import gc
import sys

import pytest

from quire.engine_core.executor import in_process


def test_what_is_wrong_is_said_and_the_collector_goes_on(monkeypatch):
    monkeypatch.setitem(sys.modules, "quire.worker.worker", None)  # as if it could not be imported
    with pytest.raises(ImportError):
        in_process.import_worker()
    assert gc.isenabled()


@pytest.mark.parametrize("is_collecting", [True, False])
def test_the_collector_is_left_as_it_was(is_collecting):
    gc.enable() if is_collecting else gc.disable()
    try:
        in_process.import_worker()
        assert gc.isenabled() == is_collecting
    finally:
        gc.enable()
