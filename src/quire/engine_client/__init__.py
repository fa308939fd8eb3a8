"""ENGINE CLIENT (4.1.2): token ids in, token ids out; the core is in a thread or behind a socket."""

from quire.engine_client.async_client import AsyncEngineClient
from quire.engine_client.deltas import TokenDelta
from quire.engine_client.link import Link, open_link
from quire.engine_client.mailbox import Mailbox
from quire.engine_client.stream import RequestStream, Stream, each_of, items_of, news_of

__all__ = [
    "AsyncEngineClient",
    "Link",
    "Mailbox",
    "RequestStream",
    "Stream",
    "TokenDelta",
    "each_of",
    "items_of",
    "news_of",
    "open_link",
]
