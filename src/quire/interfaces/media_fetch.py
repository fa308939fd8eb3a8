"""What URLs of media lead to: from hosts that were named at start and from a folder; by default from nowhere.

Owns an event loop in a thread of its own, so that no byte of a strange server is handled beside requests. The name of a
host is resolved once, all its addresses are looked at, and the connection goes to one of these; nobody asks a second
time. A redirection is another URL, and looked at like the first. The only module of the server that connects to places
that a request names. Called by ImageRendering.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import stat
import string
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

from quire.config.images import ImageConfig
from quire.errors import RequestError
from quire.renderer.images import MOST_BYTES

if TYPE_CHECKING:
    from httpx2 import URL, AsyncHTTPTransport, Response

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[list[str]]]
_T = TypeVar("_T")

# of all that a request names, together
MOST_BYTES_OF_REQUEST = 2 * MOST_BYTES
_MOST_REDIRECTS = 3
_MOST_CHARACTERS = 2048
_MOST_ADDRESSES = 3
# A backslash, a space or a control character is read in one way here and in another there.
_ALLOWED_CHARACTERS = frozenset(string.ascii_letters + string.digits + "-._~:/?#[]@!$&'()*+,;=%")
# IPv4 inside of IPv6, by way of a translator
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
_HEADERS = {
    "Accept": "image/png, image/jpeg, image/webp, image/gif, video/mp4, video/webm, video/quicktime",
    # bytes are counted as they come: nothing small becomes large
    "Accept-Encoding": "identity",
    "Connection": "close",
    "User-Agent": "quire",
}


# a form of each kind in which it can be sent
_EXAMPLES = {"image": "image/png", "video": "video/mp4"}


@dataclass(frozen=True)
class Place:
    """Where a URL stands in a request, and what is to be there: an image or a video."""

    where: str
    kind: str = "image"


class MediaFetcher:
    """Of one configuration."""

    def __init__(self, config: ImageConfig, resolve: Resolve | None = None) -> None:
        self._hosts = frozenset(config.hosts)
        self._networks = [ipaddress.ip_network(network) for network in config.networks]
        self._seconds = config.fetch_seconds
        self._folder = os.path.realpath(config.folder) if config.folder is not None else None
        self._resolve = resolve or _resolved

    async def fetch(self, places: Mapping[str, Place]) -> dict[str, bytes]:
        """The bytes behind URLs, each of which stands at a place of the request. RequestError: one cannot be had."""
        files = {url: place for url, place in places.items() if url[:5].lower() == "file:"}
        asked = [(url, self._allowed(url, place), place) for url, place in places.items() if url not in files]
        if files and self._folder is None:
            raise _refused(
                next(iter(files.values())),
                "no files are read here unless allowed_local_media_path (--allowed-local-media-path) names a folder",
            )
        if not places:
            return {}
        budget = _Budget(MOST_BYTES_OF_REQUEST)
        jobs = {url: self._get(target, place, budget) for url, target, place in asked}
        for url, place in files.items():
            jobs[url] = asyncio.to_thread(_file_below, str(self._folder), url, place, budget)
        return await self._in_thread(self._all(jobs, places))

    # ------------------------------------------------------------------------------------------ what is allowed

    def _allowed(self, url: str, place: Place) -> URL:
        """The URL that is fetched, exactly as it was looked at."""
        from httpx2 import URL, InvalidURL

        if not (self._hosts or self._networks):
            if "://" not in url:
                raise _refused(place, "this is no URL, and a path alone is not opened")
            raise _refused(
                place, "no URL is fetched here unless allowed_media_domains (--allowed-media-domains) names its host"
            )
        if len(url) > _MOST_CHARACTERS or not _ALLOWED_CHARACTERS.issuperset(url):
            raise _refused(
                place, f"a URL has at most {_MOST_CHARACTERS} characters, and none that must be written with %"
            )
        try:
            target = URL(url)
        except (InvalidURL, ValueError):
            raise _refused(place, "this is no valid URL") from None
        if not 0 < (target.port or 1) < 65536:
            raise _refused(place, "a port is a number up to 65535")
        if target.scheme not in ("http", "https") or target.userinfo or not target.host:
            raise _refused(place, "a URL begins with http:// or https:// and the name of a host, without a user")
        host = target.raw_host.decode("ascii")
        address = _address(host)
        is_named = host in self._hosts if address is None else self._is_named(address)
        if not is_named:
            raise _refused(place, f"{host[:100]!r} is not among the hosts that {place.kind}s are fetched from")
        return target

    def _is_named(self, address: Address) -> bool:
        return any(address in network for network in self._networks)

    async def _addresses(self, url: URL, place: Place) -> list[str]:
        """All of them may be reached."""
        host = url.raw_host.decode("ascii")
        if _address(host) is not None:
            return [host]
        try:
            found = await self._resolve(host, url.port or (443 if url.scheme == "https" else 80))
        except OSError:
            raise _refused(place, f"the name {host[:100]!r} leads nowhere") from None
        addresses = [_address(one) for one in found]
        if not addresses or not all(one is not None and (_is_public(one) or self._is_named(one)) for one in addresses):
            raise _refused(place, f"{host[:100]!r} leads to an address that may not be reached unless it is named")
        return found[:_MOST_ADDRESSES]

    # ------------------------------------------------------------------------------------------ fetching

    async def _all(
        self, jobs: Mapping[str, Coroutine[Any, Any, bytes]], places: Mapping[str, Place]
    ) -> dict[str, bytes]:
        """Side by side; the first that fails ends the others."""
        tasks: dict[str, asyncio.Task[bytes]] = {}
        try:
            async with asyncio.timeout(self._seconds), asyncio.TaskGroup() as group:
                tasks = {url: group.create_task(job) for url, job in jobs.items()}
        except TimeoutError:
            late = next((place for url, place in places.items() if tasks[url].cancelled()), next(iter(places.values())))
            raise _refused(late, f"the {late.kind} did not come within {self._seconds:g} seconds") from None
        except ExceptionGroup as group_error:
            error = group_error.exceptions[0]
            raise error from None
        return {url: task.result() for url, task in tasks.items()}

    async def _get(self, url: URL, place: Place, budget: _Budget) -> bytes:
        for _ in range(_MOST_REDIRECTS + 1):
            response = await self._answer(url, place)
            try:
                if not response.has_redirect_location:
                    return await _body(response, place, budget)
                url = self._allowed(str(url.join(response.headers["location"])), place)
            finally:
                await response.aclose()
        raise _refused(place, f"it was redirected more than {_MOST_REDIRECTS} times")

    async def _answer(self, url: URL, place: Place) -> Response:
        """Of the first address that lets itself be connected to."""
        from httpx2 import ConnectError, HTTPError, InvalidURL, Request

        for address in await self._addresses(url, place):
            request = Request(
                "GET",
                url.copy_with(host=address, fragment=None),
                headers={**_HEADERS, "Host": url.netloc.decode("ascii")},
                extensions={"sni_hostname": url.raw_host.decode("ascii")},
            )
            try:
                return await self._transport.handle_async_request(request)
            except ConnectError:
                continue
            except (HTTPError, InvalidURL, OSError):
                raise _refused(place, "its host did not answer as it should") from None
        raise _refused(place, "its host cannot be reached")

    @cached_property
    def _transport(self) -> AsyncHTTPTransport:
        """No cookies, no proxies of the environment, no connection that another host's name has opened."""
        from httpx2 import AsyncHTTPTransport, Limits

        return AsyncHTTPTransport(trust_env=False, limits=Limits(max_keepalive_connections=0))

    # ------------------------------------------------------------------------------------------ its thread

    async def _in_thread(self, work: Coroutine[Any, Any, _T]) -> _T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="quire-fetch", daemon=True).start()
        weakref.finalize(self, loop.call_soon_threadsafe, loop.stop)
        return loop


