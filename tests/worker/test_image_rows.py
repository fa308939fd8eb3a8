"""Encoded images are kept by content: the second use of one runs no encoder."""

from dataclasses import dataclass
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from quire.chain_hashes import ChainHasher
from quire.errors import ModelError
from quire.messages import AdmittedSequence, Media
from quire.sampling_params import SamplingParams
from quire.worker.attention import AttentionBatch
from quire.worker.encoded_media import EncodedMedia
from quire.worker.image_rows import ImageRows, _Images


class Model:
    has_grid_positions = True

    def embed_tokens(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(input_ids), 1)

    def encode_image(self, pixels: torch.Tensor, grid: list[int]) -> torch.Tensor:
        return pixels[::4] + 1


def image(start: int, value: int) -> Media:
    return Media(
        start=start, length=2, pixels=bytes([value] * 8), shape=[8, 1, 1], mean=[0.0], std=[1 / 255], grid=[1, 2, 4],
        merge_size=2, content_hash=bytes([value]),
    )  # fmt: skip


def admitted(row: int, value: int) -> AdmittedSequence:
    return AdmittedSequence(
        row=row, sequence_id=row, token_ids=np.zeros(5), num_prompt_tokens=5, num_computed_tokens=0,
        sampling=SamplingParams(), seed=0, media=[image(1, value)],
    )  # fmt: skip


def batch(row: int, first: int, count: int) -> SimpleNamespace:
    return SimpleNamespace(
        rows_S=np.array([row]), query_starts_S1=np.array([0, count]), num_computed_S=np.array([first]),
        num_tokens_S=np.array([count]),
        input_ids_T=torch.zeros(count, dtype=torch.int64), positions_T=torch.arange(first, first + count),
    )  # fmt: skip


def test_positions_of_videos():
    """Later frames stand at the rows and columns of the first ones, and time goes on behind them: an image, a video of
    three moments, another one directly behind it, and text."""
    media = [image(0, 1), image(2, 1), at(4, 1), at(6, 4), image(9, 1), at(11, 0)]
    found = _Images.of(media).positions(0, 15)
    #          image  |  video: first, 1 and 4 positions later |   | another, at once | text
    assert found.tolist() == [
        [0, 0, 2, 2, 3, 3, 6, 6, 7, 8, 8, 8, 8, 10, 11],
        [0, 0, 2, 2, 2, 2, 2, 2, 7, 8, 8, 8, 8, 10, 11],
        [0, 1, 2, 3, 2, 3, 2, 3, 7, 8, 9, 8, 9, 10, 11],
    ]  # fmt: skip


def at(start: int, time: int) -> Media:
    return msgspec.structs.replace(image(start, 1), time=time)


def test_cut_within_an_image_and_used_again():
    rows = ImageRows(Model(), torch.device("cpu"))
    for row, value in enumerate((7, 7, 9)):
        rows.admit(admitted(row, value))
    found = []
    for row in range(3):
        _, positions, embeds = rows.of(batch(row, 0, 2))
        assert positions.tolist() == [[0, 1], [0, 1], [0, 1]]
        _, positions, more = rows.of(batch(row, 2, 3))
        assert positions.tolist() == [[1, 3, 4], [1, 3, 4], [2, 3, 4]]
        found.append([*embeds.flatten().tolist(), *more.flatten().tolist()])
    assert found == [[0, 8, 8, 0, 0], [0, 8, 8, 0, 0], [0, 10, 10, 0, 0]]
    statistics = rows.statistics()
    assert (statistics["num_images_encoded"], statistics["num_image_cache_hits"]) == (2, 4)


def test_the_same_bytes_with_other_margins_are_another_image():
    """More of a tile are no tokens then, so neither what was encoded nor a block of it serves."""
    plain = image(0, 5)
    cut = msgspec.structs.replace(plain, margin=[0, 1])
    encoded = EncodedMedia(1 << 20)
    for number, media in enumerate((plain, cut, plain, cut)):
        assert encoded.of(media, lambda number=number: torch.tensor([number])).item() == number % 2
    names = {ChainHasher(2, b"key").of_images([media], 0) for media in (plain, cut)}
    assert len(names) == 2


def test_other_weights_encode_anew():
    rows = ImageRows(Model(), torch.device("cpu"))
    rows.admit(admitted(0, 7))
    for _ in range(2):
        rows.of(batch(0, 0, 5))
        rows.weights_changed()
        assert rows.statistics()["image_cache_bytes"] == 0
    assert rows.statistics()["num_images_encoded"] == 2


