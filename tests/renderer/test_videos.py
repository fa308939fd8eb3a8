"""Which frames a video has, how large they become and when they are; and what is refused before much is decoded."""

import base64
import io
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.film import film, is_possible
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

from quire.config.image_sizes import whole_cells
from quire.config.images import VideoConfig
from quire.config.video_sizes import VideoSizes
from quire.errors import ModelError, RequestError
from quire.renderer.image_decoder import ImageDecoder
from quire.renderer.image_parts import Sources
from quire.renderer.image_processor import ImageProcessor
from quire.renderer.videos import VideoDecoder
from quire.worker.image_rows import pixels_of

HF_CONFIG = {"model_type": "qwen2_5_vl", "image_token_id": 5, "video_token_id": 6}
PLACE = "messages[0].content[0].video_url"
needs_av = pytest.mark.skipif(not is_possible, reason="needs PyAV")


def jpegs(count: int, size: tuple[int, int] = (56, 84), levels=lambda number: 20 * number) -> str:
    frames = []
    for number in range(count):
        stream = io.BytesIO()
        Image.new("RGB", size, (levels(number),) * 3).save(stream, "jpeg")
        frames.append(base64.b64encode(stream.getvalue()).decode())
    return "data:video/jpeg;base64," + ",".join(frames)


@pytest.fixture(scope="module")
def decoder():
    images = ImageDecoder()
    decoder = VideoDecoder(VideoConfig(), images)
    yield decoder
    decoder.close()
    images.close()


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    processor = ImageProcessor.find(tmp_path_factory.mktemp("none"), HF_CONFIG)
    yield processor
    processor.close()


def media_of(processor: ImageProcessor, *sources: object):
    opened = processor.open(Sources(videos=[(source, PLACE) for source in sources]))
    return opened.expand([1, *[6] * len(sources)], 10_000)


@pytest.mark.parametrize("side", [28, 32])
def test_sizes_are_those_of_transformers(side: int):
    """Random ones; of Qwen 3 VL all frames are bounded together."""
    sizes = VideoSizes(4096, 2_000_000, True, True, 0.0, 2, side, 10**6)
    chosen = np.random.default_rng(side)
    for _ in range(300):
        count, width, height = (int(chosen.integers(low, high)) for low, high in ((2, 60), (10, 900), (10, 900)))
        expected = smart_resize(count, height, width, 2, side, 4096, 2_000_000)
        assert sizes.frame_size(width, height, count, 1)[::-1] == expected, (count, width, height)


def test_a_frame_has_no_more_tokens_than_a_step_and_a_video_no_more_pixels_than_there_is_room_for():
    sizes = VideoSizes(128 * 784, 10**9, False, False, 4.0, 2, 28, 100)
    for frames in (1, 2, 64, 128):
        width, height = sizes.frame_size(4096, 2304, frames, 1)
        assert 80 <= width * height // 784 <= 100
    large = VideoSizes(128 * 784, 10**9, False, False, 4.0, 2, 28, 10**6)
    for videos in (1, 4):
        width, height = large.frame_size(4096, 2304, 128, videos)
        assert 0.8 * (32 << 20) < width * height * 128 * videos <= 32 << 20
    assert whole_cells(56, 56, 28, 1, 10**6) == (56, 56)


@pytest.mark.parametrize("numbers", [[0, 6, 12, 18, 24, 31], [0, 7, 9], [4]])
def test_times_are_those_of_transformers(numbers: list[int], tmp_path: Path):
    processor = ImageProcessor.find(tmp_path, {**HF_CONFIG, "model_type": "qwen3_vl"})
    frames = [Image.new("RGB", (64, 64))] * len(numbers)
    metadata = {"fps": 7.5, "frames_indices": numbers, "total_num_frames": 40}
    opened = processor.open(Sources(videos=[((frames, metadata), PLACE)]))
    expected = Qwen3VLProcessor._calculate_timestamps(None, list(numbers), 7.5, 2)
    assert list(processor.videos._seconds(opened.videos[0])) == expected


def test_frames_stand_two_by_two(processor: ImageProcessor):
    """Each patch has the pixels of both; the last frame of an odd number stands twice."""
    frames = np.random.default_rng(0).integers(0, 255, (3, 364, 364, 3), dtype=np.uint8)
    token_ids, media = media_of(processor, (frames, {"fps": 2.0}))
    assert [(one.start, one.length, one.grid, one.time) for one in media] == [
        (1, 169, [1, 26, 26], None), (170, 169, [1, 26, 26], 4),
    ]  # fmt: skip
    assert token_ids == [1, *[6] * 338]
    patch = pixels_of(media[0], torch.device("cpu"))[0].view(3, 2, 14, 14)
    mean, std = (torch.tensor(numbers)[:, None, None, None] for numbers in (processor.mean, processor.std))
    expected = (torch.from_numpy(frames[:2, :14, :14].copy()).permute(3, 0, 1, 2) / 255 - mean) / std
    torch.testing.assert_close(patch, expected, atol=1e-5, rtol=0)
    last = pixels_of(media[1], torch.device("cpu")).view(-1, 3, 2, 14, 14)
    assert (last[:, :, 0] == last[:, :, 1]).all()
    assert len({one.content_hash for one in media}) == 2


