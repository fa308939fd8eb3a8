"""The memory that images of all requests may take: counted while they are open, and refused beyond."""

import asyncio
from functools import partial

import pytest
from tests.differential.test_images import PROMPTS

from quire import AsyncLLM, SamplingParams
from quire.config.images import MOST_OPEN_BYTES, ImageConfig
from quire.interfaces.image_rendering import ImageRendering
from quire.interfaces.server import served_model
from quire.interfaces.server.options import ServerOptions
from quire.interfaces.server.parts import parts_of
from quire.interfaces.server.wire.errors import ApiError
from quire.observability.instruments import Counter
from quire.renderer.image_parts import Sources
from quire.testing.image_checkpoints import make_image_checkpoint

LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def test_pixels_are_counted_until_their_request_ends(tmp_path, run):
    checkpoint = make_image_checkpoint(tmp_path / "vision", "qwen2_5_vl")

    async def main():
        options = {"dtype": "float32", "device": "cpu", "max_model_len": 128, "engine_process": False}
        async with AsyncLLM(str(checkpoint), **options) as engine:
            prepared = [await engine.prepare(prompt, LONG) for prompt in PROMPTS]
            sizes = [sum(len(image.pixels) for image in one.request.media) for one in prepared]
            assert sizes[1] == 0
            streams = [engine.stream(one) for one in prepared]
            for stream in streams:
                await anext(stream)
            assert engine.num_image_bytes == engine.client_statistics()["image_bytes_open"] == sum(sizes) > 0
            rejections = Counter("rejected", "", ["why"])
            check = partial(served_model._check_image_room, engine, rejections=rejections)
            check(sum(sizes) + 1)
            assert rejections.value("images") == 0
            with pytest.raises(ApiError, match="was not started") as caught:
                check(sum(sizes))
            assert rejections.value("images") == 1
            assert (caught.value.status, caught.value.headers["retry-after"]) == (429, "1")
            assert "\n" not in str(caught.value)
            for stream in streams:
                await stream.aclose()
            assert engine.num_image_bytes == 0
            check(1)

    run(main())


def test_the_room_is_looked_at_when_the_turn_of_an_image_has_come(run):
    """Many that were let in together would all find room."""
    held: list[int] = []

    def check() -> None:
        if held:
            raise MemoryError

    def decode(number: int) -> int:
        held.append(number)
        return number

    async def main():
        rendering = ImageRendering(ImageConfig(), check_room=check)
        calls = [rendering.call(decode, Sources([("data:", "image")]), number=number) for number in range(5)]
        return await asyncio.gather(*calls, return_exceptions=True)

    results = run(main())
    assert results[0] == 0
    assert [type(result) for result in results[1:]] == [MemoryError] * 4


def test_several_processes_of_a_server_divide_the_room():
    """A start sets it aside once, however many answer for the engine."""
    parts = parts_of(ServerOptions(api_server_count=4))
    assert parts["models"]._most_image_bytes * 4 == MOST_OPEN_BYTES
