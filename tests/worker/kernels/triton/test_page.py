"""Every operator has a home on a GPU or a reason, and the page says so."""

from importlib.util import find_spec

import pytest
from tests.worker.kernels.triton import page

from quire.worker.kernels import operators
from quire.worker.kernels import triton as home


def test_each_operator_has_a_twin_or_a_reason():
    assert set(home.TWINS) | set(home.REASONS) == set(operators._SCHEMAS)
    assert not set(home.TWINS) & set(home.REASONS)


def test_page_is_up_to_date():
    assert page.PAGE.read_text().partition("\n" + page.COSTS)[0] == page.page_without_costs(), page.__doc__


@pytest.mark.skipif(find_spec("triton") is None, reason='needs triton: pip install "quire[gpu-dev]"')
def test_costs_are_up_to_date():
    assert page.PAGE.read_text() == page.page(), page.__doc__
