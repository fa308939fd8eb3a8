"""TLS of the server: a certificate and its key, which may change while it serves.

Whoever renews certificates writes two files, one after the other; between the two they do not belong together. So a
new pair is tried first, and what is in use stays until one stands. Connections that are open keep theirs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl

from quire.errors import OptionError

logger = logging.getLogger("quire.server")

_LOOK_SECONDS = 5.0


class Tls:
    """One certificate for all ports of a process."""

    def __init__(self, certificate: str, key: str | None = None) -> None:
        """`key`: None if it is in the certificate's file. Raises OptionError if they cannot be used."""
        self._certificate = certificate
        self._key = key
        self._stamps = self._read_stamps()
        try:
            self.context = self._read()
        except (OSError, ValueError) as error:
            raise OptionError(
                f"{self._what_is_wrong(error)} Give both in PEM form, the key without a password."
            ) from None

    def look(self) -> None:
        """Takes what the files have become. A pair that does not stand is said once, and looked at when it changes."""
        stamps = self._read_stamps()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            self._read()
            self._load_into(self.context)
        except (OSError, ValueError) as error:
            logger.warning("%s The certificate that was read before stays in use.", self._what_is_wrong(error))
        else:
            logger.info("the certificate of %s is used from now on", self._certificate)

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self.look()

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load_into(context)
        return context

    def _load_into(self, context: ssl.SSLContext) -> None:
        # a password: OpenSSL would ask for it at the terminal
        context.load_cert_chain(self._certificate, self._key, password=lambda: "")

    def _read_stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(path) for path in (self._certificate, self._key or self._certificate))

    def _what_is_wrong(self, error: Exception) -> str:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        return f"ssl_certfile={self._certificate} and ssl_keyfile={self._key}: they cannot be used ({reason})."


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Changes whenever the file does; None: there is none."""
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_ino, state.st_size, state.st_mtime_ns
