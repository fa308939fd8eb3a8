"""A process that says whether a form is one. It may hang, crash or eat memory in the place of others.

Reads from its standard input: the vocabulary, then one StructuredOutputsParams after the other, each as MessagePack
behind its length. Answers each with a reason why not, or nothing. Ends when its standard input does, or is killed.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import msgspec

from quire.asked_process import frames, read_frame, write_frame
from quire.errors import one_line
from quire.panics import panics_are_errors
from quire.structured_output.grammar import Form, GrammarError, json_grammar, matcher_of, reason_of
from quire.structured_output.schema_place import place_of_error
from quire.structured_output.vocabulary import Vocabulary
from quire.structured_outputs_params import StructuredOutputsParams

MEMORY_LIMIT = 512 * 2**20


def why_not(params: StructuredOutputsParams, tokenizer: Any) -> str | None:
    """None: it is a grammar, and something begins it."""
    try:
        with panics_are_errors:
            return _refusal(Form(params, tokenizer).hard)
    except Exception as error:  # whatever a form brings the library to
        reason = one_line(error)
    return _at_its_place(params, tokenizer, reason) if params.kind == "json" else reason


def _refusal(matcher: Any) -> str | None:
    matcher.compute_bitmask()
    if matcher.is_error():
        return f"no output has this form ({reason_of(matcher)})"
    return None


def _at_its_place(params: StructuredOutputsParams, tokenizer: Any, reason: str) -> str:
    def refusal_of(schema: Any) -> str | None:
        try:
            matcher_of(json_grammar(schema, params), tokenizer)
        except GrammarError as error:
            return one_line(error)
        return None

    found = None
    with contextlib.suppress(Exception):  # the place is a kindness: without it the reason stands alone
        found = place_of_error(json.loads(str(params.json)), refusal_of)
    pointer, reason = found if found is not None else ("", reason)
    return f"at #{pointer}: {reason}"


def main() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # no such limits on this system
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    tokenizer = msgspec.msgpack.decode(read_frame(source), type=Vocabulary).tokenizer()
    decoder = msgspec.msgpack.Decoder(StructuredOutputsParams)
    for data in frames(source):
        write_frame(sink, (why_not(decoder.decode(data), tokenizer) or "").encode())
