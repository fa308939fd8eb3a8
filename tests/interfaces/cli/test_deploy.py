"""`quire deploy`: mistakes are found before anything starts."""

from importlib.util import find_spec

import pytest

from quire.interfaces.cli import main


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "warning")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--replicas", "0"], "replicas=0: must be"),
        (["--replicas", "two"], "replicas=two: must be"),
        (["--cpus-per-replica", "0.5"], "cpus_per_replica=0.5: must be"),
        (["--admin-port", "9000"], "admin_port: belongs to one server"),
        (["--port", "x"], "--port x"),
        (["--routing-policy", "nearest"], "routing_policy"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, says):
    assert main(["deploy", *arguments]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_it_says_what_to_install(capsys):
    assert main(["deploy"]) == 2
    assert "pip install 'quire[ray]'" in capsys.readouterr().err
