"""Small real tokenizers of the kinds that language models have (quire.testing.tiny_tokenizers), as folders."""

from pathlib import Path

import pytest

from quire.testing.tiny_tokenizers import KINDS, TEXTS, write_folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A folder of tokenizer files a kind."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: write_folder(root / kind, make()) for kind, make in KINDS.items()}


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory):
    """make_folder(kind, **tokenizer_config): a folder of its own."""

    def make(kind: str = "byte_level", **config: object) -> Path:
        return write_folder(tmp_path_factory.mktemp("tokenizer"), KINDS[kind](), **config)

    return make


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return TEXTS
