"""`quire deploy`: mistakes are found before anything starts."""

from importlib.util import find_spec

import pytest

from quire.interfaces.cli import main
from quire.interfaces.deploy.application import Scale


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "warning")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--replicas", "0"], "replicas=0: must be"),
        (["--replicas", "two"], "replicas=two: must be"),
        (["--min-replicas", "2"], "min_replicas: the number of copies is fixed"),
        (["--upscale-delay", "2"], "upscale_delay: the number of copies is fixed"),
        (["--replicas", "2", "--max-replicas", "4"], "replicas, max_replicas: a number that is fixed"),
        (["--min-replicas", "5", "--max-replicas", "4"], "min_replicas=5: must not be more than max_replicas=4"),
        (["--max-replicas", "4", "--min-replicas", "0"], "min_replicas=0: must be"),
        (["--max-replicas", "4", "--target-ongoing-requests", "0"], "target_ongoing_requests=0: must be"),
        (["--max-replicas", "4", "--downscale-delay", "soon"], "downscale_delay=soon: must be"),
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


@pytest.mark.parametrize(
    ("arguments", "scale"),
    [
        ([], Scale(1)),
        (["--replicas", "3"], Scale(3)),
        (["--max-replicas", "4"], Scale(1, 4)),
        (
            ["--min-replicas", "2", "--max-replicas", "4", "--target-ongoing-requests", "2.5", "--upscale-delay", "0",
             "--downscale-delay", "10"],
            Scale(2, 4, 2.5, 0.0, 10.0),
        ),
    ],
)  # fmt: skip
def test_how_many_copies(monkeypatch, arguments, scale):
    told = {}
    monkeypatch.setattr("quire.interfaces.cli.deploy.run_deployment", lambda *args, **named: told.update(named) or 0)
    assert main(["deploy", *arguments]) == 0
    assert told["scale"] == scale


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_it_says_what_to_install(capsys):
    assert main(["deploy"]) == 2
    assert "pip install 'quire[ray]'" in capsys.readouterr().err
