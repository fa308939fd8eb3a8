"""Blocks as objects of an S3 bucket: `s3://bucket/prefix`. Credentials, region and endpoint come from the environment
(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL). What is too old is removed by a rule of the
bucket (lifecycle): an object does not know when it was read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from quire.errors import OptionError
from quire.kv_connectors.tiered.stores.store import StoreState

# of one call, which moves many objects at once
_NUM_AT_ONCE = 8
_SECONDS = 5.0
_From = TypeVar("_From")
_To = TypeVar("_To")


def open_store(address: str) -> S3:
    parts = urlsplit(address)
    if not parts.netloc:
        raise OptionError(f"kv_store={address}: names no bucket. Write s3://bucket/prefix.")
    timeout = timedelta(seconds=_SECONDS)
    # whoever names such an endpoint wants it
    is_plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
    try:
        store = S3Store(
            parts.netloc,
            prefix=parts.path.strip("/") or None,
            client_options={"timeout": timeout, "connect_timeout": timedelta(seconds=1), "allow_http": is_plain},
            # whoever needs it computes it: nothing is worth many tries
            retry_config={"max_retries": 0, "retry_timeout": timeout},
        )
    except BaseError as error:
        raise OptionError(f"kv_store={address}: {error}.") from error
    return S3(store)


class S3:
    def __init__(self, store: S3Store) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(_NUM_AT_ONCE, thread_name_prefix="quire-kv-s3")

    def exists_many(self, names: list[str]) -> list[bool]:
        return self._of_each(self._exists, names)

    def get_many(self, names: list[str]) -> list[bytes | None]:
        return self._of_each(self._get, names)

    def put_many(self, values: list[tuple[str, bytes]]) -> None:
        self._of_each(lambda value: obstore.put(self._store, value[0], value[1]), values)

    def delete(self, names: list[str]) -> None:
        self._of_each(self._delete, names)

    def stat(self) -> StoreState:
        return StoreState()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _of_each(self, do: Callable[[_From], _To], entries: Iterable[_From]) -> list[_To]:
        return list(self._threads.map(do, entries))

    def _exists(self, name: str) -> bool:
        try:
            obstore.head(self._store, name)
        except FileNotFoundError:
            return False
        return True

    def _get(self, name: str) -> bytes | None:
        try:
            return bytes(obstore.get(self._store, name).bytes())
        except FileNotFoundError:
            return None

    def _delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, name)
