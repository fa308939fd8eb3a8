"""What a server has made when it begins to serve is not looked through for garbage."""

import gc
import weakref

import pytest

from quire.interfaces.server.life.process import set_aside


@pytest.fixture(autouse=True, scope="module")
def objects_of_the_tests():
    """What tests/conftest.py has set aside comes back with what a server has."""
    yield
    gc.freeze()


class Ring:
    def __init__(self):
        self.itself = self


def test_what_was_there_is_set_aside_and_what_comes_is_collected():
    with set_aside():
        num_aside = gc.get_freeze_count()
        later = weakref.ref(Ring())
        gc.collect()
        assert later() is None
        # one that nobody needs any more goes, wherever it stands
        assert num_aside >= gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0


def test_garbage_is_not_set_aside():
    gc.disable()
    try:
        garbage = weakref.ref(Ring())
        assert garbage() is not None
        with set_aside():
            assert garbage() is None
    finally:
        gc.enable()


def test_what_living_requests_have_made_is_seldom_looked_through_as_a_whole():
    before = gc.get_threshold()
    with set_aside():
        assert gc.get_threshold()[:2] == before[:2]
        assert gc.get_threshold()[2] > before[2]
    assert gc.get_threshold() == before
