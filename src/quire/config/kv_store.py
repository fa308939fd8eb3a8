"""KV that lives elsewhere: the options `kv_store` and `kv_connector`, and what engines must agree in to share it."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from quire.config.engine_config import TIERED, KVConnectorConfig
from quire.config.engine_options import EngineOptions
from quire.config.option import num_bytes_of
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
        return None
    args = dict(options.kv_connector)
    name = args.pop("name", None)
    if not isinstance(name, str):
        raise OptionError(
            f'kv_connector={args}: has no name. Say which one its arguments are for, such as {{"name": "memory"}}.'
        )
    config = KVConnectorConfig(name, args)
    _check_tiered(config, options)
    return config


def _tiered(options: EngineOptions) -> KVConnectorConfig:
    assert options.kv_store is not None
    if options.kv_connector is not None:
        raise OptionError("kv_store: stands for the kv_connector tiered. Give one of the two.")
    # what the other half needs is moved whatever it costs: there its prompts must not be computed
    args: dict[str, Any] = {"stores": []} if options.role == BOTH else {"stores": [], "rule": "always"}
    places: set[str] = set()
    for address in map(str.strip, options.kv_store.split(",")):
        if not address:
            raise OptionError(f"kv_store={options.kv_store}: an address is empty. Give addresses with commas between.")
        place = address.partition("?")[0]
        if place in places:
            # an address may hold a password
            raise OptionError(f"kv_store: address {len(places) + 1} names the place of another. Give each place once.")
        places.add(place)
        if place != _HOST:
            args["stores"].append(address)
        elif num_bytes := size_of(address):
            args["host_bytes"] = num_bytes
    config = KVConnectorConfig(TIERED, args)
    _check_tiered(config, options)
    return config


def size_of(address: str) -> int:
    """Bytes that its place may hold, as in file:///folder?size=16GiB; 0: it does not say."""
    place, _, query = address.partition("?")
    name, _, text = query.partition("=")
    if not query:
        return 0
    if name != "size":
        raise OptionError(f"kv_store={address}: must be a size of at least one byte, as in {place}?size=4GiB.")
    return num_bytes_of(text, f"kv_store={place}: size")


def _check_tiered(config: KVConnectorConfig, options: EngineOptions) -> None:
    if config.name != TIERED:
        return
    if not options.enable_prefix_caching:
        raise OptionError(
            "kv_store: keeps the blocks of the prefix cache, and enable_prefix_caching=False leaves none. Leave one of "
            "them out (docs/kv-tiers.md)."
        )
