"""How many requests begin in a turn of the event loop."""

import asyncio
import itertools

from quire.interfaces.server.access.turnstile import Turnstile


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
