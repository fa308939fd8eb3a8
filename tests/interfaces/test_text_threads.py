"""Long texts beside the event loop: few at once, and a caller that leaves gives its slot back only at the end."""

import asyncio
import threading

import pytest

from quire.interfaces.text_threads import TextThreads


def test_few_at_once_and_results_and_errors_come_back():
    async def main():
        threads = TextThreads(1)
        gate, running = threading.Event(), []

        def work(name):
            running.append(name)
            assert gate.wait(30)
            return name

        first = asyncio.ensure_future(threads.call(work, "first"))
        second = asyncio.ensure_future(threads.call(work, "second"))
        while not running:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        # its thread still runs, so nobody else does
        assert running == ["first"]
        gate.set()
        assert await second == "second"
        with pytest.raises(ZeroDivisionError):
            await threads.call(lambda: 1 / 0)
        assert await threads.call(int, "7") == 7

    asyncio.run(asyncio.wait_for(main(), 30))
