"""What a user may say about `quire route`, each option declared once. Light: the command line reads it for `--help`."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.option import option

# Of requests that a front has: each keeps its body until it is answered.
MOST_BYTES_IN_FLIGHT = 2**30


@dataclass(frozen=True, kw_only=True)
class RouteOptions:
    """Beside the addresses."""

    api_keys: tuple[str, ...] = option(
        (), "key that clients must send, and that is passed on to the servers; QUIRE_API_KEY in the environment "
        "(several: with spaces between them) does the same and is not seen in the list of processes",
        section="access", flag="--api-key",
    )  # fmt: skip
    api_key_file: str | None = option(
        None, "the servers' own file of keys, of mode 0600 (docs/tenants.md)", section="access"
    )
    prefill_timeout: float = option(
        120.0, "a prefill server that has not computed a prompt in this time is left out until it is ready again, and "
        "another one is asked, or else the decode server computes the prompt",
        section="requests", least=0.1, greatest=86400, unit="seconds",
    )  # fmt: skip
    max_bytes_in_flight: int = option(
        MOST_BYTES_IN_FLIGHT, "room for the bodies of all requests that are not answered yet; several of one tenant, "
        "or without keys of one address, get half of it at most; more are refused with 429",
        section="requests", least=1, unit="bytes",
    )  # fmt: skip
