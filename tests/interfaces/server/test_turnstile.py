"""How many requests begin in a turn of the event loop, and how much of long bodies is done in one."""

import asyncio
import itertools
import json
from collections import Counter
from functools import partial

from quire.interfaces.server import request_body
from quire.interfaces.server.request_body import parse_request
from quire.interfaces.turnstile import Turnstile


def test_few_begin_in_a_turn_and_all_in_their_order(run):
    async def main():
        turnstile, begun = Turnstile(3), []

        async def request(number: int) -> None:
            await turnstile.enter()
            begun.append(number)

        tasks = [asyncio.create_task(request(number)) for number in range(20)]
        counts = [0]
        while len(begun) < 20:
            await asyncio.sleep(0)
            counts.append(len(begun))
        await asyncio.gather(*tasks)
        assert begun == list(range(20))
        assert max(later - earlier for earlier, later in itertools.pairwise(counts)) == 3

    run(main())


def test_one_that_gave_up_takes_no_turn(run):
    async def main():
        turnstile = Turnstile(1)
        await turnstile.enter()
        tasks = [asyncio.create_task(turnstile.enter()) for _ in range(3)]
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [task.cancelled() for task in tasks] == [True, False, False]
        # nobody is owed a turn any more
        await asyncio.wait_for(turnstile.enter(), 5)

    run(main())


def test_who_waits_is_called_when_something_is_left(run):
    async def main():
        turnstile, order = Turnstile(10), []

        def work(name, num_left):
            while num_left:
                if not turnstile.left:
                    turnstile.wait(partial(work, name, num_left))
                    return
                count = min(num_left, turnstile.left)
                turnstile.take(count)
                order.append((name, count))
                num_left -= count

        for name in "abc":
            work(name, 15)
        counts = []
        while sum(count for _, count in order) < 45:
            before = len(order)
            await asyncio.sleep(0)
            counts.append(sum(count for _, count in order[before:]))
        assert order == [("a", 10), ("a", 5), ("b", 5), ("c", 10), ("b", 10), ("c", 5)]
        assert counts[:-1] == [10] * (len(counts) - 1)
        # who waits anew stood behind the others

    run(main())


def test_it_follows_the_event_loop(run):
    """Of one that ended with somebody waiting, nothing is left."""
    turnstile = Turnstile(1)

    async def ends_early():
        await turnstile.enter()
        waiting = asyncio.create_task(turnstile.enter())
        await asyncio.sleep(0)
        waiting.cancel()

    async def comes_later():
        await asyncio.wait_for(turnstile.enter(), 5)
        await asyncio.wait_for(turnstile.enter(), 5)

    run(ends_early())
    run(comes_later())


def test_long_bodies_leave_the_event_loop_free_between_them(run, served, monkeypatch):
    """However many come together, one is parsed in a turn of it, and another one is put together in the next."""
    text = json.dumps({"prompt": "a" * 2**20}).encode()
    size = len(text) // 4 + 1
    turn, parsed = 0, Counter()

    async def turns():
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def body():
        for start in range(0, len(text), size):
            yield text[start : start + size]

    def parse(*arguments, **options):
        parsed[turn] += 1
        return parse_request(*arguments, **options)

    async def main():
        monkeypatch.setattr(request_body, "parse_request", parse)
        async with served() as server:
            counting = asyncio.create_task(turns())
            headers = {"content-type": "application/json"}
            asked = (server.http.post("/v1/completions", content=body(), headers=headers) for _ in range(12))
            answers = await asyncio.gather(*asked)
            counting.cancel()
            assert {answer.status_code for answer in answers} == {400}
            assert {answer.json()["error"]["code"] for answer in answers} == {"context_length_exceeded"}
            assert list(parsed.values()) == [1] * 12

    run(main())


class Piece(bytes):
    """Of a body, counted while it is somewhere."""

    num_alive = 0

    def __new__(cls, data: bytes):
        cls.num_alive += 1
        return super().__new__(cls, data)

    def __del__(self) -> None:
        Piece.num_alive -= 1


def test_a_long_body_that_was_put_together_is_not_there_twice(run, served, monkeypatch):
    text = json.dumps({"prompt": "a" * 2**20}).encode()
    size = len(text) // 16 + 1
    alive = []

    async def body():
        for start in range(0, len(text), size):
            yield Piece(text[start : start + size])

    def parse(*arguments, **options):
        alive.append(Piece.num_alive)
        return parse_request(*arguments, **options)

    async def main():
        monkeypatch.setattr(request_body, "parse_request", parse)
        async with served() as server:
            headers = {"content-type": "application/json"}
            asked = (server.http.post("/v1/completions", content=body(), headers=headers) for _ in range(4))
            await asyncio.gather(*asked)
            # what is left is the last one of each, which who waits for the next one still knows
            # the first one is parsed before the others are put together, and these all before one of them is parsed
            assert alive[1:] == [0, 0, 0]

    run(main())