class PlainModel(Model):
    has_grid_positions = False


def whole(start: int, value: int) -> Media:
    return msgspec.structs.replace(image(start, value), is_whole=True)


def attention_of(token_count: int) -> AttentionBatch:
    none = torch.zeros(0)
    return AttentionBatch(
        query_starts_S1=none, seq_lens_S=none, block_tables_SM=none, slots_T=none, max_query_len=token_count,
        max_seq_len=token_count,
    )  # fmt: skip


@dataclass
class Step:
    rows_S: np.ndarray
    num_tokens_S: np.ndarray
    query_starts_S1: np.ndarray
    num_computed_S: np.ndarray
    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    attention: tuple[AttentionBatch, ...]


def step(*spans: tuple[int, int]) -> Step:
    """Each row computes the positions of a span."""
    first, end = (np.array(x) for x in zip(*spans, strict=True))
    positions = np.concatenate([np.arange(*span) for span in spans])
    ids = torch.zeros(len(positions), dtype=torch.int64)
    starts = np.cumsum([0, *(end - first)])
    attention = (attention_of(len(ids)),) * 2
    return Step(np.arange(len(spans)), end - first, starts, first, ids, torch.from_numpy(positions), attention)


def test_tokens_of_a_whole_image_see_it_to_its_end():
    rows = ImageRows(PlainModel(), torch.device("cpu"))
    sequence = admitted(1, 7)
    sequence.media = [whole(2, 7), whole(4, 8)]
    rows.admit(sequence)
    for group in rows.seen(step((3, 5), (1, 7))).attention:
        assert group.ends_T.tolist() == [4, 5, *[2, 4, 4, 6, 6, 7]]
    # text alone, behind the images, and the last token of one once more: each sees itself
    for spans in ((0, 3), (6, 8)), ((0, 3), (0, 2)):
        assert all(group.ends_T is None for group in rows.seen(step(*spans)).attention)
    assert rows.seen(step((0, 1), (3, 4))).attention[0].ends_T.tolist() == [1, 4]
    _, positions, _ = rows.of(step((3, 5), (1, 7)))
    assert positions.tolist() == [3, 4, *range(1, 7)], "a model without grids has plain positions"


def test_a_step_that_ends_within_a_whole_image_is_an_error():
    rows = ImageRows(PlainModel(), torch.device("cpu"))
    sequence = admitted(0, 7)
    sequence.media = [whole(2, 7)]
    rows.admit(sequence)
    with pytest.raises(ModelError, match="ends at 3, within an image"):
        rows.seen(step((0, 3)))


@pytest.mark.parametrize(
    ("first", "end", "middle"), [(0, 4, 2), (0, 6, 2), (2, 4, 2), (2, 5, 4), (2, 9, 5), (4, 9, 6), (0, 8, 4), (3, 4, 3)]
)
def test_where_the_tokens_of_a_row_may_be_divided(first: int, end: int, middle: int):
    rows = ImageRows(PlainModel(), torch.device("cpu"))
    sequence = admitted(0, 7)
    sequence.media = [whole(2, 7)]
    rows.admit(sequence)
    assert rows.middle(0, first, end) == middle
    assert rows.middle(1, first, end) == (first + end) // 2


def test_the_least_recently_used_go_when_its_bytes_are_full():
    """Two images of two numbers fit."""
    rows = ImageRows(Model(), torch.device("cpu"), cache_bytes=2 * 2 * 4)

    def use(value: int) -> int:
        rows.admit(admitted(0, value))
        rows.of(batch(0, 0, 5))
        assert rows.statistics()["image_cache_bytes"] <= 16
        return rows.statistics()["num_images_encoded"]

    assert [use(value) for value in (7, 9, 7)] == [1, 2, 2]
    assert use(8) == 3, "9 has gone, which was used before 7"
    assert use(7) == 3
    assert use(9) == 4


def test_the_last_image_stays_without_any_bytes():
    """Its row may be in the middle of it."""
    rows = ImageRows(Model(), torch.device("cpu"), cache_bytes=0)
    rows.admit(admitted(0, 7))
    for first in range(1, 5):
        rows.of(batch(0, first, 1))
    assert rows.statistics()["num_images_encoded"] == 1
