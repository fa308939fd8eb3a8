"""KV that lives elsewhere: the options `kv_store` and `kv_connector`, and what engines must agree in to share it."""

from __future__ import annotations

import hashlib
import os

from quire.config.engine_config import TIERED, KVConnectorConfig
from quire.config.engine_options import EngineOptions
from quire.errors import OptionError

_HOST = "host"
BOTH = "both"
# engines that know the same one read each other's blocks; nobody else can tell what lies in a store, or forge it
_SECRET = "QUIRE_KV_STORE_SECRET"


def shared_key(purpose: str) -> bytes:
    """A key that all engines with the same secret have; of each purpose another one."""
    secret = os.environ.get(_SECRET, "").encode()
    return hashlib.blake2b(secret, digest_size=32, person=f"quire {purpose}".encode()[:16]).digest()


def resolve_kv_connector(options: EngineOptions) -> KVConnectorConfig | None:
    """Its name is looked up where it is made: packages beside Quire bring others."""
    if options.kv_store is not None:
        return _tiered(options)
    if options.role != BOTH:
        raise OptionError(
            f"role={options.role}: the KV of prompts goes to servers with the other half of a request by a kv_store. "
            "Give all of them the same (docs/disaggregation.md)."
        )
    if options.kv_connector is None:
        if options.kv_connector_args is not None:
            raise OptionError(
                "kv_connector_args: whose arguments they are is said by kv_connector. Give both, or none."
            )
        return None
    config = KVConnectorConfig(options.kv_connector, dict(options.kv_connector_args or {}))
    _check_tiered(config, options)
    return config


def _tiered(options: EngineOptions) -> KVConnectorConfig:
    assert options.kv_store is not None
    if options.kv_connector is not None:
        raise OptionError("kv_store: stands for kv_connector=tiered. Give one of the two.")
    addresses = [address.strip() for address in options.kv_store.split(",")]
    if not all(addresses):
        raise OptionError(f"kv_store={options.kv_store}: an address is empty. Give addresses with commas between.")
    config = KVConnectorConfig(
        TIERED,
        {
            "stores": [address for address in addresses if address != _HOST],
            "host_bytes": int(options.kv_store_host_memory * 2**30),
            "disk_bytes": int(options.kv_store_disk * 2**30),
            # what the other half needs is moved whatever it costs: there its prompts must not be computed
            **({} if options.role == BOTH else {"rule": "always"}),
        },
    )
    _check_tiered(config, options)
    return config


def _check_tiered(config: KVConnectorConfig, options: EngineOptions) -> None:
    if config.name != TIERED:
        return
    if not options.enable_prefix_caching:
        raise OptionError(
            "kv_store: keeps the blocks of the prefix cache, and enable_prefix_caching=False leaves none. Leave one of "
            "them out (docs/kv-tiers.md)."
        )
