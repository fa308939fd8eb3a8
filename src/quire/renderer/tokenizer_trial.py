"""A process that loads a tokenizer.json and cuts texts with it. It may hang, abort or eat memory in others' place.

Reads a line of JSON from its standard input: the file, and characters that texts should be made of. Writes "good", or
why not.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
from itertools import pairwise
from pathlib import Path

from quire.errors import one_line
from quire.panics import PanicError, panics_are_errors

_BYTES = 256 << 20
_SECONDS = 2
# A vocabulary takes more memory and time to load than its file is long: 30 MB some 700 MB and 1 s.
_BYTES_A_BYTE = 40
_BYTES_A_SECOND = 8 << 20
_LENGTH = 10_000
# A letter is four bytes at most, which byte fallback makes four tokens; some normal forms make it 18 letters.
_MOST_TOKENS_OF_CHARACTER = 64
_MOST_CHARACTERS = 64


def main() -> None:
    file, characters = json.loads(sys.stdin.readline())
    import tokenizers

    _set_limits(Path(file).stat().st_size)
    try:
        with panics_are_errors:
            backend = tokenizers.Tokenizer.from_file(file)
            backend.no_truncation()
            backend.no_padding()
            for text in texts_of(characters):
                ids = backend.encode(text).ids
                if len(ids) > _MOST_TOKENS_OF_CHARACTER * len(text):
                    print(f"it makes more than {_MOST_TOKENS_OF_CHARACTER} tokens of a character")
                    return
                backend.decode(ids[:_LENGTH])
    except (Exception, PanicError) as error:
        print(f"it fails ({one_line(error)})")
        return
    print("good")


def texts_of(characters: list[str]) -> list[str]:
    chosen = random.Random(1)
    letters = list(dict.fromkeys([*characters[:_MOST_CHARACTERS], *" \n\ta0.'é中😀"]))
    mixed = [*(chr(code) for code in range(32, 127)), *"\n\r\té̈ßﷺŉ中あ한👩\u200d🚀\u200b\u3000"]
    return [
        "a",
        "".join(chosen.choice(mixed) for _ in range(_LENGTH)),
        # an expression that looks for a letter that is not there gives up at once
        *(letter * _LENGTH + end for letter in letters for end in ("!", "!" + "".join(letters))),
        *((first + second) * (_LENGTH // 4) for first, second in pairwise(letters)),
    ]


def _set_limits(num_bytes: int) -> None:
    """On top of what this process has taken so far."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = used + _BYTES + _BYTES_A_BYTE * num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    seconds = int(sum(os.times()[:2])) + 1 + _SECONDS + num_bytes // _BYTES_A_SECOND
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
