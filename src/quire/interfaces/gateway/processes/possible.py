"""Whether several processes are possible, and what they must have in common. Light: asked before anything loads."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.errors import OptionError
from quire.interfaces.server.options import ServerOptions

if TYPE_CHECKING:
    from quire.config import EngineConfig


def with_shared_secret(options: ServerOptions) -> ServerOptions:
    """A tenant's part of the prefix cache has one name in all processes."""
    if options.api_server_count == 1 or options.tenant_secret is not None:
        return options
    return replace(options, tenant_secret=secrets.token_hex(32))


def check_possible(options: ServerOptions, config: EngineConfig) -> None:
    if options.api_server_count > 1 and config.engine_process is False:
        raise OptionError(
            f"api_server_count={options.api_server_count}: several processes need an engine in a process of its own, "
            "and engine_process=False keeps it in the server's. Leave one of them out."
        )
