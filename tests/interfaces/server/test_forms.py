"""Forms that are held in memory, and sounds that are made of them: one peer takes not all of the room."""

import asyncio
import gc
from types import SimpleNamespace

import numpy as np
import pytest

from quire.config.sound_sizes import SoundSizes
from quire.interfaces.server.form import Forms
from quire.interfaces.server.openai.sound_room import SoundRoom
from quire.interfaces.server.wire.errors import ApiError
from quire.renderer.sounds import Sound

HEAD = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'


def request(pieces, seconds: float = 0.0):
    """Its body comes piece by piece, each after so long; after the last one nothing comes any more."""
    left = iter(pieces)

    async def receive():
        await asyncio.sleep(seconds)
        piece = next(left, None)
        if piece is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": piece, "more_body": not piece.endswith(b"--b--\r\n")}

    return SimpleNamespace(headers={"content-type": "multipart/form-data; boundary=b"}, receive=receive)


async def file_of(forms: Forms, asked) -> bytes | None:
    async with forms.held(asked, 1000) as form:
        return form.file


def test_a_byte_now_and_then_keeps_no_place(run):
    async def main():
        forms = Forms(idle_seconds=0.3, queue_seconds=10)
        slow = [asyncio.create_task(file_of(forms, request([HEAD, *[b"x"] * 10_000], 0.02))) for _ in range(6)]
        await asyncio.sleep(0.05)
        assert await asyncio.wait_for(file_of(forms, request([HEAD, b"hello\r\n--b--\r\n"])), 10) == b"hello"
        found = await asyncio.gather(*slow, return_exceptions=True)
        assert [one.status for one in found] == [408] * 6

    run(main())


def test_a_place_is_held_until_nobody_needs_the_form(run):
    async def main():
        forms = Forms(idle_seconds=10, queue_seconds=10)
        is_over = asyncio.Event()

        async def hold():
            async with forms.held(request([HEAD + b"hello\r\n--b--\r\n"]), 1000):
                await is_over.wait()

        holding = [asyncio.create_task(hold()) for _ in range(6)]
        await asyncio.sleep(0)
        another = asyncio.create_task(file_of(forms, request([HEAD + b"hello\r\n--b--\r\n"])))
        done, _ = await asyncio.wait([another], timeout=0.1)
        assert not done
        is_over.set()
        assert await another == b"hello"
        await asyncio.gather(*holding)

    run(main())


def test_a_form_waits_for_a_place_no_longer_than_other_requests_do(run):
    async def main():
        forms = Forms(idle_seconds=10, queue_seconds=0.05)
        is_over = asyncio.Event()

        async def hold():
            async with forms.held(request([HEAD + b"hello\r\n--b--\r\n"]), 1000):
                await is_over.wait()

        holding = [asyncio.create_task(hold()) for _ in range(6)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match=r"waited for 0\.05 s.*max_queue_seconds") as refused:
            await file_of(forms, request([HEAD + b"hello\r\n--b--\r\n"]))
        assert refused.value.status == 503
        is_over.set()
        await asyncio.gather(*holding)
        assert await file_of(forms, request([HEAD + b"hello\r\n--b--\r\n"])) == b"hello"

    run(main())


def test_sounds_that_come_together_are_counted_one_by_one(run):
    counted = []
    counter = SimpleNamespace(add=lambda count, kind: counted.append(kind))

    async def main():
        room = SoundRoom(100, counter)
        sizes = SoundSizes.__new__(SoundSizes)

        async def decode():
            async with room.turn():
                await asyncio.sleep(0)
                sound = Sound(np.zeros((4, 4), dtype=np.float32), 1.0, sizes)
                return sound, room.hold(sound)

        found = await asyncio.gather(*(decode() for _ in range(5)), return_exceptions=True)
        refused = [one for one in found if isinstance(one, ApiError)]
        assert [one.status for one in refused] == [429] * 3
        assert room.num_bytes == 128
        # one has run, the other one never began
        found[0][1]()
        found[0][1]()
        assert room.num_bytes == 64
        del found, refused
        # the loop still has what it woke this task with
        await asyncio.sleep(0)
        gc.collect()
        assert room.num_bytes == 0

    run(main())
    assert counted == ["sounds"] * 3
