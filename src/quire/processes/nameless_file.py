"""A file without a name, in memory where the system can: it is gone with the last process that has it open."""

from __future__ import annotations

import os
import sys
import tempfile


def nameless_file(name: str, content: bytes = b"", *, size: int | None = None) -> int:
    """Its descriptor. `size`: it is filled up with zeros."""
    if sys.platform == "linux":
        descriptor = os.memfd_create(name)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    if size is not None:
        os.ftruncate(descriptor, size)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
