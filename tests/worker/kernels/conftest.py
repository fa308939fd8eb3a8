import pytest

from quire.worker import kernels
from quire.worker.kernels import cpu
from quire.worker.kernels.cpu.build import ISAS


@pytest.fixture(params=list(ISAS))
def cpu_kernels(request):
    """The C++ kernels of one instruction set, behind the functions that everybody calls."""
    if not cpu.load():
        pytest.skip(f"no C++ kernels here: {cpu.statistics()['reason']}")
    before = cpu.statistics()["isa"]
    if not cpu.select_isa(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield kernels
    cpu.select_isa(before)
