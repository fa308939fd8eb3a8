import pytest

from quire.worker import kernels
from quire.worker.kernels import cpu
from quire.worker.kernels.cpu.build import HERE


@pytest.fixture(params=[isa for isa in HERE.isas if isa not in HERE.only])
def cpu_kernels(request):
    """The C++ kernels of one instruction set, behind the functions that everybody calls."""
    yield from kernels_of(request.param)


@pytest.fixture(params=list(HERE.isas))
def product_kernels(request):
    """The same for products: some instruction sets differ in these alone."""
    yield from kernels_of(request.param)


def kernels_of(isa):
    if not cpu.load():
        pytest.skip(f"no C++ kernels here: {cpu.statistics()['reason']}")
    before = cpu.statistics()["isa"]
    if not cpu.select_isa(isa):
        pytest.skip(f"this processor has no {isa}")
    yield kernels
    cpu.select_isa(before)
