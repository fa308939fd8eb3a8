"""API keys: who a request comes from. Kept as hashes, compared in constant time, all of them every time.

A key file has a line for each key, and is readable by its owner alone (mode 0600):

    # NAME: KEY, as sha256 in hexadecimal digits or as it is; then what the tenant NAME may use
    reports: 2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae weight=2 tokens_per_minute=100000
    sk-a-key-whose-tenant-needs-no-name

`quire api-key NAME` makes a key and its line. Several lines with one name are keys of one tenant.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from quire.errors import OptionError, suggestion
from quire.interfaces.gateway.access.tenants import Quota, Tenant

TENANT_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASH = re.compile(r"(?:sha256:)?([0-9a-fA-F]{64})")
# comparing all keys must stay a matter of microseconds per key and request
_MOST_KEYS = 10_000
_QUOTAS = {field.name: field for field in fields(Quota)}
_LEAST = {"weight": 1e-6, "max_requests": 1, "max_queued": 1, "tokens_per_minute": 1}


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The hash of a key, and whose it is."""

    digest: bytes
    tenant: Tenant


class KeyRing:
    """All keys of a server. Empty: nobody needs one."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self.keys = tuple(keys)

    @property
    def tenants(self) -> list[Tenant]:
        return list({key.tenant.name: key.tenant for key in self.keys}.values())

    def tenant_of(self, key: bytes) -> Tenant | None:
        """Whose key this is. How long it takes says nothing about any key."""
        digest = hash_of(key)
        found = None
        for known in self.keys:
            if hmac.compare_digest(digest, known.digest):
                found = known.tenant
        return found


def hash_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def key_ring(given: Sequence[str] = (), file: str | None = None, defaults: Quota | None = None) -> KeyRing:
    """Keys given one by one, each of which is a tenant, and those of a file. `defaults`: where a line says nothing."""
    defaults = defaults or Quota()
    digests = [_checked_hash(key, "api_keys") for key in given]
    keys = [ApiKey(digest, Tenant(_name_of(digest), defaults)) for digest in digests]
    if file is not None:
        keys += _from_file(Path(file), defaults)
    if len(keys) > _MOST_KEYS:
        raise OptionError(
            f"api_key_file={file}: {len(keys)} keys, at most {_MOST_KEYS} are allowed. Take out old ones."
        )
    digests = [key.digest for key in keys]
    if len(set(digests)) < len(digests):
        double = next(key for number, key in enumerate(keys) if key.digest in digests[:number])
        raise OptionError(
            f"api_keys: a key of {double.tenant.name!r} occurs twice, so nobody could say whose requests bear it. "
            "Keep one of them."
        )
    return KeyRing(keys)


def check_is_private(path: Path, option: str) -> None:
    """Raises OptionError unless the file is its owner's alone."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise OptionError(f"{option}={path}: cannot be read ({error.strerror}). Check the path.") from None
    if not stat.S_ISREG(mode):
        raise OptionError(f"{option}={path}: is not a file. Give the path of one.")
    if os.name == "posix" and mode & 0o077:
        raise OptionError(
            f"{option}={path}: its mode is {stat.S_IMODE(mode):04o}, so other users of this machine may open it. "
            f"Keys must be their owner's alone: chmod 600 {path}"
        )


def _from_file(path: Path, defaults: Quota) -> list[ApiKey]:
    check_is_private(path, "api_key_file")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"api_key_file={path}: cannot be read as UTF-8 text ({error}).") from None
    digests: list[tuple[str, bytes]] = []
    said: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"api_key_file={path}, line {number}"
        name, digest, rest = _key_of(words, where)
        digests.append((name, digest))
        _merge(said.setdefault(name, {}), _quota_of(rest, where), name, where)
    if not digests:
        raise OptionError(f"api_key_file={path}: holds no key. Make one: quire api-key NAME >> {path}")
    tenants = {name: Tenant(name, replace(defaults, **values)) for name, values in said.items()}
    return [ApiKey(digest, tenants[name]) for name, digest in digests]


def _key_of(words: list[str], where: str) -> tuple[str, bytes, list[str]]:
    if not words[0].endswith(":"):
        digest = _checked_hash(words[0], where)
        return _name_of(digest), digest, words[1:]
    name = words[0][:-1]
    if not TENANT_NAME.fullmatch(name):
        raise OptionError(f"{where}: the name {name[:80]!r} must be 1 to 64 letters, digits or . _ -")
    if len(words) < 2:
        raise OptionError(f"{where}: {name!r} has no key. Make one: quire api-key {name}")
    as_hash = _HASH.fullmatch(words[1])
    return name, bytes.fromhex(as_hash[1]) if as_hash else _checked_hash(words[1], where), words[2:]


def _name_of(digest: bytes) -> str:
    """Of a tenant that has none: the same as long as its key is, wherever it stands, because what it stores is its."""
    return f"key-{digest.hex()[:12]}"


def _checked_hash(key: str, where: str) -> bytes:
    if not key.strip():
        raise OptionError(f"{where}: the key is empty. Give one, or leave it out for a server without keys.")
    return hash_of(key.encode())


def _quota_of(words: list[str], where: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in _QUOTAS:
            raise OptionError(f"{where}: {name[:80]!r} is not one of {', '.join(_QUOTAS)}.{suggestion(name, _QUOTAS)}")
        values[name] = _number_of(name, text, where)
    return values


def _number_of(name: str, text: str, where: str) -> float | int:
    least = _LEAST.get(name, -(2**31))
    try:
        value = float(text) if name == "weight" else int(text)
    except ValueError:
        value = None
    if value is None or not least <= value <= 1e15:
        kind = "a number" if name == "weight" else "a whole number"
        raise OptionError(f"{where}: {name}={text[:40]}: must be {kind} of at least {least:g}.")
    return value


def _merge(said: dict[str, Any], new: dict[str, Any], name: str, where: str) -> None:
    for quota, value in new.items():
        if said.setdefault(quota, value) != value:
            raise OptionError(
                f"{where}: {quota}={value} for {name!r}, which has {quota}={said[quota]} above. A quota is the "
                "tenant's, not the key's: say it once."
            )
