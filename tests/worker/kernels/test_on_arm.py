"""The contract suites on the kernels for ARM, in an emulator: sums, bits and bounds are those of the processor, times
are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.remote_kernels import arm


@pytest.mark.nightly
def test_the_suites_of_the_kernels_in_an_emulator(tmp_path: Path) -> None:
    if (reason := arm.fault()) is not None:
        pytest.skip(reason)
    assert arm.run_suites(*arm.build_all(tmp_path), []).returncode == 0
