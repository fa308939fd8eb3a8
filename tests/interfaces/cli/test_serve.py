"""quire serve hands over what was typed."""

import pytest

from quire.config import options_of
from quire.interfaces.cli import main
from quire.interfaces.server.options import ServerOptions


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "warning")
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    calls = []

    def run_server(engine_options, host, port, **server_options):
        calls.append((engine_options, host, port, server_options))
        return 70

    monkeypatch.setattr("quire.interfaces.gateway.run_server", run_server, raising=False)
    return calls


def test_nothing_typed(served):
    assert main(["serve"]) == 70, "the server's status is the process's"
    assert served == [({"target_inter_token_latency": None}, "127.0.0.1", 8000, {})]


def test_a_target_that_is_typed_takes_the_place_of_the_one_by_measure(served):
    main(["serve", "--target-inter-token-latency", "80ms"])
    assert served[0][0] == {"target_inter_token_latency": 0.08}


def test_all_of_it(served, monkeypatch):
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    argv = "folder --host 0.0.0.0 --port 0 --api-key a --api-key b --strict --shutdown-timeout 2.5 --max-num-seqs 4"
    main(["serve", *argv.split(), "--allowed-origin", "http://x"])
    [(engine_options, host, port, server_options)] = served
    assert engine_options == {"model": "folder", "max_num_seqs": 4, "target_inter_token_latency": None}
    assert (host, port) == ("0.0.0.0", 0)
    assert server_options == {
        "api_keys": ("a", "b", "secret"),
        "allowed_origins": ("http://x",),
        "strict": True,
        "shutdown_timeout": 2.5,
    }


@pytest.mark.parametrize("name", options_of(ServerOptions))
def test_every_option_can_be_typed(served, name):
    option = options_of(ServerOptions)[name]
    value = option.choices[-1] if option.choices else {int: "7", float: "0.7", bool: None}.get(option.kind, "text")
    if name == "default_chat_template_kwargs":
        value = '{"key": 1}'
    main(["serve", option.flag] if value is None else ["serve", option.flag, value])
    assert served[0][3] == {name: option.check("true" if value is None else value)}


@pytest.mark.parametrize("argv", [["--api-key", " "], ["--shutdown-timeout", "-1"], ["--shutdown-timeout", "soon"]])
def test_a_wrong_value_is_said_before_anything_starts(served, argv, capsys):
    assert main(["serve", *argv]) != 0
    assert not served
    assert argv[0].removeprefix("--").split("-")[0] in capsys.readouterr().err
