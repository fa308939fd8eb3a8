"""`quire rm NAME`: takes a model out of the hub's cache. Folders of the user's own are never touched."""

from __future__ import annotations

import argparse
import sys

from quire.errors import OptionError, suggestion
from quire.interfaces.cli.model_store import in_words, remove, stored_models


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="as `quire list` has it")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run(arguments: argparse.Namespace) -> int:
    models = {model.name: model for model in stored_models()}
    model = models.get(arguments.name)
    if model is None:
        hint = suggestion(arguments.name, models) or " `quire list` has those that are."
        raise OptionError(f"NAME {arguments.name[:100]!r}: no such model was fetched.{hint}")
    if not arguments.yes and not _is_sure(model.name, in_words(model.num_bytes)):
        print("Nothing was deleted.")
        return 1
    remove(model)
    print(f"{model.name} is gone.")
    return 0


def _is_sure(name: str, size: str) -> bool:
    if not sys.stdin.isatty():
        raise OptionError(f"{name}: nobody can be asked here. Add --yes to delete its {size}.")
    try:
        return input(f"Delete {name} ({size}), for Transformers, too? [y/N] ").strip().lower() in ("y", "yes")
    except (EOFError, KeyboardInterrupt):
        print()
        return False
