"""What holds for every test. Fixtures stand beside the tests that use them, or in `quire.testing`."""

import gc
import os
import signal

import pytest
from hypothesis import settings

pytest_plugins = ["tests.support.time_limits"]
# Before torch is imported: one thread, because on busy cores two that wait for each other are many times slower; and
# no network, because a test that needs the hub is a test that fails on a train.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# A shell that runs the tests in the background has Ctrl-C ignored, also for those that try what it does.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Kernels as they are by default: measuring takes seconds, and says little beside other tests.
os.environ.setdefault("QUIRE_CPU_TUNING", "off")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# The default run tries the same examples each time, so that it fails for a reason. A longer search draws new ones:
# HYPOTHESIS_PROFILE=search make test ARGS="-k invariants"
settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("search", deadline=None, max_examples=5_000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """A million objects are made here and live to the end. To look through them again and again takes half of the time
    of collecting, and of that of the tests a twentieth."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def level_of_the_log():
    """A command that runs in this process sets it for the processes that it starts; the next test starts others."""
    before = os.environ.get("QUIRE_LOG_LEVEL")
    yield
    os.environ.pop("QUIRE_LOG_LEVEL", None)
    if before is not None:
        os.environ["QUIRE_LOG_LEVEL"] = before
