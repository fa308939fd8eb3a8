"""Where events of the prefix cache are published (one JSON object, with vLLM's keys), checked and resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.config.network_addresses import is_of_all_networks
from quire.errors import OptionError, suggestion

OPTION = "kv_events_config"
_ENDPOINT = "tcp://127.0.0.1:5557"
# (least, greatest)
_NUMBERS = {"buffer_steps": (0, 1_000_000), "hwm": (1, 10_000_000), "max_queue_size": (1, 10_000_000)}
_TEXTS = ("publisher", "endpoint", "replay_endpoint", "topic", "event_format")
_KEYS = ("enable_kv_cache_events", *_TEXTS, *_NUMBERS)


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """Of one engine core."""

    endpoint: str = _ENDPOINT
    # who has missed batches asks for them here; None: nobody can
    replay_endpoint: str | None = None
    topic: str = ""
    # each event as a map of its fields, as vLLM does since 0.23, or as an array
    as_maps: bool = True
    # batches that can be asked for again
    buffer_steps: int = 10_000
    # batches that wait for a subscriber who is slow; what comes then is lost for it
    hwm: int = 100_000
    # batches that wait to be sent; what comes then is lost for all
    max_queue_size: int = 100_000

    def of_replica(self, number: int) -> KVEventsConfig:
        """Each replica publishes by itself: its ports are so much higher."""
        replay = None if self.replay_endpoint is None else _moved(self.replay_endpoint, number)
        return replace(self, endpoint=_moved(self.endpoint, number), replay_endpoint=replay)


def resolve_kv_events(given: Mapping[str, Any] | None, *, enable_prefix_caching: bool) -> KVEventsConfig | None:
    """None where nothing is published."""
    if given is None:
        return None
    _check_keys(given)
    is_wanted = given.get("enable_kv_cache_events", False)
    publisher = given.get("publisher", "zmq" if is_wanted else "null")
    if publisher not in ("zmq", "null"):
        raise OptionError(f"{OPTION}: publisher={publisher!r}: must be zmq or null.")
    if not is_wanted or publisher == "null":
        return None
    if not enable_prefix_caching:
        raise OptionError(
            f"{OPTION}: needs the prefix cache, whose blocks it tells of. Leave out enable_prefix_caching=False, or "
            f"{OPTION}."
        )
    form = given.get("event_format", "map")
    if form not in ("map", "array"):
        raise OptionError(f"{OPTION}: event_format={form!r}: must be map (vLLM since 0.23) or array (before).")
    endpoint, replay = given.get("endpoint", _ENDPOINT), given.get("replay_endpoint")
    _check_endpoint("endpoint", endpoint)
    if replay is not None:
        _check_endpoint("replay_endpoint", replay)
    numbers = {name: given[name] for name in _NUMBERS if name in given}
    return KVEventsConfig(
        endpoint=endpoint,
        replay_endpoint=replay,
        topic=given.get("topic", ""),
        as_maps=form == "map",
        **numbers,
    )


def _check_keys(given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if key not in _KEYS:
            raise OptionError(
                f"{OPTION}: {key!r}: there is no such key, there are {', '.join(_KEYS)}.{suggestion(str(key), _KEYS)}"
            )
        if key == "enable_kv_cache_events" and type(value) is not bool:
            raise OptionError(f"{OPTION}: {key}={value!r}: must be true or false.")
        if key in _TEXTS and not isinstance(value, str) and not (value is None and key == "replay_endpoint"):
            raise OptionError(f"{OPTION}: {key}={value!r}: must be a text.")
        if key in _NUMBERS:
            least, most = _NUMBERS[key]
            if type(value) is not int or not least <= value <= most:
                raise OptionError(f"{OPTION}: {key}={value!r}: must be a whole number between {least} and {most:,}.")


def _check_endpoint(name: str, endpoint: str) -> None:
    """tcp://ADDRESS:PORT, or a file. Whoever may connect reads the tokens of all prompts, so no address stands for all
    of them."""
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        return
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    is_port = port.isascii() and port.isdecimal() and 0 < int(port) < 2**16
    if not endpoint.startswith("tcp://") or not is_port or not host:
        raise OptionError(f"{OPTION}: {name}={endpoint}: must be tcp://ADDRESS:PORT or ipc://FILE.")
    if is_of_all_networks(host):
        raise OptionError(
            f"{OPTION}: {name}={endpoint}: would offer the tokens of all prompts on every network of this machine. "
            "Name the address to listen on, such as 127.0.0.1."
        )


def _moved(endpoint: str, number: int) -> str:
    if not number:
        return endpoint
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{number}"
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + number}"
