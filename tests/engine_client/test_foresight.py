"""What a core in this process is made of is imported while its caller does something else."""

import dataclasses
import gc
import sys
import threading

import pytest

from quire.config import EngineOptions, resolve
from quire.engine_client import foresee_link
from quire.engine_core.executor import in_process


@pytest.fixture
def imports(monkeypatch):
    """Set when the worker is imported."""
    done = threading.Event()
    monkeypatch.setattr(in_process, "import_worker", done.set)
    return done


def wait_for_imports():
    for thread in threading.enumerate():
        if thread.name == "quire-imports":
            thread.join()


def test_a_core_of_this_process_is_imported_ahead(imports):
    config, _ = resolve(EngineOptions())
    foresee_link(config, in_own_process=False)
    assert imports.wait(60)


def test_what_runs_elsewhere_is_not_imported_here(imports):
    config, _ = resolve(EngineOptions())
    foresee_link(config, in_own_process=True)
    foresee_link(dataclasses.replace(config, data_parallel_size=2), in_own_process=False)
    wait_for_imports()
    assert not imports.is_set()


def test_what_is_wrong_is_said_by_the_core(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "quire.worker.worker", None)  # as if it could not be imported
    foresee_link(resolve(EngineOptions())[0], in_own_process=False)
    wait_for_imports()
    assert capfd.readouterr() == ("", "")
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
