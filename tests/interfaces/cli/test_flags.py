"""Flags that are made from the one declaration of the options."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from quire.config import EngineOptions, options_of
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


@pytest.mark.parametrize("name", options_of(EngineOptions))
def test_every_option_can_be_typed(name):
    option = options_of(EngineOptions)[name]
    value = option.choices[-1] if option.choices else VALUES[option.kind]
    if option.kind is int and option.least is not None:
        value = str(max(int(VALUES[int]), option.least))
    argv = [option.flag] if value is None else [option.flag, value]
    assert engine_options(*argv) == {name: option.check("true" if value is None else value)}


def test_the_page_of_options_is_up_to_date():
    written = (DOCS / "options.md").read_text(encoding="utf-8")
    assert written == markdown(), "run: quire options > docs/options.md"


def test_sampling_is_what_was_typed():
    assert sampling() == {}
    typed = sampling("--max-tokens", "3", "--temperature", "0.5", "--stop", "a", "--stop", "b", "--ignore-eos")
    assert typed == {"max_tokens": 3, "temperature": 0.5, "stop": ["a", "b"], "ignore_eos": True}
    assert SamplingParams(**typed).max_tokens == 3
