"""The recording of a core under test, read as a client reads it."""

from __future__ import annotations

from quire.interfaces.recording import read_recording
from quire.interfaces.steps import Control, Step, perform
from quire.observability.recorded import Recording
from quire.testing.core import CoreUnderTest


def recording_of(core: CoreUnderTest) -> Recording:
    def do(step: Step) -> object:
        assert isinstance(step, Control)
        return core.core.control(step.name, step.args)

    return perform(read_recording(), do)
