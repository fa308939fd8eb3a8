"""quire serve hands over what was typed."""

import pytest

from quire.interfaces.cli import main


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "warning")
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    calls = []

    def run_server(engine_options, host, port, **server_options):
        calls.append((engine_options, host, port, server_options))
        return 70

    monkeypatch.setattr("quire.interfaces.server.run_server", run_server, raising=False)
    return calls


def test_nothing_typed(served):
    assert main(["serve"]) == 70, "the server's status is the process's"
    nothing = {"api_keys": [], "allowed_origins": [], "strict": False, "shutdown_timeout": 0.0}
    assert served == [({}, "127.0.0.1", 8000, nothing)]


def test_all_of_it(served, monkeypatch):
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    argv = "folder --host 0.0.0.0 --port 0 --api-key a --api-key b --strict --shutdown-timeout 2.5 --max-num-seqs 4"
    main(["serve", *argv.split(), "--allowed-origin", "http://x"])
    [(engine_options, host, port, server_options)] = served
    assert engine_options == {"model": "folder", "max_num_seqs": 4}
    assert (host, port) == ("0.0.0.0", 0)
    assert server_options == {
        "api_keys": ["a", "b", "secret"],
        "allowed_origins": ["http://x"],
        "strict": True,
        "shutdown_timeout": 2.5,
    }


def test_these_are_options_of_the_server():
    from dataclasses import fields

    from quire.interfaces.server.run import ServerOptions

    assert {field.name for field in fields(ServerOptions)} == {
        "api_keys",
        "allowed_origins",
        "strict",
        "shutdown_timeout",
    }
