"""Stores by the scheme of their address. A file each; the library that one needs is imported when it is asked for."""

from __future__ import annotations

import importlib
from urllib.parse import urlsplit

from quire.errors import OptionError, suggestion
from quire.kv_connectors.tiered.stores.store import Store

# scheme -> (module, extra that brings its library)
STORES = {
    "file": ("files", None),
    "redis": ("redis_server", "valkey"),
    "rediss": ("redis_server", "valkey"),
    "valkey": ("redis_server", "valkey"),
    "unix": ("redis_server", "valkey"),
    "s3": ("s3", "s3"),
    "mooncake": ("mooncake", "mooncake"),
    "nixl": ("nixl", "nixl"),
}


def kind_of(address: str) -> str:
    """Of a store, for metrics: of few values, and without anything secret."""
    module, _ = _entry(address)
    return module


def open_store(address: str) -> Store:
    """OptionError: the address is wrong, or a library is missing."""
    module, extra = _entry(address)
    try:
        opened: Store = importlib.import_module(f"{__name__}.{module}").open_store(address)
    except ImportError as error:
        if extra is None or (error.name or "").startswith("quire"):
            raise
        raise OptionError(
            f'kv_store={_shown(address)}: a library is missing ({error}). Install it: pip install "quire[{extra}]".'
        ) from error
    return opened


def _entry(address: str) -> tuple[str, str | None]:
    scheme = urlsplit(address).scheme
    if scheme not in STORES:
        example = "file:///var/cache/quire, redis://host:6379 or s3://bucket/prefix"
        raise OptionError(
            f"kv_store={_shown(address)}: must begin with one of {', '.join(f'{one}://' for one in STORES)}, as in "
            f"{example}.{suggestion(scheme, STORES)}"
        )
    return STORES[scheme]


def _shown(address: str) -> str:
    """Without what is said before the host: it may be a password."""
    scheme, separator, rest = address.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
