"""Two machines of Ray's test cluster on this one. Needs `pip install "quire[ray]"`; runs by night."""

import os
import sys
from pathlib import Path

import pytest

from quire.testing.tiny_checkpoints import make_checkpoint


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.nightly)


@pytest.fixture(scope="session")
def cluster():
    """Two processors a machine: two ranks of two threads never stand on one, and two of one thread do."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    kept = dict(os.environ)
    # what Ray starts finds what this process finds
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    os.environ["OMP_NUM_THREADS"] = "1"
    common = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
    made = Cluster(initialize_head=True, head_node_args={**common, "include_dashboard": False})
    made.second = made.add_node(**common)
    made.bring_back = lambda: setattr(made, "second", made.add_node(**common))
    os.environ["RAY_ADDRESS"] = made.address
    yield made
    ray.shutdown()
    made.shutdown()
    os.environ.clear()
    os.environ.update(kept)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("ray"), "qwen3")
