"""Options in a file: the names of the command line, which wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.errors import OptionError
from quire.interfaces.cli import route, serve
from quire.interfaces.cli.engine_flags import engine_options_of
from quire.interfaces.cli.option_flags import typed_options
from quire.interfaces.cli.parser import CommandParser
from quire.interfaces.deploy.route_options import RouteOptions
from quire.interfaces.server.options import ServerOptions

FILE = """
model: ./folder
port: 9000
max_model_len: 4096
kv-cache-memory-bytes: 2GiB
enable_prefix_caching: false
served-model-name: [first, second]
speculative_config: {method: ngram, num_speculative_tokens: 3}
proxy_addresses:
  - 10.0.0.0/8
  - 10.1.0.0/16
strict: true
log-format: json
swap_space: null
"""


# If they were merged, the last line would have 9 to the 12th entries.
_BOMB = "x0: &x0 {a: 1}\n" + "".join(
    f"x{number}: &x{number} {{<<: [{', '.join([f'*x{number - 1}'] * 9)}]}}\n" for number in range(1, 13)
)


def parsed(command: Any, *argv: str) -> tuple[Any, CommandParser]:
    parser = CommandParser(prog="quire trial")
    command.add_arguments(parser)
    return parser.parse(argv), parser


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "quire.yaml"
    path.write_text(FILE)
    return path


def test_each_entry_is_what_its_flag_is(file: Path) -> None:
    arguments, _ = parsed(serve, "--config", str(file))
    assert engine_options_of(arguments) == {
        "model": "./folder",
        "max_model_len": 4096,
        "kv_cache_memory_bytes": 2**31,
        "enable_prefix_caching": False,
        "served_model_name": ("first", "second"),
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    }
    assert typed_options(vars(arguments), ServerOptions) == {
        "proxy_addresses": ("10.0.0.0/8", "10.1.0.0/16"),
        "strict": True,
    }
    assert (arguments.port, arguments.host, arguments.log_format) == ("9000", "127.0.0.1", "json")


def test_what_is_typed_wins(file: Path) -> None:
    typed = "other --port 8000 --max-model-len=512 --enable-prefix-caching --proxy-address 1.1.1.1 --no-strict"
    arguments, _ = parsed(serve, *typed.split(), f"--config={file}", "--served_model_name", "third")
    engine, server = engine_options_of(arguments), typed_options(vars(arguments), ServerOptions)
    assert (engine["model"], engine["max_model_len"], engine["enable_prefix_caching"]) == ("other", 512, True)
    assert engine["served_model_name"] == ("third",)
    assert server == {"proxy_addresses": ("1.1.1.1",), "strict": False}
    # the default, but typed
    assert arguments.port == "8000"


def test_names_of_vllm_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text("max-num-seqs: 4\ndisable-log-requests: true\nreasoning-parser: qwen3\n")
    arguments, parser = parsed(serve, "--config", str(path))
    assert engine_options_of(arguments)["max_num_seqs"] == 4
    assert "disable_log_requests" in parser.remark


def test_a_name_without_a_value_sets_nothing(tmp_path: Path) -> None:
    """Also one of vLLM, and one that cannot be had with a value."""
    path = tmp_path / "empty.yaml"
    path.write_text("max-num-seqs:\nserved_model_name: []\nreasoning-parser:\nhf-token:\nnode-rank:\n")
    arguments, _ = parsed(serve, "--config", str(path))
    assert engine_options_of(arguments) == {}


def test_a_front_has_one_as_well(tmp_path: Path) -> None:
    path = tmp_path / "front.yaml"
    path.write_text("prefill: [http://a:1, http://b:1]\ndecode: http://c:1\napi_keys: [secret]\n")
    path.chmod(0o600)
    arguments, _ = parsed(route, "--config", str(path))
    assert (arguments.prefill, arguments.decode) == (["http://a:1", "http://b:1"], ["http://c:1"])
    assert typed_options(vars(arguments), RouteOptions) == {"api_keys": ("secret",)}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_model_length: 5", 'max-model-length: quire trial has no such option. Did you mean "max-model-len"?'),
        ("max_model_length:", 'max-model-length: quire trial has no such option. Did you mean "max-model-len"?'),
        ("max_model_length: []", "max-model-length: quire trial has no such option"),
        ("config: other.yaml", "config: quire trial has no such option"),
        ("config:", "config: quire trial has no such option"),
        ("max-model-len: [100, 200]", "max-model-len: this takes one value, not a list of 2"),
        ("hf-overrides: [[]]", "hf-overrides: a list in a list is no value"),
        ("served-model-name: [[a], b]", "served-model-name: a list in a list is no value"),
        ("max-model-len: 5\nmax_model_len: 6", "max-model-len stands there twice"),
        ("- 5", "must hold names and values"),
        (
            "root:$6$salt$hash:20593:0:99999:7:::\ndaemon:*:20593:0:::",
            "yaml: must hold names and values, such as",
        ),
        ("a: [", "is no valid YAML"),
        ("port: 2020-99-99", "is no valid YAML"),
        ("port: " + "[" * 2000, "is no valid YAML"),
        ("port: " + "[" * 50_000 + "]" * 50_000, "nested more than 100 deep"),
        (_BOMB, "has aliases"),
        ("model: &a [*a]", "Write each value where it belongs"),
        ("<<: {port: 1, host: a}", "Write each value where it belongs"),
        ("#" * 2**20 + "\nport: 1", "more than 1,048,576 characters"),
        ("max_model_len: many", "max_model_len=many: must be a whole number"),
        ("api-key: secret", "chmod 600"),
        ("admin_api_key: secret", "chmod 600"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "quire.yaml"
    path.write_text(text)
    path.chmod(0o644)
    with pytest.raises(OptionError) as failure:
        engine_options_of(parsed(serve, "--config", str(path))[0])
    assert says in str(failure.value)
    assert "\n" not in str(failure.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(OptionError, match=r"config=nowhere\.yaml: cannot be read"):
        parsed(serve, "--config", "nowhere.yaml")
    with pytest.raises(OptionError, match="expects the name"):
        parsed(serve, "--config")


def test_a_file_that_this_user_may_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(OptionError) as failure:
        parsed(serve, "--config", "/etc/shadow")
    says = "config=/etc/shadow: cannot be read (Permission denied). Name a YAML file that you may read."
    assert str(failure.value) == says
