"""Whose turn it is to have media fetched and decoded: what is slow holds up its own kind and its own client alone."""

import asyncio
import threading

import pytest

from quire.config.images import ImageConfig
from quire.errors import RequestError
from quire.interfaces import image_rendering
from quire.interfaces.image_rendering import SOUNDS, FairTurns, ImageRendering
from quire.renderer.image_parts import Sources

IMAGE = Sources(images=[("data:image", "messages[0]")])
VIDEO = Sources(videos=[("data:video", "messages[0]")])


class Work:
    """Ends when it is told to; who began is kept in order."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.gates: dict[str, threading.Event] = {}

    def __call__(self, name: str) -> str:
        self.began.append(name)
        assert self.gates.setdefault(name, threading.Event()).wait(60)
        return name

    def end(self, name: str) -> None:
        self.gates.setdefault(name, threading.Event()).set()


class Server:
    def __init__(self) -> None:
        self.client: str | None = None
        self.work = Work()
        self.rendering = ImageRendering(ImageConfig(), client=lambda: self.client)

    async def begin(self, client: str | None, name: str, sources: Sources, **options: str) -> asyncio.Task[str]:
        self.client = client
        task = asyncio.ensure_future(self.rendering.call(self.work, sources, name=name, **options))
        await asyncio.sleep(0)
        return task

    async def until_begun(self, *names: str) -> None:
        async with asyncio.timeout(60):
            while set(self.work.began) != set(names):
                await asyncio.sleep(0.001)


def test_a_slow_video_holds_up_no_image_and_nobody_elses_video():
    async def main() -> None:
        server = Server()
        slow = [await server.begin("slow", f"slow {number}", VIDEO) for number in range(4)]
        others = [
            await server.begin("other", "image", IMAGE),
            await server.begin("other", "sound", Sources(), kind=SOUNDS),
            await server.begin("other", "vectors", Sources()),
            await server.begin("other", "video", VIDEO),
        ]
        await server.until_begun("slow 0", "image", "sound", "vectors", "video")
        for name in ("image", "sound", "vectors", "video"):
            server.work.end(name)
        await asyncio.gather(*others)
        for number in range(4):
            server.work.end(f"slow {number}")
        await asyncio.gather(*slow)

    asyncio.run(main())


def test_a_slow_sound_holds_up_nobody_elses_sound():
    async def main() -> None:
        server = Server()
        slow = [await server.begin("slow", f"slow {number}", Sources(), kind=SOUNDS) for number in range(3)]
        other = await server.begin("other", "other", Sources(), kind=SOUNDS)
        await server.until_begun("slow 0", "other")
        server.work.end("other")
        assert await other == "other"
        for number in range(3):
            server.work.end(f"slow {number}")
        await asyncio.gather(*slow)

    asyncio.run(main())


def test_who_leaves_has_its_turn_until_its_thread_ends():
    """Else a client that comes and leaves would have as many threads as it likes."""

    async def main() -> None:
        server = Server()
        first = await server.begin("slow", "first", VIDEO)
        await server.until_begun("first")
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = await server.begin("slow", "second", VIDEO)
        other = await server.begin("other", "other", VIDEO)
        await server.until_begun("first", "other")
        server.work.end("first")
        await server.until_begun("first", "other", "second")
        for name in ("second", "other"):
            server.work.end(name)
        assert await asyncio.gather(second, other) == ["second", "other"]

    asyncio.run(main())


def test_what_fails_gives_its_turn_back():
    def fail() -> None:
        raise RequestError("no")

    async def main() -> None:
        rendering = ImageRendering(ImageConfig())
        for _ in range(5):
            with pytest.raises(RequestError, match="no"):
                await rendering.call(fail, VIDEO)
        with pytest.raises(RequestError, match="no URL is fetched here"):
            await rendering.call(fail, Sources(videos=[("http://host/a.mp4", "here")]))
        assert all(
            turns._taken.total() == 0 for lane in rendering._lanes.values() for turns in (lane.fetching, lane.decoding)
        )

    asyncio.run(main())


def test_the_client_that_had_no_turn_for_longest_goes_first():
    async def main() -> None:
        turns = FairTurns(1, 1, 1)
        order: list[str] = []

        async def use(name: str) -> None:
            await turns.take(name[0])
            order.append(name)
            await asyncio.sleep(0)
            turns.give_back(name[0])

        await asyncio.gather(*map(use, ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]))
        assert order == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]

    asyncio.run(main())


def test_clients_that_come_once_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    """And those that had a turn lately still wait for the others."""
    monkeypatch.setattr(image_rendering, "_MOST_REMEMBERED", 3)

    async def main() -> None:
        turns = FairTurns(1, 1, 1)
        for number in range(100):
            await turns.take(f"{number}")
            turns.give_back(f"{number}")
        assert list(turns._last_turn) == ["97", "98", "99"]
        assert not turns._taken
        await turns.take("a")
        order: list[str] = []

        async def use(client: str) -> None:
            await turns.take(client)
            order.append(client)
            turns.give_back(client)

        waiting = [asyncio.ensure_future(use(client)) for client in ("a", "99", "98", "5")]
        await asyncio.sleep(0)
        turns.give_back("a")
        await asyncio.gather(*waiting)
        assert order == ["5", "98", "99", "a"]

    asyncio.run(main())


def test_a_turn_that_nobody_waits_for_any_more_goes_on():
    async def main() -> None:
        turns = FairTurns(1, 1, 1)
        await turns.take("a")
        waiting = [asyncio.ensure_future(turns.take(client)) for client in ("b", "c", "d")]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        turns.give_back("a")
        # it has its turn, and leaves before it hears of it
        waiting[1].cancel()
        await asyncio.wait_for(waiting[2], 60)
        assert turns._taken.total() == 1

    asyncio.run(main())


def test_those_that_nobody_knows_apart_have_a_share_of_their_own():
    async def main() -> None:
        turns = FairTurns(2, 1, 2)
        await turns.take(None)
        await asyncio.wait_for(turns.take(None), 60)
        known = asyncio.ensure_future(turns.take("a"))
        await asyncio.sleep(0)
        assert not known.done()
        turns.give_back(None)
        await asyncio.wait_for(known, 60)

    asyncio.run(main())


def test_a_turn_is_not_handed_to_those_who_have_just_left():
    """Their futures are cancelled at once, and they notice it in the next turn of the loop."""

    async def main() -> None:
        turns = FairTurns(2, 1, 2)
        await turns.take(None)
        await turns.take(None)
        left = [asyncio.ensure_future(turns.take(None)) for _ in range(3)]
        stays = asyncio.ensure_future(turns.take(None))
        await asyncio.sleep(0)
        for waiting in left:
            waiting.cancel()
        turns.give_back(None)
        newcomer = asyncio.ensure_future(turns.take(None))
        await asyncio.wait_for(stays, 60)
        for waiting in left:
            with pytest.raises(asyncio.CancelledError):
                await waiting
        turns.give_back(None)
        await asyncio.wait_for(newcomer, 60)
        turns.give_back(None)
        turns.give_back(None)
        # as many as at the beginning, and nobody else has one
        for _ in range(2):
            await asyncio.wait_for(turns.take(None), 60)

    asyncio.run(main())


class Name(str):
    """Counts how often anybody looks a client up."""

    __slots__ = ()
    num_lookups = 0

    def __hash__(self) -> int:
        Name.num_lookups += 1
        return super().__hash__()


@pytest.mark.parametrize("num_clients", [20, 400])
def test_a_turn_costs_the_same_however_many_wait(num_clients: int):
    async def main() -> None:
        turns = FairTurns(2, 1, 2)
        order: list[str] = []

        async def use(client: str) -> None:
            await turns.take(client)
            order.append(client)
            await asyncio.sleep(0)
            turns.give_back(client)

        names = [Name(number) for number in range(num_clients)]
        Name.num_lookups = 0
        await asyncio.gather(*(use(name) for _ in range(2) for name in names))
        assert order == [*names, *names]
        assert Name.num_lookups < 100 * len(order)

    asyncio.run(main())
