"""Videos in files, each frame of one level; made where there is an encoder."""

from __future__ import annotations

import functools
import importlib.util
import io

import numpy as np

_KINDS = {
    "h264": ("libx264", "mp4"),
    "mpeg4": ("mpeg4", "mp4"),
    "vp9": ("libvpx-vp9", "webm"),
    "vp8": ("libvpx", "webm"),
}
is_possible = importlib.util.find_spec("av") is not None


@functools.cache
def film(
    count: int, *, kind: str = "h264", width: int = 96, height: int = 64, marked: bool = False, step: int = 6
) -> bytes:
    """Ten frames a second. `marked`: the left upper corner is bright, the others are dark."""
    import av

    codec, container = _KINDS[kind]
    stream = io.BytesIO()
    with av.open(stream, "w", format=container) as file:
        video = file.add_stream(codec, rate=10)
        video.width, video.height, video.pix_fmt = width, height, "yuv420p"
        for number in range(count):
            pixels = np.full((height, width, 3), step * number % 256, np.uint8)
            if marked:
                pixels[:] = 20
                pixels[: height // 2, : width // 2] = 220
            file.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(video.encode())
    return stream.getvalue()
