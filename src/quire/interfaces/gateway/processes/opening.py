"""From the options to a fleet: what the further processes share with the first one, and what they are told."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

from quire.config import EngineConfig
from quire.interfaces.gateway.access.doors import doors_of
from quire.interfaces.gateway.processes.document import ProcessDocument
from quire.interfaces.gateway.processes.fleet import Fleet, FleetEngine
from quire.interfaces.gateway.processes.nameless_file import nameless_file
from quire.interfaces.gateway.processes.shared_ledger import SharedLedger, make_page
from quire.interfaces.server.options import ServerOptions

_FIRST_SEAT = 0


def open_fleet(
    options: ServerOptions, config: EngineConfig, listener: socket.socket, engine: FleetEngine
) -> tuple[Fleet, SharedLedger]:
    """Nothing is started yet. The ledger is for the first process, whose siblings the fleet is."""
    num_seats = options.api_server_count
    tenants = list(doors_of(options).tenants.by_name)
    page = make_page(num_seats, tenants)
    # what is pinned at the start is the first process's to pin
    config = replace(config, pinned_prefixes=None)
    keys, options = _with_kept_keys(options)

    def document(seat: int) -> ProcessDocument:
        return ProcessDocument(
            config=config,
            options=options,
            seat=seat,
            num_seats=num_seats,
            tenants=tenants,
            listener=listener.fileno(),
            channel=-1,
            connections=-1,
            counts=page,
            keys=keys,
        )

    ledger = SharedLedger(page, _FIRST_SEAT, num_seats, tenants)
    fleet = Fleet(document, engine, ledger, [page] if keys is None else [page, keys])
    return fleet, ledger


def _with_kept_keys(options: ServerOptions) -> tuple[int | None, ServerOptions]:
    """A process that is started later knows the same keys, whatever has become of their file."""
    if options.api_key_file is None:
        return None, options
    descriptor = nameless_file("quire-keys", Path(options.api_key_file).read_bytes())
    os.fchmod(descriptor, 0o600)
    return descriptor, replace(options, api_key_file=f"/dev/fd/{descriptor}")
