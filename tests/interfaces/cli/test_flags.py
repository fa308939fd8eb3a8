"""Flags that are made from the one declaration of the options."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from quire.config import EngineOptions, options_of
from quire.config.option import checked
from quire.errors import OptionError
from quire.interfaces.cli.engine_flags import add_engine_flags, add_model_argument, engine_options_of
from quire.interfaces.cli.options import markdown
from quire.interfaces.cli.parser import CommandParser
from quire.interfaces.cli.sampling_flags import add_sampling_flags, sampling_of
from quire.sampling_params import SamplingParams

VALUES = {tuple: "name=path", int: "7", float: "0.7", str: "text", bool: None, Mapping: '{"method": "ngram"}'}
DOCS = Path(__file__).parents[3] / "docs"


def engine_options(*argv: str) -> dict:
    parser = CommandParser(prog="quire trial")
    add_model_argument(parser)
    add_engine_flags(parser)
    return engine_options_of(parser.parse(argv))


def sampling(*argv: str) -> dict:
    parser = CommandParser(prog="quire trial")
    add_sampling_flags(parser)
    return sampling_of(parser.parse(argv))


def test_only_what_was_typed_is_said():
    assert engine_options() == {}


def test_values_have_the_types_of_their_declaration():
    typed = engine_options(
        "folder", "--block-size", "8", "--gpu-memory-utilization", "0.5", "--kv-cache-memory-bytes", "2GiB",
        "--no-enable-prefix-caching", "--engine-process", "--max-model-len", "none", "--dtype=float32",
    )  # fmt: skip
    assert typed == {
        "model": "folder",
        "block_size": 8,
        "gpu_memory_utilization": 0.5,
        "kv_cache_memory_bytes": 2**31,
        "enable_prefix_caching": False,
        "engine_process": True,
        "max_model_len": None,
        "dtype": "float32",
    }


def test_a_model_may_be_given_twice_if_it_is_the_same():
    assert engine_options("a", "--model", "a") == {"model": "a"}
    with pytest.raises(OptionError, match="Give one of them"):
        engine_options("a", "--model", "b")


OPTIONS = options_of(EngineOptions)
RARE = [name for name, option in OPTIONS.items() if option.is_file_only]
TYPED = [name for name in OPTIONS if name not in RARE]
# what --help lists is read by people
MOST_FLAGS = 70


def test_the_engine_has_few_flags():
    # beyond: merge options that say one thing, or let the file of --config alone set the rarest
    assert len(TYPED) <= MOST_FLAGS


@pytest.mark.parametrize("name", TYPED)
def test_every_option_can_be_typed(name):
    option = OPTIONS[name]
    value = option.choices[-1] if option.choices else VALUES[option.kind]
    if option.kind is int and option.least is not None:
        value = str(max(int(VALUES[int]), option.least))
    argv = [option.flag] if value is None else [option.flag, value]
    assert engine_options(*argv) == {name: option.check("true" if value is None else value)}


@pytest.mark.parametrize("name", RARE)
def test_what_has_no_flag_is_set_in_a_file_and_says_so(name, tmp_path):
    option = OPTIONS[name]
    value = (
        "true"
        if option.kind is bool
        else option.choices[-1]
        if option.choices
        else str(option.least or VALUES[option.kind])
    )
    file = tmp_path / "quire.yaml"
    file.write_text(f"{name}: {value}\n")
    assert engine_options("--config", str(file)) == {name: option.check(value)}
    argv = [option.flag] if option.kind is bool else [option.flag, value]
    with pytest.raises(OptionError) as refused:
        engine_options("folder", *argv)
    assert str(refused.value).startswith(f"{option.flag}: is no flag,")
    assert f" Write {name}: {value} into a YAML file" in str(refused.value)


def test_what_is_typed_for_what_has_no_flag_is_repeated():
    for typed, flag, line in (
        (["--no-hook-process"], "--no-hook-process", "hook_process: false"),
        (["--hook_timeout=5"], "--hook-timeout", "hook_timeout: 5"),
        (["--staging-size"], "--staging-size", "staging_size: value"),
    ):
        with pytest.raises(OptionError) as refused:
            engine_options(*typed)
        text = f"is no flag, and stands in a file alone. Write {line} into a YAML file, and give that as --config FILE."
        assert str(refused.value) == f"{flag}: {text}"


def test_a_part_of_another_option_says_which(tmp_path):
    with pytest.raises(OptionError, match=r"--kv-store-disk: is said by kv_store: .*size=16GiB"):
        engine_options("--kv-store-disk", "5")
    with pytest.raises(OptionError, match="kv_store_disk: is said by kv_store: "):
        checked(EngineOptions, {"kv_store_disk": 5})
    file = tmp_path / "quire.yaml"
    file.write_text("kv_connector_args: {}\n")
    with pytest.raises(OptionError, match="--kv-connector-args: is said by kv_connector: "):
        engine_options("--config", str(file))


def test_help_does_not_list_what_has_no_flag():
    parser = CommandParser(prog="quire trial")
    add_engine_flags(parser)
    listed = parser.format_help()
    assert "--max-num-seqs" in listed
    assert not [name for name in RARE if f"{OPTIONS[name].flag} " in listed]


def test_the_page_of_options_is_up_to_date():
    written = (DOCS / "options.md").read_text(encoding="utf-8")
    assert written == markdown(), "run: quire options > docs/options.md"


def test_sampling_is_what_was_typed():
    assert sampling() == {}
    typed = sampling("--max-tokens", "3", "--temperature", "0.5", "--stop", "a", "--stop", "b", "--ignore-eos")
    assert typed == {"max_tokens": 3, "temperature": 0.5, "stop": ["a", "b"], "ignore_eos": True}
    assert SamplingParams(**typed).max_tokens == 3
