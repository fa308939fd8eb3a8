"""What a core's process is told when it starts."""

from __future__ import annotations

import logging

import msgspec

from quire.config import EngineConfig
from quire.engine_core.pulse import NO_PAGE


class LaunchDocument(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    config: EngineConfig
    # the socket to connect to, and its folder, which the process removes if its parent dies before they met
    endpoint: str
    folder: str
    # where to write the pulse (pulse.py)
    pulse_descriptor: int = NO_PAGE
    log_level: int = logging.WARNING