@dataclass
class _Budget:
    """Bytes that what a request names by URL may still have."""

    left: int

    def take(self, num_bytes: int, place: Place) -> None:
        self.left -= num_bytes
        if self.left < 0:
            raise _refused(place, f"all that a request names by URL has at most {MOST_BYTES_OF_REQUEST} bytes together")


async def _body(response: Response, place: Place, budget: _Budget) -> bytes:
    from httpx2 import HTTPError, StreamError

    if response.status_code != 200:
        raise _refused(place, f"its host answered with status {response.status_code}")
    length = response.headers.get("content-length", "")
    chunks: list[bytes] = []
    size = int(length) if length.isdecimal() and len(length) < 20 else 0
    try:
        _check_size(size, place)
        size = 0
        async for chunk in response.aiter_raw():
            size += len(chunk)
            _check_size(size, place)
            budget.take(len(chunk), place)
            chunks.append(chunk)
    except (HTTPError, StreamError, OSError):
        raise _refused(place, "its host broke off") from None
    return b"".join(chunks)


def _check_size(num_bytes: int, place: Place) -> None:
    if num_bytes > MOST_BYTES:
        raise _refused(place, f"the {place.kind} has more than {MOST_BYTES} bytes")


async def _resolved(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def _address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return None


def _is_public(address: Address) -> bool:
    """Also what stands inside of it."""
    inner: list[Address | None] = []
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _TRANSLATED:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    addresses = [address, *(one for one in inner if one is not None)]
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        addresses = [address.ipv4_mapped]
    return all(one.is_global and not one.is_multicast for one in addresses)


def _file_below(folder: str, url: str, place: Place, budget: _Budget) -> bytes:
    """All links are followed first. One answer for all that is not there, is no file, or lies elsewhere."""
    content: bytes | None = None
    try:
        path = os.path.realpath(_path_of(url), strict=True)
        if os.path.commonpath((folder, path)) == folder:
            # a last link that was put there since is not followed; a pipe does not make anybody wait
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError):
        pass
    if content is None:
        raise _refused(place, f"there is no such file below the folder that {place.kind}s are read from")
    _check_size(len(content), place)
    budget.take(len(content), place)
    return content


def _path_of(url: str) -> str:
    """ValueError: the URL names no absolute path of this machine."""
    rest = url[len("file:") :]
    if rest.startswith("//"):
        host, slash, rest = rest[2:].partition("/")
        rest = slash + rest
        if host not in ("", "localhost"):
            raise ValueError(host)
    path = unquote(rest, errors="strict")
    if not path.startswith("/") or len(path) > _MOST_CHARACTERS or "\0" in path or not url.isascii():
        raise ValueError(path)
    return path


def _refused(place: Place, why: str) -> RequestError:
    example = _EXAMPLES[place.kind]
    text = f"{place.where}: {why}. Send the {place.kind} itself as a data URL (data:{example};base64,...)."
    return RequestError(text, param=place.where, code=f"invalid_{place.kind}_url")
