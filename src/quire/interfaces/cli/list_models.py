"""`quire list`: the models that are on this machine."""

from __future__ import annotations

import argparse

from quire.interfaces.cli.model_store import embedded_model, in_words, stored_models


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(arguments: argparse.Namespace) -> int:
    del arguments
    rows = [("NAME", "SIZE", "CHANGED")]
    for model in (embedded_model(), *stored_models()):
        rows.append((model.name, in_words(model.num_bytes), model.changed))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0