def test_jpeg_frames(processor: ImageProcessor):
    _, media = media_of(processor, jpegs(5))
    assert [one.time for one in media] == [None, 8, 16], "a frame a second, 4 positions a second"
    levels = [
        np.frombuffer(one.pixels, np.uint8).reshape(len(one.pixels) // 392, 2, 196).mean(axis=(0, 2)) for one in media
    ]
    np.testing.assert_allclose(np.concatenate(levels), [0, 20, 40, 60, 80, 80], atol=1)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (jpegs(129, (8, 8)), "it has 129 frames, at most 128 are taken"),
        ("data:video/jpeg;base64," + "," * 10_000, "it has 10001 frames"),
        ("data:video/jpeg;base64," + "A" * (30 << 20), "at most 20971520 are taken"),
        (jpegs(1) + "," + jpegs(1, (84, 56)).partition(",")[2], "send one size"),
        (jpegs(1) + ",AAAA", "frame 1: the bytes are no image"),
        (jpegs(1) + ",", "frame 1: the bytes are no image"),
        ("data:image/png;base64,AAAA", "must begin with data:video/mp4;base64"),
        ("data:video/mp4,AAAA", "must begin with data:video/mp4;base64"),
        ("http://127.0.0.1/x.mp4", "must begin with data:video/mp4;base64"),
        (5, "must be encoded bytes, a data URL, frames"),
        ([], "must be encoded bytes, a data URL, frames"),
        (np.zeros((2, 9, 9, 4), np.uint8), "frames are images of Pillow, or arrays"),
        (np.zeros((2, 9, 9, 3), np.float32), "frames are images of Pillow, or arrays"),
        (np.zeros((129, 1, 1, 3), np.uint8), "it has 129 frames"),
        (np.broadcast_to(np.zeros(3, np.uint8), (2, 5000, 5000, 3)), "it is 5000 x 5000 pixels"),
        ([Image.new("RGB", (8, 8)), Image.new("RGB", (9, 8))], "several sizes"),
        ([Image.new("RGB", (2000, 2))], "differ by a factor of 200"),
        ((np.zeros((2, 99, 99, 3), np.uint8), {"fps": -1}), "fps=-1"),
        ((np.zeros((2, 99, 99, 3), np.uint8), {"fps": math.nan}), "fps=nan"),
        ((np.zeros((4, 99, 99, 3), np.uint8), {"fps": 0.01}), "s apart, too far for"),
        ((np.zeros((2, 99, 99, 3), np.uint8), {"frames_indices": [3, 1]}), "2 numbers that grow"),
        ((np.zeros((2, 99, 99, 3), np.uint8), {"frames_indices": [0, 9], "total_num_frames": 5}), "2 numbers"),
        ((np.zeros((2, 99, 99, 3), np.uint8), {"do_sample_frames": True}), "do_sample_frames"),
        ((np.zeros((2, 99, 99, 3), np.uint8), 7), "must be an object"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 60 else "x",
)  # fmt: skip
def test_what_is_refused(given: object, text: str, processor: ImageProcessor):
    with pytest.raises(RequestError) as caught:
        media_of(processor, given)
    assert text in str(caught.value)
    assert str(caught.value).startswith(PLACE)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 350


def test_time_is_bounded_over_all_frames(processor: ImageProcessor):
    with pytest.raises(RequestError, match="takes more than 0 s to decode"):
        VideoDecoder(VideoConfig(), processor.decoder, seconds=0).open(jpegs(3), PLACE)


def test_without_a_decoder_files_are_refused_with_the_name_of_one(monkeypatch, decoder: VideoDecoder):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(RequestError, match=r'pip install "quire\[video\]"\)\. Send its frames as data:video/jpeg'):
        decoder.open("data:video/mp4;base64,AAAA", PLACE)


def test_numbers_that_no_video_can_be_cut_by(tmp_path: Path):
    for content in ('{"min_pixels": 9, "max_pixels": 5}', '{"size": {"shortest_edge": "a"}}', "[1]", "{"):
        (tmp_path / "video_preprocessor_config.json").write_text(content, encoding="utf-8")
        with pytest.raises(ModelError, match=r"video_preprocessor_config\.json: "):
            ImageProcessor.find(tmp_path, HF_CONFIG)


# ------------------------------------------------------------------------------------------------ files


@needs_av
@pytest.mark.parametrize("kind", ["h264", "mpeg4", "vp9", "vp8"])
def test_frames_of_files_are_spread_evenly(kind: str, decoder: VideoDecoder):
    video = decoder.open(film(40, kind=kind), PLACE)
    assert video.size == (96, 64)
    assert video.timing.numbers == np.linspace(0, 39, 32).astype(int).tolist()
    assert (video.timing.num_frames, video.timing.rate) == (40, 10.0)
    levels = [frame.mean() for frame in video.frames((48, 32), 3)]
    np.testing.assert_allclose(levels, [6 * number for number in video.timing.numbers], atol=4)
    few = VideoDecoder(VideoConfig(num_frames=20, fps=2.0), ImageDecoder())
    assert few.open(film(40, kind=kind), PLACE).timing.numbers == np.linspace(0, 39, 8).astype(int).tolist()
    few.close()


@needs_av
def test_a_video_that_lies_on_its_side_is_seen_upright(decoder: VideoDecoder):
    content = bytearray(film(4, kind="h264", marked=True))
    place = content.index(b"tkhd") + 4 + 40
    turned = [0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30]
    content[place : place + 36] = b"".join(number.to_bytes(4, "big", signed=True) for number in turned)
    video = decoder.open(bytes(content), PLACE)
    assert video.size == (64, 96)
    frame = next(iter(video.frames((64, 96), 3)))
    # what is bright was the left upper corner, which is at the right when it is turned clockwise
    assert frame[:20, 44:].mean() > 150 > 60 > frame[:20, :20].mean()
