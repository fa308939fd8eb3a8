"""What a server has made when it begins to serve lives as long as it does.

Python's garbage collector looks through all objects now and then, and everybody waits meanwhile: with 512 streams 60 to
90 ms of processor time, half of it for what importing and starting leave behind, which is never garbage. Set aside, it
is not looked at again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Passes through the newest thousands of objects, from one through all of them to the next; Python's own number is 10.
# With 1,024 streams one through all takes 35 to 65 ms.
_PASSES_APART = 100


@contextmanager
def set_aside() -> Iterator[None]:
    """From here to the end of the block, for the whole process."""
    gc.collect()
    gc.freeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], _PASSES_APART)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
