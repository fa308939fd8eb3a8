"""Torch's large library, loaded beside whatever else a program does while it starts."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path


def load_torch_library() -> None:
    """Takes a fifth of the second that importing torch takes. The system is asked for it, and other threads go on
    meanwhile; Python's own way to it would hold them up. What cannot be loaded so is loaded, or refused, by torch."""
    torch = importlib.util.find_spec("torch")
    load = getattr(ctypes.CDLL(None), "dlopen", None)
    if torch is not None and torch.origin is not None and load is not None:
        load(os.fsencode(Path(torch.origin).with_name("lib") / "libtorch_cpu.so"), os.RTLD_NOW)
