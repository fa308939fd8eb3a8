"""Blocks in a Redis or Valkey: `redis://[:password@]host:port/db`. The server bounds itself: set its `maxmemory` and
the policy `allkeys-lru`."""

from __future__ import annotations

from typing import cast
from urllib.parse import parse_qs, urlsplit

import redis

from quire.errors import OptionError
from quire.kv_connectors.tiered.stores.store import StoreState

_SECONDS = 1.0
_PREFIX = "quire-kv/"


def open_store(address: str) -> RedisServer:
    if "size" in parse_qs(urlsplit(address).query):
        # the client would take it for an argument of connections, and none would ever open
        raise OptionError("kv_store: a Redis or Valkey bounds itself. Set its maxmemory, and leave size out.")
    try:
        return RedisServer(address.replace("valkey://", "redis://", 1))
    except ValueError as error:
        raise OptionError(f"kv_store: the address of a Redis or Valkey is wrong: {error}.") from error


class RedisServer:
    """Connections are made when they are needed: a server that is away is found out by the first call."""

    def __init__(self, address: str) -> None:
        self._client = redis.Redis.from_url(
            address, socket_timeout=_SECONDS, socket_connect_timeout=_SECONDS, retry=None, health_check_interval=0
        )

    def exists_many(self, names: list[str]) -> list[bool]:
        pipeline = self._client.pipeline(transaction=False)
        for name in names:
            pipeline.exists(_PREFIX + name)
        return [bool(answer) for answer in pipeline.execute()]

    def get_many(self, names: list[str]) -> list[bytes | None]:
        if not names:
            return []
        # no text: the client was not told to decode
        return cast("list[bytes | None]", self._client.mget([_PREFIX + name for name in names]))

    def put_many(self, values: list[tuple[str, bytes]]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for name, value in values:
            pipeline.set(_PREFIX + name, value)
        pipeline.execute()

    def delete(self, names: list[str]) -> None:
        if names:
            self._client.unlink(*(_PREFIX + name for name in names))

    def stat(self) -> StoreState:
        return StoreState(int(self._client.dbsize()), int(self._client.info("memory")["used_memory"]))

    def close(self) -> None:
        self._client.close()
