"""`quire pull NAME`: a model from the hub, into the cache that Transformers has, too.

A connection that breaks is taken up where it was, and files that have come whole are not fetched again. HF_ENDPOINT
names another hub, HF_TOKEN opens private models.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="hub name; in GGUF with the kind of file: org/name:Q4_K_M")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit (default: the main branch)")


def run(arguments: argparse.Namespace) -> int:
    from quire.config.model_source import fetch

    path = fetch(arguments.name, arguments.revision)
    print(f"{path}\n`quire run {arguments.name}` talks with it, `quire serve {arguments.name}` serves it.")
    return 0
